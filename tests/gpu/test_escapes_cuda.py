"""Ways to reach a CUDA page's bytes without a dispatched operation, each on an evicted page."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.harness import MIB, open_pager
from tvm_pager.memory import Tier

pytestmark = pytest.mark.gpu


class Foreign:
    """What a library that knows nothing of torch sees of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def interface_facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {k: v for k, v in tensor.__cuda_array_interface__.items() if k != "data"}


def saved_and_loaded(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


def through_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    return host


def cupy_array(tensor: torch.Tensor) -> Any:
    cupy = importlib.import_module("cupy")
    return cupy.asnumpy(cupy.asarray(tensor))


def cupy_from_dlpack(tensor: torch.Tensor) -> Any:
    cupy = importlib.import_module("cupy")
    return cupy.asnumpy(cupy.from_dlpack(tensor))


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda t: t.cpu(),
    "to cpu": lambda t: t.to("cpu"),
    "to cpu, dtype": lambda t: t.to("cpu", torch.float64),
    "to cpu, asynchronously": through_pinned,
    "cpu and pin": lambda t: t.cpu().pin_memory(),
    "cuda": lambda t: t.cuda() is t,
    "is_pinned": lambda t: t.is_pinned(),
    "pin_memory": lambda t: t.pin_memory(),  # refused: it is not on the CPU
    "item": lambda t: t[1, 2].item(),
    "tolist": lambda t: t.tolist(),
    "float": lambda t: float(t.detach()[1, 2]),
    "repr": repr,
    "format": lambda t: f"{t[1, 2]:.3f}",
    "numpy": lambda t: t.numpy(),  # refused: it is not on the CPU
    "array": lambda t: t.__array__(),
    "as_tensor": lambda t: torch.as_tensor(Foreign(t)).cpu(),
    "interface": interface_facts,
    "from_dlpack": lambda t: torch.from_dlpack(t).cpu(),
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)).cpu(),
    "dlpack device": lambda t: tuple(map(int, t.__dlpack_device__())),
    "dlpack on a stream": lambda t: torch.from_dlpack(
        t.__dlpack__(stream=torch.cuda.Stream().cuda_stream)
    ).cpu(),
    "cupy": cupy_array,
    "cupy dlpack": cupy_from_dlpack,
    "save": saved_and_loaded,
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
}
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.arange(4096.0, device="cuda").reshape(64, 64) / 8,
    "view": lambda: (torch.arange(4096.0, device="cuda").reshape(64, 64) / 8).t()[3:],
    "parameter": lambda: nn.Parameter(torch.arange(4096.0, device="cuda").reshape(64, 64)),
}


def outcome(use: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """What a use gives, as plain data, or the class of what it raises."""
    try:
        value = use(tensor)
    except (AttributeError, TypeError, RuntimeError, BufferError) as error:
        return type(error)
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return (
                tuple(value.shape), value.dtype, value.stride(), value.device.type,
                value.is_cpu and value.is_pinned(), value.cpu().tolist(),
            )  # fmt: skip
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.fixture
def pager(tmp_path: Path) -> Iterator[Any]:
    with open_pager(tmp_path, host="64MiB") as pager:
        yield pager
        gc.collect()
        pager.check_invariants()


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_page_gives_what_plain_torch_gives(kind: str, tmp_path: Path) -> None:
    """All uses under one pager, because opening one takes longer than a use."""
    has_cupy = importlib.util.find_spec("cupy") is not None
    uses = {name: use for name, use in USES.items() if has_cupy or not name.startswith("cupy")}
    expected = {name: outcome(use, KINDS[kind]()) for name, use in uses.items()}
    got = {}
    with open_pager(tmp_path, host="64MiB") as pager:
        for name, use in uses.items():
            tensor = KINDS[kind]()
            pager.evict_all()
            assert pager.residency(tensor) is Tier.HOST, f"before {name}"
            got[name] = outcome(use, tensor)
            del tensor
            pager.step()
    wrong = {name: (expected[name], got[name]) for name in uses if got[name] != expected[name]}
    assert not wrong, "plain and paged differ:\n" + "\n".join(
        f"{name}: {str(one)[:200]} and {str(other)[:200]}" for name, (one, other) in wrong.items()
    )


@pytest.mark.filterwarnings("ignore")  # Triton's own
def test_triton_kernel_reads_and_writes_evicted_pages(pager: Any) -> None:
    pytest.importorskip("triton")
    from tests.gpu.triton_add import add_kernel

    num = 3 * MIB + 5
    x = torch.arange(num, device="cuda", dtype=torch.float32)
    y = nn.Parameter(torch.full((num,), 0.5, device="cuda"))
    out = torch.zeros(num, device="cuda")
    for turn in range(1, 3):  # compiled, then from the cache, where the launcher asks anew
        pager.evict_all()
        assert {pager.residency(t) for t in (x, y, out)} == {Tier.HOST}
        add_kernel[(-(-num // 1024),)](x, y, out, num, BLOCK=1024)
        pager.step()
        pager.evict_all()  # what the kernel wrote goes down, and comes back
        assert pager.residency(out) is Tier.HOST
        expected = torch.arange(num, dtype=torch.float32) + 0.5 * turn
        assert torch.equal(out.cpu(), expected)
        with torch.no_grad():
            y.add_(0.5)
    del x, y, out


def foreign_alias(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(Foreign(tensor))


@pytest.mark.parametrize("make", [foreign_alias, torch.from_dlpack], ids=["interface", "dlpack"])
def test_alias_holds_its_page_and_its_writes_are_kept(make: Any, pager: Any) -> None:
    x = torch.zeros(MIB, device="cuda")
    pager.evict_all()
    alias = make(x)
    pager.evict_all()
    assert pager.residency(x) is Tier.DEVICE
    alias.fill_(4)
    assert bool((x == 4).all())
    alias.mul_(2)
    del alias
    gc.collect()
    pager.step()  # `__cuda_array_interface__` holds the page until the next boundary
    assert pager.evict_all() > 0
    assert pager.residency(x) is Tier.HOST
    assert bool((x == 8).all())
    del x


def test_pointer_stays_until_the_boundary_or_the_release(pager: Any) -> None:
    x, y = torch.zeros(MIB, device="cuda"), torch.zeros(MIB, device="cuda")
    pager.evict_all()
    addresses = [x.data_ptr(), y.data_ptr()]
    assert 0 not in addresses
    assert pager.stats().num_exposed == 2
    assert pager.release(x)
    pager.evict_all()
    assert pager.residency(x) is Tier.HOST
    assert pager.residency(y) is Tier.DEVICE
    assert y.data_ptr() == addresses[1]
    pager.step()
    pager.evict_all()
    assert pager.residency(y) is Tier.HOST
    del x, y
