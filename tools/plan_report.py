"""What `lookahead` plans for a trace under several budgets, beside what no plan can beat.

    python tools/plan_report.py llama.json.gz --device 36GB,20GB,14GB --profile h200.json
    python tools/plan_report.py llama.json.gz --device 20GB --host 24GB --nvme 200GB

Columns: bytes per lane and iteration; `bound`, the fewest bytes to and from the device together
that any plan moves (planning/search/relaxation.py, Note "Prices"); the step as the model predicts
it; `roof`, the longest of the kernels, the link and the disk, if neither direction ever waited for
anything; `least`, the bound for a step (planning/search/least_step.py), which knows that a lane
cannot be used when it likes; processor time of planning, the first time and when only the budget
changes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

import numpy as np

from tvm_pager.errors import PagerError
from tvm_pager.observe.table import format_rows
from tvm_pager.planning import HardwareProfile, Limits, Tier
from tvm_pager.planning.hardware.lanes import H2D, LANE_NAMES, N2D, LaneRates, lane_rates
from tvm_pager.planning.search.choice import choose_gaps
from tvm_pager.planning.search.least_step import least_step_s
from tvm_pager.planning.search.planner import Planner
from tvm_pager.planning.traces.trace_file import load
from tvm_pager.units import format_seconds, parse_bytes

__all__ = ["main"]

_GB = 1e9


def main(argv: list[str] | None = None) -> int:
    """Prints the table. Exit code 1: for some budget there is no plan, 2: a file is no good."""
    options = _parser().parse_args(argv)
    try:
        trace, hardware = load(options.trace), HardwareProfile.load(options.profile)
    except PagerError as error:
        print(f"plan_report: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.trace}: {len(trace.ops):,} operations, {len(trace.pages):,} pages, "
        f"{format_seconds(trace.compute_ns / 1e9)} of kernels"
    )
    host, nvme = parse_bytes(options.host), parse_bytes(options.nvme)
    rows = [["device", *LANE_NAMES, "bound", "step", "roof", "least", "stall", "plan", "again"]]
    planner, is_planned = Planner(trace, hardware), True
    for text in options.device.split(","):
        limits = Limits(parse_bytes(text), host, nvme, disk_engine=options.disk_engine)
        begun = time.process_time()
        plan = planner.plan(limits)
        took = time.process_time() - begun
        if plan is None or plan.prediction is None:
            rows.append([text, *["-"] * (len(rows[0]) - 1)])
            is_planned = False
            continue
        begun = time.process_time()
        planner.plan(Limits(limits.device_bytes - 512, host, nvme, disk_engine=options.disk_engine))
        again = time.process_time() - begun
        prediction = plan.prediction
        moved = [prediction.lane_bytes[name] for name in LANE_NAMES]
        rates = lane_rates(hardware, limits)
        roof = max(trace.compute_ns / 1e9, *(_pair_s(rates, moved, lane) for lane in (H2D, N2D)))
        least = least_step_s(planner.index, limits.device_bytes, rates)
        rows.append(
            [
                text,
                *(f"{nbytes / _GB:.2f}" for nbytes in moved),
                f"{_fewest_bytes(planner, limits) / _GB:.2f}",
                *(f"{s:.3f}" for s in (prediction.step_ns / 1e9, roof, least)),
                f"{prediction.stall_ns / 1e9:.3f}",
                f"{took:.2f}",
                f"{again:.2f}",
            ]
        )
        assert prediction.peak_bytes[Tier.DEVICE] <= limits.device_bytes
    print("\n".join(format_rows(rows)))
    print("GB of 1e9 bytes; seconds" + ("" if is_planned else "; -: no plan keeps to the limits"))
    return 0 if is_planned else 1


def _pair_s(rates: LaneRates, moved: list[int], lane: int) -> float:
    """What a link takes if both of its directions begin at once and neither ever waits."""
    if lane >= len(rates.links):
        return 0.0
    alone = [rates.seconds(side, moved[side]) for side in (lane, lane + 1)]
    slowed = [rates.duplex_seconds(side, moved[side]) for side in (lane, lane + 1)]
    first, last = (0, 1) if slowed[0] <= slowed[1] else (1, 0)
    return slowed[first] + alone[last] * (1 - slowed[first] / max(slowed[last], 1e-12))


def _fewest_bytes(planner: Planner, limits: Limits) -> float:
    grid = planner.candidates(limits).grid
    excess = grid.needed_bytes - np.maximum(limits.device_bytes, grid.least_bytes)
    choice = choose_gaps(grid.gaps, excess)
    return 0.0 if choice is None else choice.bound


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("trace", help="file that `tvm-pager trace` has written")
    parser.add_argument("--profile", required=True, help="hardware profile, JSON")
    parser.add_argument("--device", default="36GB,20GB,14GB", help="budgets, with commas")
    parser.add_argument("--host", default="1TB", help="page space of the slab")
    parser.add_argument("--nvme", default="0", help="size of the swap file; 0: none")
    parser.add_argument("--disk-engine", default="raw", help="which measured disk")
    return parser


if __name__ == "__main__":
    sys.exit(main())
