"""Measures how many operations a second the simulator runs on one core.

    python tools/bench_simulator.py                               # a synthetic trace, mostly hits
    python tools/bench_simulator.py --trace llama.trace --profile h200.json --device 20GB,60GB

The target is 100,000 operations/s where most of them hit; a page that moves costs as much as some
dozens of hits, because the real pager moves it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tvm_pager.planning import HardwareProfile, Limits, PageKind, Trace, TraceOp, TracePage
from tvm_pager.planning.traces.trace_file import load
from tvm_pager.simulation.simulator import SimulationOptions, simulate
from tvm_pager.units import format_bytes, parse_bytes

__all__ = ["hits", "main"]

TARGET = 100_000  # operations/s


def hits(num_ops: int, num_weights: int, page_bytes: int) -> Trace:
    """A chain: each operation reads a weight and what the one before has made."""
    ops, pages = [], [TracePage(page_bytes, PageKind.PARAM, becomes=n) for n in range(num_weights)]
    for index in range(num_ops):
        made = num_weights + index
        reads = (index % num_weights, made - 1) if index else (0,)
        ops.append(TraceOp("aten::mm.default", reads, creates=(made,), compute_ns=10_000))
        died = min(index + 2, num_ops)
        pages.append(TracePage(page_bytes, PageKind.ACTIVATION, born=index, died=died))
    return Trace(tuple(ops), tuple(pages), launch_ns=20_000)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per budget and returns 0 if the best of the hitting ones meets the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", type=Path, required=True, help="a hardware profile")
    parser.add_argument("--trace", type=Path, help="a trace file, instead of the synthetic one")
    parser.add_argument("--device", default="", help="budgets, with --trace")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--ops", type=int, default=30_000, help="of the synthetic trace")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    hardware = HardwareProfile.load(args.profile)
    if args.trace is None:
        trace, budgets = hits(args.ops, 1000, 1 << 20), [2 << 30]
    else:
        trace, budgets = load(args.trace), [parse_bytes(b) for b in args.device.split(",")]
    fastest = 0.0
    for device_bytes in budgets:
        limits = Limits(device_bytes, 1 << 44)
        options = SimulationOptions(policy=args.policy)
        results = [simulate(trace, hardware, limits, options) for _ in range(args.rounds)]
        speed = max(result.num_operations / result.wall_s for result in results)
        num_faults = results[0].num_faults
        print(
            f"{format_bytes(device_bytes)}, {args.policy}: {speed:,.0f} operations/s, "
            f"{num_faults:,.0f} faults in {len(trace.ops):,} operations"
        )
        if num_faults < len(trace.ops) / 100:
            fastest = max(fastest, speed)
    if fastest:
        print(f"target {TARGET:,}: {'met' if fastest >= TARGET else 'missed'}")
    return 0 if not fastest or fastest >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
