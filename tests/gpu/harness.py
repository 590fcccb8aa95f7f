"""Runs one program in plain torch and again under a pager, both on CUDA, and compares the bits.

Budgets follow from the plain run's peak. What the process holds beside the program (cuBLAS keeps a
workspace of 32 MiB for each stream and thread) is measured and added, because a device budget is a
promise about the whole process. The plain run comes twice: the first one warms the libraries, and
the second one proves that the oracle repeats itself.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import tvm_pager
from tests.parity.harness import BUILD_SEED, STEP_SEED, leaves, moved_bytes, settle, states
from tests.trials.harness import spill_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.parity.programs import Program

MIB = 1 << 20
SLEEP_CYCLES = 200_000_000  # a tenth of a second: far longer than the host needs for what follows


@dataclass(frozen=True)
class Taken:
    """One tensor with its bytes, copied out."""

    facts: tuple[Any, ...]
    raw: torch.Tensor  # uint8, on the CPU


@dataclass(frozen=True)
class Need:
    """Device bytes of a plain run: what was there before, and what the program added at most."""

    base_bytes: int
    peak_bytes: int

    def budget_bytes(self, fraction: float) -> int:
        return self.base_bytes + int(fraction * self.peak_bytes) // 512 * 512


def settled_bytes() -> int:
    """Device bytes that tensors hold once all garbage is gone; unused blocks go back to CUDA."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@contextlib.contextmanager
def open_pager(tmp_path: Path, **options: Any) -> Iterator[Any]:
    """An entered pager with a gigabyte beside what the process holds; `options` win."""
    settings: dict[str, Any] = {
        "device": settled_bytes() + 1024 * MIB,
        "host": "640MiB",
        "torch_device": "cuda",
        "engine": "posix",
        "strict": True,
    }
    if "nvme_bytes" in options:
        settings["nvme"] = spill_folder(tmp_path)
    with tvm_pager.Pager(**(settings | options)) as pager:
        yield pager


def take(tensor: torch.Tensor) -> Taken:
    with torch.no_grad():
        raw = tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8)
    facts = (
        tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.storage_offset(),
        str(tensor.device), tensor.requires_grad, isinstance(tensor, torch.nn.Parameter),
    )  # fmt: skip
    return Taken(facts, raw)


def collect(name: str, value: Any, into: dict[str, Any]) -> None:
    for label, leaf in leaves(name, value):
        into[label] = take(leaf) if isinstance(leaf, torch.Tensor) else leaf


def play(program: Program, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Runs all steps of a program that is already built, and copies out all that it leaves."""
    torch.manual_seed(STEP_SEED)
    result: dict[str, Any] = {}
    program.start(model, optimizer)
    for index in range(program.num_steps):
        collect(f"step {index}", program.step(model, optimizer, index), result)
    for name, parameter in model.named_parameters():
        result[f"weight {name}"] = take(parameter)
        result[f"gradient {name}"] = None if parameter.grad is None else take(parameter.grad)
    for name, buffer in model.named_buffers():
        result[f"buffer {name}"] = take(buffer)
    for label, state in states(optimizer):
        collect(f"state {label}", state, result)
    result["random state"] = take(torch.cuda.get_rng_state())
    return result


def build(program: Program) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(BUILD_SEED)
    with torch.device("cuda"):
        return program.build()


def run_plain(program: Program) -> tuple[dict[str, Any], Need]:
    program = copy.copy(program)
    base_bytes = settled_bytes()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = build(program)
    with torch.device("cuda"):
        result = play(program, model, optimizer)
    peak_bytes = torch.cuda.max_memory_allocated()
    return result, Need(base_bytes, peak_bytes - base_bytes)


def run_paged(
    program: Program, tmp_path: Path, mode: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Gives result and statistics. "context": built inside; "adopt": built before, then paged."""
    program = copy.copy(program)
    built = build(program) if mode == "adopt" else None
    with open_pager(tmp_path, **settings) as pager:
        if built is None:
            built = build(program)
        else:
            tvm_pager.page(*built)
        with torch.device("cuda"):
            result = play(program, *built)
        del built, program
        torch.cuda.synchronize()
        return result, settle(pager)


def differences(plain: dict[str, Any], paged: dict[str, Any]) -> list[str]:
    found = [f"only in one run: {name}" for name in sorted(plain.keys() ^ paged.keys())]
    for name in plain.keys() & paged.keys():
        one, other = plain[name], paged[name]
        if not isinstance(one, Taken) or not isinstance(other, Taken):
            if one != other and repr(one) != repr(other):  # NaN equals itself here
                found.append(f"{name}: plain {one!r}, paged {other!r}")
        elif one.facts != other.facts:
            found.append(f"{name}: plain {one.facts}, paged {other.facts}")
        elif not torch.equal(one.raw, other.raw):
            num_bytes = int((one.raw != other.raw).sum())
            found.append(f"{name}: {num_bytes} of {len(one.raw)} bytes differ")
    return sorted(found)


def same(
    program: Program,
    tmp_path: Path,
    *,
    fraction: float = 0.3,
    nvme: bool = False,
    mode: str = "context",
    **options: Any,
) -> Any:
    """Requires equal bits, a device within its budget, and that every tier was really used.

    Args:
        program: under test; runs three times, on a copy each.
        tmp_path: for the swap file.
        fraction: of the plain run's peak, that the device may hold.
        nvme: whether the host tier is too small, so that pages go to the disk.
        mode: see `run_paged`.
        options: of the pager; they win.

    Returns:
        The pager's statistics.
    """
    first, _ = run_plain(program)
    plain, need = run_plain(program)
    assert differences(first, plain) == [], "plain torch does not repeat itself: no oracle"
    settings: dict[str, Any] = {"device": need.budget_bytes(fraction), "segment_bytes": "1MiB"}
    if nvme:
        settings |= {"host": max(16 * MIB, need.peak_bytes // 5), "nvme_bytes": "3GiB"}
    else:
        settings |= {"host": 64 * MIB + need.peak_bytes * 5 // 4}
    paged, stats = run_paged(program, tmp_path, mode, settings | options)
    found = differences(plain, paged)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20]) + f"\n{stats}"
    assert stats.num_evictions > 0, f"nothing was evicted:\n{stats}"
    assert stats.num_faults > 0, f"nothing was paged in:\n{stats}"
    assert stats.num_policy_errors == 0, str(stats)
    assert mode == "adopt" or stats.device_peak_bytes <= stats.device_budget_bytes, str(stats)
    if nvme:
        assert moved_bytes(stats, "d2n", "h2n") > 0, f"nothing was written to NVMe:\n{stats}"
        assert moved_bytes(stats, "n2d", "n2h") > 0, f"nothing was read from NVMe:\n{stats}"
    return stats
