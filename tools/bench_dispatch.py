"""Measures what an operation on resident pages costs beside plain torch, on one thread.

Three variants of each operation, interleaved so that a busy machine hits all of them alike:

    plain        plain tensors, no pager anywhere
    dispatched   the same tensors as resident pages, inside a `Pager` without a budget
    guarded      the same pages with torch's dispatch guard held, as in a guarded region

    python tools/bench_dispatch.py
    python tools/bench_dispatch.py --torch-device cuda --json dispatch.json

A figure is the best round of several; each round is the median of several blocks. On CUDA it is the
time to issue an operation, not to run it. Exit status 1 if `torch.add`, dispatched, costs more than
the target times plain.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import tvm_pager

__all__ = ["OPERATIONS", "Row", "main", "measure"]

TARGET_RATIO = 9.0  # dispatched / plain of `torch.add` on 8x8

Tensors = tuple[torch.Tensor, torch.Tensor]
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": torch.add,
    "mul_": lambda x, y: x.mul_(y),
    "view": lambda x, _: x.view(64),
    "mm": torch.mm,
    "cat": lambda x, y: torch.cat((x, y)),
}


@dataclass
class Row:
    """One operation: nanoseconds per call, the best round of each variant, and every round."""

    operation: str
    plain_ns: float = 0.0
    dispatched_ns: float = 0.0
    guarded_ns: float = 0.0
    rounds_ns: dict[str, list[float]] = field(default_factory=dict)

    @property
    def dispatched_ratio(self) -> float:
        return self.dispatched_ns / self.plain_ns

    @property
    def guarded_ratio(self) -> float:
        return self.guarded_ns / self.plain_ns

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the largest ratio of dispatched to plain in one round."""
        pairs = zip(self.rounds_ns["dispatched"], self.rounds_ns["plain"], strict=True)
        ratios = [dispatched / plain for dispatched, plain in pairs]
        return min(ratios), max(ratios)


def measure(
    device: str, *, num_rounds: int = 7, num_blocks: int = 9, num_calls: int = 1000
) -> list[Row]:
    """Measures every operation; sets torch to one thread and back."""
    rows = {name: Row(name) for name in OPERATIONS}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(num_rounds):
            _measure_round(device, rows, num_blocks, num_calls)
    finally:
        torch.set_num_threads(num_threads)
    for row in rows.values():
        row.plain_ns = min(row.rounds_ns["plain"])
        row.dispatched_ns = min(row.rounds_ns["dispatched"])
        row.guarded_ns = min(row.rounds_ns["guarded"])
    return list(rows.values())


def _measure_round(device: str, rows: dict[str, Row], num_blocks: int, num_calls: int) -> None:
    plain = _make_tensors(device)
    times = {name: {"plain": _time(name, plain, num_blocks, num_calls)} for name in OPERATIONS}
    # A pager of its own for each round, because plain torch must be measured without one.
    with tvm_pager.Pager(torch_device=device, host="1MiB") as pager:
        paged = _make_tensors(device)
        if not all(pager.is_paged(tensor) for tensor in paged):
            raise RuntimeError("tensors made inside the pager are not pages: nothing to measure")
        for name in OPERATIONS:
            times[name]["dispatched"] = _time(name, paged, num_blocks, num_calls)
            with torch._C._DisableTorchDispatch():
                times[name]["guarded"] = _time(name, paged, num_blocks, num_calls)
        del paged
    for name, row in rows.items():
        for variant, ns in times[name].items():
            row.rounds_ns.setdefault(variant, []).append(ns)


def _make_tensors(device: str) -> Tensors:
    # Ones, so that thousands of multiplications in place stay what they are.
    return torch.ones(8, 8, device=device), torch.ones(8, 8, device=device)


def _time(name: str, tensors: Tensors, num_blocks: int, num_calls: int) -> float:
    """Gives the median over blocks of the nanoseconds per call."""
    operation, (x, y) = OPERATIONS[name], tensors
    for _ in range(num_calls // 10 + 1):
        operation(x, y)
    blocks = []
    for _ in range(num_blocks):
        _synchronise(x.device)  # so that a full launch queue is not charged to the next block
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            operation(x, y)
        blocks.append((time.perf_counter_ns() - started_ns) / num_calls)
    return statistics.median(blocks)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and returns 0 if the target is met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=9, help="per round and variant")
    parser.add_argument("--calls", type=int, default=1000, help="per block")
    parser.add_argument(
        "--target", type=float, default=TARGET_RATIO, help=f"default {TARGET_RATIO:g}; 0: none"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    args = parser.parse_args(argv)
    rows = measure(
        args.torch_device, num_rounds=args.rounds, num_blocks=args.blocks, num_calls=args.calls
    )
    system = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "torch_device": args.torch_device,
    }
    if args.json:
        document = {
            **system,
            "target_ratio": args.target,
            "rows": [
                {**asdict(row), "dispatched_ratio": row.dispatched_ratio, "spread": row.spread}
                for row in rows
            ],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return _print(rows, system, args.target)


def _print(rows: list[Row], system: dict[str, str], target: float) -> int:
    print(", ".join(f"{name} {value}" for name, value in system.items()))
    print(
        f"{'8x8':<6} {'plain':>9} {'dispatched':>11} {'guarded':>9} "
        f"{'dispatched/plain':>17} {'guarded/plain':>14}"
    )
    for row in rows:
        low, high = row.spread
        print(
            f"{row.operation:<6} {row.plain_ns:>6.0f} ns {row.dispatched_ns:>8.0f} ns "
            f"{row.guarded_ns:>6.0f} ns {row.dispatched_ratio:>8.2f} ({low:.1f}-{high:.1f}) "
            f"{row.guarded_ratio:>12.2f}"
        )
    if not target:
        return 0
    ratio = next(row for row in rows if row.operation == "add").dispatched_ratio
    is_met = ratio <= target
    print(
        f"target: add dispatched at most {target:g} times plain: {ratio:.2f}, "
        f"{'met' if is_met else 'MISSED'}"
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
