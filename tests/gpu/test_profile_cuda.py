"""The hardware profile of a GPU: every device figure is the GPU's, and nothing stays behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.harness import settled_bytes
from tests.tools.profile_rig import TINY, no_pager
from tvm_pager import Pager
from tvm_pager.observe.profile import copies
from tvm_pager.observe.profile.identity import identify
from tvm_pager.observe.profile.measure import measure
from tvm_pager.runtime.device import prepare_cuda

if TYPE_CHECKING:
    from tvm_pager.observe.profile.dispatch import MakePager
    from tvm_pager.planning import HardwareProfile

pytestmark = pytest.mark.gpu
MIB = 1 << 20
# Large enough for copies to overlap, small enough for a test.
SMALL = dataclasses.replace(
    TINY, round_s=0.005, link_bytes=64 * MIB, link_round_bytes=256 * MIB, link_chunks=(MIB, 8 * MIB)
)


@pytest.fixture
def before_bytes() -> int:
    """Device bytes with cuBLAS's workspaces, which stay for the life of the process, in place."""
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_cuda(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.mm(*(torch.ones(32, 32, dtype=dtype, device=device) for _ in range(2)))
    return settled_bytes()


def measure_gpu(nvme: Path | None, make_pager: MakePager) -> HardwareProfile:
    device = torch.device("cuda", torch.cuda.current_device())
    return measure(device, nvme, identify(device, nvme), SMALL, make_pager, lambda _: None)


def test_every_device_figure_is_the_gpus(tmp_path: Path, before_bytes: int) -> None:
    precision = torch.backends.cuda.matmul.fp32_precision
    profile = measure_gpu(tmp_path, Pager)
    assert not profile.device.is_stand_in
    assert profile.device.name in profile.machine.device_names
    assert profile.machine.driver is not None
    assert profile.device.total_bytes == torch.cuda.mem_get_info()[1]
    has_tf32 = torch.cuda.get_device_capability() >= (8, 0)
    assert (profile.device.matmul_flop_per_s.tf32 is not None) == has_tf32
    assert {"raw", "posix"} <= {disk.engine for disk in profile.disks}
    # A copy over a bus, and not one inside of either memory.
    assert 1e9 < profile.h2d.by_chunk.at(8 * MIB) < 1e12
    assert 1e9 < profile.d2h.by_chunk.at(8 * MIB) < 1e12
    assert profile.h2d.duplex_slowdown(8 * MIB) < 3
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert settled_bytes() == before_bytes
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_between_copies_leaves_no_memory(
    monkeypatch: pytest.MonkeyPatch, before_bytes: int
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "_spans", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_gpu(None, no_pager)
    assert settled_bytes() == before_bytes


def test_the_first_pager_of_a_machine_measures_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pager that is measured planned too, and had itself measured, without an end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Pager(device="256MiB", host="64MiB") as pager:
        assert pager.config.policy == "lookahead"
        assert torch.ones(4, device="cuda").sum().item() == 4
    assert len(list(tmp_path.glob("tvm_pager/profile-*-quick.json"))) == 1
