"""Host memory lies near the GPU: which node that is, and what the kernel is asked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.locker import RecordingLocker
from tvm_pager.transfer import numa, region, torch_backend
from tvm_pager.transfer.numa import NumaNode, node_near
from tvm_pager.transfer.region import Region, host_node_of
from tvm_pager.transfer.torch_backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = mmap.PAGESIZE
GPU = "0000:3b:00.0"
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_F_ADDR = 2


def machine(root: Path, node: str | None, nodes: str | None = "0-1\n") -> Path:
    """A made-up /sys: the GPU's node, and the nodes that have memory."""
    if node is not None:
        device = root / "sys/bus/pci/devices" / GPU
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node)
    if nodes is not None:
        folder = root / "sys/devices/system/node"
        folder.mkdir(parents=True)
        (folder / "has_memory").write_text(nodes)
    return root


class Kernel:
    """Remembers what `mbind` is asked for, and refuses with an errno if told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.num_words: list[int] = []
        self.code = 0

    def syscall(
        self, number: int, address: int, nbytes: int, mode: int, mask: Any, maxnode: int, flags: int
    ) -> int:
        self.num_words.append(len(mask))
        bits = sum(word << 64 * index for index, word in enumerate(mask))
        assert len(mask) * 64 >= maxnode - 1, "the kernel reads one bit less than it is told"
        nodes = tuple(n for n in range(maxnode - 1) if bits >> n & 1)
        self.calls.append((number, address, nbytes, mode, *nodes, flags))
        ctypes.set_errno(self.code)
        return -1 if self.code else 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(numa, "_LIBC", kernel)
    monkeypatch.setattr(numa, "_MBIND", 237)
    return kernel


@pytest.mark.parametrize(
    ("node", "nodes", "expected"),
    [
        ("1\n", "0-1\n", 1),
        ("0\n", "0-1\n", 0),
        ("5\n", "0,2-3,5\n", 5),
        ("-1\n", "0-1\n", None),  # the firmware does not say
        (None, "0-1\n", None),  # no such file, as in some containers
        ("", "0-1\n", None),
        ("0\n", "0\n", None),  # one node: it is there anyway
        ("1\n", None, None),
        ("1\n", "none\n", None),
        ("2\n", "0-1\n", None),  # a node without memory
    ],
)
def test_the_node_is_the_gpus_where_there_is_a_choice(
    tmp_path: Path, node: str | None, nodes: str | None, expected: int | None
) -> None:
    found = node_near(GPU, machine(tmp_path, node, nodes))
    assert (None if found is None else found.number) == expected


def test_on_this_machine_a_node_is_preferred_only_where_there_are_several() -> None:
    folder = Path("/sys/devices/system/node")
    numbers = {int(path.name[4:]) for path in folder.glob("node[0-9]*")}
    devices = Path("/sys/bus/pci/devices")
    found = [node_near(path.name) for path in (devices.iterdir() if devices.exists() else ())]
    chosen = {node.number for node in found if node is not None}
    assert chosen <= numbers
    assert not chosen or len(numbers) > 1
    assert host_node_of(torch.device("cpu")) is None


@pytest.mark.parametrize(("number", "num_words"), [(0, 1), (1, 1), (63, 1), (64, 2), (200, 4)])
def test_the_kernel_is_asked_to_prefer_the_node(
    kernel: Kernel, number: int, num_words: int
) -> None:
    node = NumaNode(number)
    node.prefer(1 << 40, 3 * PAGE)
    node.prefer(1 << 41, PAGE)
    assert kernel.calls == [
        (237, 1 << 40, 3 * PAGE, 1, number, 0),
        (237, 1 << 41, PAGE, 1, number, 0),
    ]
    assert kernel.num_words == [num_words] * 2
    assert node.notices == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_system_that_refuses_is_told_of_once_and_not_asked_again(
    kernel: Kernel, code: int
) -> None:
    node = NumaNode(1)
    kernel.code = code
    for _ in range(3):
        node.prefer(1 << 40, PAGE)
    assert len(kernel.calls) == 1
    (text,) = node.notices
    assert f"node 1, next to the GPU ({os.strerror(code)})" in text


def test_a_processor_whose_call_is_not_known_is_not_asked(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "_MBIND", None)
    node = NumaNode(1)
    node.prefer(1 << 40, PAGE)
    assert (kernel.calls, node.notices) == ([], [])


@pytest.mark.skipif(os.uname().machine not in _GET_MEMPOLICY, reason="get_mempolicy's number")
def test_the_real_call_is_made_or_its_refusal_is_told() -> None:
    """Node 0 is everywhere."""
    with mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        node = NumaNode(0)
        node.prefer(address, 4 * PAGE)
        mode = ctypes.c_int(-1)
        number = _GET_MEMPOLICY[os.uname().machine]
        libc = ctypes.CDLL(None, use_errno=True)
        at = ctypes.c_void_p(address)
        code = libc.syscall(number, ctypes.byref(mode), None, ctypes.c_ulong(0), at, _MPOL_F_ADDR)
        assert node.notices if code else (mode.value == 1) is not bool(node.notices)
        mapping[:] = bytes(4 * PAGE)  # whatever was answered, the memory can be used


# --- who asks ------------------------------------------------------------------------------------


def test_a_region_prefers_the_node_before_it_is_touched(kernel: Kernel) -> None:
    steps: list[str] = []
    mapped = Region(0, 4 * PAGE)
    mapped.map(
        RecordingLocker(before=lambda call: steps.append("lock")),
        node=NumaNode(1),
        touch_with=lambda address, nbytes: steps.append(f"touch after {len(kernel.calls)}"),
    )
    assert steps == ["touch after 1", "lock"]
    assert kernel.calls == [(237, mapped.address, mapped.nbytes, 1, 1, 0)]


@pytest.mark.parametrize("page_lock", [True, False])
def test_slab_and_staging_of_a_backend_lie_on_the_node_of_its_device(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page_lock: bool
) -> None:
    asked: list[torch.device] = []

    def near(device: torch.device) -> NumaNode:
        asked.append(device)
        return NumaNode(1)

    monkeypatch.setattr(torch_backend, "host_node_of", near)
    options = torch_backend.TorchBackendOptions(
        measure=False, margin_bytes=0, page_lock=page_lock, locker=RecordingLocker()
    )
    kernel.code = 0
    backend = TorchBackend("cpu", 8 << 20, tmp_path, 1 << 20, engine="posix", options=options)
    try:
        backend.grow_host(8 << 20)
        assert asked == [torch.device("cpu")]
        assert sum(nbytes for _, _, nbytes, *_ in kernel.calls) == backend.host_mapped_bytes
        assert backend.notices == []
    finally:
        backend.close()


def test_a_refusal_is_among_the_notices_of_the_backend(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "host_node_of", lambda device: NumaNode(1))
    kernel.code = errno.EPERM
    backend = TorchBackend("cpu", 8 << 20, None, 0)
    try:
        before = backend.notices
        backend.grow_host(8 << 20)
        (text,) = backend.notices
        assert before == []
        assert "node 1" in text
    finally:
        backend.close()


def properties(**values: int) -> Callable[[object], object]:
    return lambda device: type("Properties", (), values)()


def test_a_gpus_address_is_written_as_the_kernel_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(region, "node_near", seen.append)
    cuda = torch.device("cuda", 0)
    for values in (
        {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0},
        {"pci_domain_id": 0x10000, "pci_bus_id": 0xC1, "pci_device_id": 0x1F},
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties(**values))
        host_node_of(cuda)
    assert seen == ["0000:3b:00.0", "10000:c1:1f.0"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(multi_processor_count=1))
    assert host_node_of(cuda) is None
    assert len(seen) == 2, "torch does not say"
