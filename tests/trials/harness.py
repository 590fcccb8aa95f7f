"""The question that most trials ask: does a program compute the same numbers when it is paged?

`same` runs a program twice from the same seeds, plain and under a pager with tiny budgets, and
compares what it returns bit by bit, together with everything else that user code can see of a
tensor. The oracle is plain torch; nothing of tvm_pager takes part in it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tvm_pager
from tests.leaks import left_behind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

KIB = 1024
WIDTH = 64
LAYER_BYTES = WIDTH * WIDTH * 4  # one weight of `mlp`
HOST_BYTES = 256 * KIB  # the least that a pager with a swap file takes; half of it is staging
PAGE_STEP = 4 * KIB  # below the device a page takes a multiple of this


# --- pagers ---


def spill_folder(tmp_path: Path) -> Path:
    """A private directory for swap files."""
    folder = tmp_path / "spill"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


_num_pagers = itertools.count()


def _freeze_what_lives() -> None:
    """Takes torch's own objects out of collections: with them, each of many takes 150 ms."""
    if next(_num_pagers) % 20 == 0:
        gc.collect()
        gc.freeze()


def small_pager(
    tmp_path: Path,
    *,
    device: int = 64 * KIB,
    host: int = HOST_BYTES,
    nvme: bool | str = True,
    **options: Any,
) -> Any:
    """A pager on CPU memory that holds a few tensors.

    Args:
        device: bytes of device budget.
        host: bytes of host budget.
        nvme: whether there is a swap file, or where.
        options: anything else that `Pager` takes; overrides what is set here.
    """
    _freeze_what_lives()
    settings: dict[str, Any] = {
        "device": device,
        "host": host,
        "policy": "lru",
        "torch_device": "cpu",
        "engine": "posix",
        "segment_bytes": PAGE_STEP,
        "check": 1,
        "strict": True,
    }
    if nvme:
        folder = nvme if isinstance(nvme, str) else str(spill_folder(tmp_path))
        settings |= {"nvme": folder, "nvme_bytes": "64MiB"}
    return tvm_pager.Pager(**(settings | options))


def assert_within_budgets(stats: Any) -> None:
    """No tier ever held a byte more than it may."""
    for tier in ("device", "host", "nvme"):
        budget = getattr(stats, f"{tier}_budget_bytes")
        peak = getattr(stats, f"{tier}_peak_bytes")
        assert budget is None or peak <= budget, f"{tier}: {peak} bytes over {budget}"


def assert_nothing_left(tmp_path: Path) -> None:
    """No file, open descriptor or thread remains of any pager."""
    assert left_behind(tmp_path / "spill") == []


class Ballast:
    """Pages that together fill the slab: using them all pushes everything else on to NVMe."""

    def __init__(self, pager: Any) -> None:
        self._pager = pager
        size = 8 * KIB
        self._pages = [torch.zeros(size, dtype=torch.uint8) for _ in range(HOST_BYTES // size)]

    def press(self) -> None:
        self._pager.evict_all()
        for page in self._pages:
            page.add_(1)
        self._pager.evict_all()


def push_to_nvme(pager: Any, *tensors: torch.Tensor) -> None:
    """Pushes everything past a slab of `HOST_BYTES` to the swap file, `tensors` included."""
    Ballast(pager).press()
    assert {pager.residency(t).name for t in tensors} <= {"NVME"}


def numbered(num: int, first: int = 0) -> list[torch.Tensor]:
    """Pages of 4 KiB, each filled with its own number, from `first` on."""
    return [torch.full((1024,), float(i)) for i in range(first, first + num)]


def create_until_refused(kept: list[torch.Tensor]) -> tvm_pager.PagerError:
    """Goes on with `kept` as `numbered` would, until a page is refused; gives the error."""
    for _ in range(1000):
        try:
            kept += numbered(1, first=len(kept))
        except tvm_pager.PagerError as error:
            return error
    raise AssertionError(f"{len(kept)} pages, and none was refused")


# --- what a program returned, as plain data ---


def frozen(value: Any, *, version: bool = True) -> Any:
    """A copy without torch in it: bytes, sizes, strides; nested like `value`."""
    if isinstance(value, torch.Tensor):
        return _record(value, version=version)
    if isinstance(value, dict):
        return {key: frozen(item, version=version) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item, version=version) for item in value]
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, float):
        return value.hex()
    return value


def _record(tensor: torch.Tensor, *, version: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "dtype": str(tensor.dtype),
        "shape": tuple(tensor.shape),
        "device": str(tensor.device),
        "layout": str(tensor.layout),
        "requires_grad": tensor.requires_grad,
        "is_parameter": isinstance(tensor, nn.Parameter),
    }
    if version and not tensor.is_inference():
        record["version"] = tensor._version
    if tensor.layout is torch.sparse_coo:
        record["coalesced"] = tensor.is_coalesced()
        record["indices"] = frozen(tensor.detach()._indices(), version=False)
        record["values"] = frozen(tensor.detach()._values(), version=False)
        return record
    record["stride"] = tensor.stride()
    record["data"] = data_bytes(tensor)
    return record


