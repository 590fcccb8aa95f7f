"""Measures what a policy that plans makes of programs that do not repeat, against demand LRU.

    python tools/bench_changing.py
    python tools/bench_changing.py --scale tiny --torch-device cpu --iterations 10

Four programs (tools/changing_programs.py): training, evaluation and generation by turns; a batch
that grows; layers that are skipped at random; a mixture of experts. Each runs as plain torch, then
with everything resident, which tells what it needs, then by turns under each policy with a part of
that. A run is a new model under a new pager, and its time is that of all iterations from the
first, so recording and planning are in it. Every run must give the bits of plain torch.

Fails if a program takes a policy longer than --bound times what it takes LRU, or gives other bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

import torch

import tvm_pager
from tools.bench_llama import fix_kernels, synchronise
from tools.changing_programs import PROGRAMS, SCALES, Program
from tvm_pager.observe.table import format_rows
from tvm_pager.units import format_bytes

__all__ = ["main"]


def run_program(args: argparse.Namespace, name: str, **options: Any) -> dict[str, Any]:
    """Runs all iterations, under a pager where there are options; gives bits and figures."""
    gc.collect()
    torch.cuda.empty_cache()
    if not options:
        return _iterate(args, PROGRAMS[name](SCALES[args.scale], args.torch_device))
    with tvm_pager.Pager(torch_device=args.torch_device, **options) as pager:
        figures = _iterate(args, PROGRAMS[name](SCALES[args.scale], args.torch_device))
        stats = pager.stats()
        gc.collect()  # else the pager's end brings everything back
    device_bytes = stats.bytes_by_lane.get("h2d", 0) + stats.bytes_by_lane.get("d2h", 0)
    return figures | {
        "peak_bytes": stats.device_peak_bytes,
        "moved_bytes": device_bytes,
        "plans": stats.plans,
    }


def _iterate(args: argparse.Namespace, program: Program) -> dict[str, Any]:
    synchronise()
    started_s = time.perf_counter()
    results = [program.iterate(i) for i in range(args.iterations)]
    synchronise()
    seconds = time.perf_counter() - started_s
    bits = [float(result).hex() for result in results]
    bits += [float(p.detach().double().sum()).hex() for p in program.model.parameters()]
    return {"seconds": seconds, "bits": bits}


def compare(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One program under every policy, in turns."""
    plain = run_program(args, name)
    resident = run_program(args, name, host=args.host)
    budget_bytes = int(resident["peak_bytes"] * args.share)
    options = {"device": budget_bytes, "host": args.host, "profile": args.profile}
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    for number in range(args.rounds):
        for policy in args.policies[:: -1 if number % 2 else 1]:
            print(f"{name}: round {number + 1}, {policy}", file=sys.stderr, flush=True)
            runs[policy].append(run_program(args, name, policy=policy, **options))
    row: dict[str, Any] = {
        "program": name,
        "need_bytes": resident["peak_bytes"],
        "budget_bytes": budget_bytes,
        "plain_s": plain["seconds"],
        "resident_s": resident["seconds"],
        "is_equal": resident["bits"] == plain["bits"],
        "policies": {},
    }
    for policy, done in runs.items():
        ratios = [
            run["seconds"] / lru["seconds"] for run, lru in zip(done, runs["lru"], strict=True)
        ]
        row["policies"][policy] = {
            "seconds": [run["seconds"] for run in done],
            "ratios": ratios,
            "moved_bytes": [run["moved_bytes"] for run in done],
            "peak_bytes": max(run["peak_bytes"] for run in done),
            "is_equal": all(run["bits"] == plain["bits"] for run in done),
            "plans": done[-1]["plans"],
        }
    return row


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [["program, policy", "needs", "plain", "seconds", "x LRU", "moved", "bits"]]
    for row in rows:
        for policy, cell in row["policies"].items():
            line = [
                f"{row['program']}, {policy}",
                format_bytes(row["need_bytes"]),
                f"{row['plain_s']:.2f}",
                " ".join(f"{seconds:.2f}" for seconds in cell["seconds"]),
                " ".join(f"{ratio:.2f}" for ratio in cell["ratios"]),
                format_bytes(int(statistics.median(cell["moved_bytes"]))),
                "equal" if row["is_equal"] and cell["is_equal"] else "DIFFERENT",
            ]
            lines.append(line)
    return format_rows(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns 0 if every program gave the right bits within the bound."""
    args = _parse(argv)
    fix_kernels()
    rows = []
    for name in args.programs:
        rows.append(compare(args, name))
        if args.json is not None:  # after each one, so that a time limit costs one only
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{args.iterations} iterations, {args.share:.0%} of the memory needed")
    print("\n".join(_table(rows)))
    cells = [(row, policy, cell) for row in rows for policy, cell in row["policies"].items()]
    for row, policy, cell in cells:
        if cell["plans"]:
            print(f"{row['program']}, {policy}: {cell['plans']}")
    worst = max(statistics.median(cell["ratios"]) for _, _, cell in cells)
    is_met = worst <= args.bound
    print(f"worst: {worst:.2f} x LRU, bound {args.bound:.2f}: {'met' if is_met else 'MISSED'}")
    is_equal = all(row["is_equal"] and cell["is_equal"] for row, _, cell in cells)
    return 0 if is_met and is_equal else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="with commas")
    parser.add_argument("--policies", default="lru,lookahead", help="with commas, lru among them")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.4, help="budget / memory needed")
    parser.add_argument("--host", default="32GiB", help="page-locked memory")
    parser.add_argument("--bound", type=float, default=1.5, help="seconds / those of LRU")
    parser.add_argument("--profile", help="hardware profile; default: this machine's")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--torch-device", default="cuda" if has_cuda else "cpu")
    args = parser.parse_args(argv)
    args.programs, args.policies = args.programs.split(","), args.policies.split(",")
    unknown = [name for name in args.programs if name not in PROGRAMS]
    if unknown or "lru" not in args.policies:
        parser.error(f"programs are {', '.join(PROGRAMS)}, not {unknown}; policies need lru")
    if min(args.iterations, args.rounds, args.share) <= 0:
        parser.error("iterations, rounds and share must be positive")
    return args


if __name__ == "__main__":
    sys.exit(main())
