"""Measures what an operation, and the move of a page, cost the processor while a plan is followed.

    python tools/bench_moves.py                                    # pages of a few KiB, on the CPU
    python tools/bench_moves.py --torch-device cuda --json moves.json

The model has the operations of a 3.5 B Llama on tensors so small that kernels and copies take next
to nothing. Three copies of it train in turns: plain; paged, and all resident; paged, under a share
of what it needs, following a plan. Processor time is of all threads: the interpreter runs one at a
time, so what the lanes take is lost to the launching thread too.

Full collections of Python's garbage collector are counted beside, in as many steps: they take time
in proportion to all objects of the process, and a step that one falls into is longer by that.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

import tvm_pager
from tools import bench_llama
from tvm_pager.runtime import dispatch

__all__ = ["Costs", "main", "measure"]


@dataclass
class Costs:
    """Medians of one run. Milliseconds of processor time for each step, and counts of it."""

    plain_ms: float
    resident_ms: float
    planned_ms: float
    num_operations: float
    num_moves: float  # evictions and fetches
    num_slow: float  # operations that leave the fast path of dispatch.py
    collections: float  # full garbage collections, each of them taking
    collection_ms: float

    @property
    def operation_us(self) -> float:
        """What paging adds to an operation."""
        return (self.resident_ms - self.plain_ms) * 1e3 / self.num_operations

    @property
    def move_us(self) -> float:
        """What one move adds, with all that it makes operations wait for."""
        return (self.planned_ms - self.resident_ms) * 1e3 / max(1.0, self.num_moves)


def measure(args: argparse.Namespace) -> Costs:
    """Trains the three models in turns."""
    plain, resident, planned = (bench_llama.Trainer(args) for _ in range(3))
    roomy = tvm_pager.page(
        resident.model, resident.optimizer, torch_device=args.torch_device, host="16MiB"
    )
    try:
        _processor_s(resident, args.warmup)
        need_bytes = roomy.stats().device_peak_bytes
        tight = tvm_pager.page(
            planned.model,
            planned.optimizer,
            torch_device=args.torch_device,
            host=max(4 * need_bytes, 16 << 20),
            policy=args.policy,
        )
        try:
            for trainer in (plain, planned):
                _processor_s(trainer, 2)
            # What is no page counts: on a GPU the other models, and workspaces.
            beside_bytes = tight._backend.device_overhead_bytes()
            tight.set_budgets(device=int(need_bytes * args.share) + beside_bytes)
            _processor_s(planned, args.warmup)
            before = tight.stats()
            rounds = [
                [_processor_s(trainer, args.steps) for trainer in (plain, resident, planned)]
                for _ in range(args.blocks)
            ]
            after = tight.stats()
            collections_s = _collections_s(planned, args.steps * args.blocks)
            num_slow = _num_slow(planned, args.steps) / args.steps
        finally:
            tight.close()
    finally:
        roomy.close()
    num_steps = args.steps * args.blocks
    return Costs(
        *(statistics.median(column) * 1e3 for column in zip(*rounds, strict=True)),
        (after.num_operations - before.num_operations) / num_steps,
        2 * (after.num_evictions - before.num_evictions) / num_steps,
        num_slow,
        len(collections_s) / num_steps,
        statistics.mean(collections_s) * 1e3 if collections_s else 0.0,
    )


def _collections_s(trainer: bench_llama.Trainer, num_steps: int) -> list[float]:
    """How long each full garbage collection in these steps took."""
    started_s, took_s = 0.0, list[float]()

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal started_s
        if info["generation"] == 2 and phase == "start":
            started_s = time.perf_counter()
        elif info["generation"] == 2:
            took_s.append(time.perf_counter() - started_s)

    gc.callbacks.append(note)
    try:
        bench_llama.time_block(trainer, num_steps)
    finally:
        gc.callbacks.remove(note)
    return took_s


def _num_slow(trainer: bench_llama.Trainer, num_steps: int) -> int:
    num, run = itertools.count(), dispatch.run_operator

    def counted(*args: Any) -> Any:
        next(num)
        return run(*args)

    with mock.patch.object(dispatch, "run_operator", counted):
        bench_llama.time_block(trainer, num_steps)
    return next(num)


def _processor_s(trainer: bench_llama.Trainer, num_steps: int) -> float:
    started_s = time.process_time()
    bench_llama.time_block(trainer, num_steps)
    return (time.process_time() - started_s) / num_steps


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints one line, and returns 0; 1 if nothing moved."""
    args = _parse(argv)
    torch.utils.deterministic.fill_uninitialized_memory = False  # as in bench_llama.py
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # an idle worker's spinning is processor time too
    try:
        costs = measure(args)
    finally:
        torch.set_num_threads(num_threads)
    print(
        f"plain {costs.plain_ms:.1f} ms a step, paged and resident {costs.resident_ms:.1f}, "
        f"{args.policy} {costs.planned_ms:.1f}; {costs.num_operations:,.0f} operations, "
        f"{costs.num_slow:,.0f} of them not on the fast path, "
        f"{costs.num_moves:,.0f} moves; +{costs.operation_us:.1f} us an operation, "
        f"+{costs.move_us:.1f} us a move; a full garbage collection of "
        f"{costs.collection_ms:.0f} ms every {1 / (costs.collections or math.nan):.0f} steps"
    )
    if args.json:
        figures = {**asdict(costs), "operation_us": costs.operation_us, "move_us": costs.move_us}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if costs.num_moves else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=bench_llama.MODELS, default="thin")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--torch-device", default="cpu")
    parser.add_argument("--share", type=float, default=0.5, help="of the bytes that it needs")
    parser.add_argument("--policy", default="lookahead")
    parser.add_argument("--warmup", type=int, default=8, help="steps before anything is timed")
    parser.add_argument("--steps", type=int, default=3, help="per block")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