def data_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in logical order."""
    with torch.no_grad():
        # A copy, because an array over the tensor's own page would count as a write to it.
        copied = (
            tensor.detach()
            .resolve_conj()
            .resolve_neg()
            .clone(memory_format=torch.contiguous_format)
        )
        return copied.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(expected: Any, got: Any, where: str = "result") -> None:
    """Bitwise equality that names the first difference."""
    assert type(expected) is type(got), f"{where}: {type(expected)} and {type(got)}"
    if isinstance(expected, dict):
        assert list(expected) == list(got), f"{where}: keys"
        for key in expected:
            assert_equal(expected[key], got[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(expected) == len(got), f"{where}: {len(expected)} and {len(got)} items"
        for index, (left, right) in enumerate(zip(expected, got, strict=True)):
            assert_equal(left, right, f"{where}[{index}]")
    elif isinstance(expected, bytes):
        assert len(expected) == len(got), f"{where}: {len(expected)} and {len(got)} bytes"
        wrong = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
        assert not wrong, f"{where}: {len(wrong)} of {len(expected)} bytes differ, at {wrong[0]}"
    else:
        assert expected == got, f"{where}: {expected!r} and {got!r}"


# --- running a program twice ---


class EvictEach(TorchDispatchMode):
    """Pushes everything off the device after each operation."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.run.evict()
        return out


@dataclass(frozen=True)
class Run:
    """What a program may ask of the run that it is in; all of it is a no-op in the plain one."""

    pager: Any | None
    ballast: Ballast | None = None

    def evict(self) -> None:
        if self.ballast is not None:
            self.ballast.press()
        elif self.pager is not None:
            self.pager.evict_all()

    def page(self, *objects: Any) -> None:
        if self.pager is not None:
            tvm_pager.page(*objects, pager=self.pager)

    def unpage(self, *objects: Any) -> None:
        if self.pager is not None:
            tvm_pager.unpage(*objects)

    def evicting_each(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.pager is None else EvictEach(self)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def same(
    f: Callable[[Run], Any],
    tmp_path: Path,
    *,
    enter: bool = True,
    evicts: bool = True,
    deep: bool = False,
    **options: Any,
) -> Any:
    """Runs `f` plain and paged and requires bitwise equal results and generator states.

    Args:
        enter: run `f` inside the pager, so that what it makes becomes pages; if not, `f` adopts by
            `run.page`.
        evicts: require that something was evicted, so that a run which never paged cannot pass.
        deep: `run.evict` pushes everything past the slab to NVMe; needs `enter`.
        options: those of `small_pager`.

    Returns:
        The paged run's statistics.
    """
    seed_all(0)
    expected = frozen(f(Run(None)))
    expected_state = torch.get_rng_state()
    gc.collect()

    seed_all(0)
    pager = small_pager(tmp_path, **options)
    with contextlib.closing(pager), pager if enter else contextlib.nullcontext():
        got = frozen(f(Run(pager, Ballast(pager) if deep else None)))
        gc.collect()
        pager.check_invariants()
        stats = pager.stats()
    got_state = torch.get_rng_state()

    assert_equal(expected, got)
    assert torch.equal(expected_state, got_state), "the generator was left in another state"
    assert not evicts or stats.num_evictions > 0, "nothing was evicted: the trial shows nothing"
    assert not deep or stats.bytes_by_lane["n2d"] + stats.bytes_by_lane["n2h"] > 0
    assert stats.num_policy_errors == 0
    assert_within_budgets(stats)
    assert_nothing_left(tmp_path)
    return stats


def num_pages(pager: Any) -> int:
    """Pages in the books, once what is dead has left them."""
    gc.collect()
    return pager.stats().num_pages


def bytes_written(stats: Any) -> int:
    """Bytes that left the device, wherever they went."""
    return stats.bytes_by_lane["d2h"] + stats.bytes_by_lane["d2n"]


def bytes_to_nvme(stats: Any) -> int:
    return stats.bytes_by_lane["h2n"] + stats.bytes_by_lane["d2n"]


# --- small programs ---


def mlp(num_layers: int = 4, width: int = WIDTH) -> nn.Sequential:
    """`num_layers` square layers with a nonlinearity between them."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, rows: int = 8, width: int = WIDTH) -> torch.Tensor:
    """The same numbers at each call, whatever was drawn before."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, width, generator=generator)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Weights, gradients, buffers and optimizer states by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    out: dict[str, Any] = {
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "grads": {name: p.grad for name, p in model.named_parameters()},
    }
    if optimizer is not None:
        out["states"] = {names.get(id(p), "?"): dict(state) for p, state in optimizer.state.items()}
    return out


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    first: int = 0,
    width: int = WIDTH,
) -> list[float]:
    """An ordinary loop; everything leaves the device between its phases."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(batch(step, width=width)).square().mean()
        run.evict()
        loss.backward()
        run.evict()
        optimizer.step()
        losses.append(loss.item())
    return losses
