"""Outcomes of a sweep as a table for people and as CSV for programs."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, TextIO

from tvm_pager.memory import Tier
from tvm_pager.observe.table import format_rows
from tvm_pager.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.simulation.sweep import Outcome

__all__ = ["format_outcomes", "write_csv"]

_SHORT = 40  # characters that a column can do with
_LANES = ("d2h", "h2d", "d2n", "n2d", "h2n", "n2h")


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Writes a line per cell, without a newline at the end."""
    lanes = [
        lane
        for lane in _LANES
        if any(o.result is not None and o.result.lane_bytes[lane] for o in outcomes)
    ]
    has_nvme = any(o.cell.limits.nvme_bytes for o in outcomes)
    head = ["policy", "device", "step", "bound", "regret", "stall", "faults", *lanes, "moved/bound"]
    rows = [[*head, "peak device", "peak host", *(["peak nvme"] if has_nvme else [])]]
    rows += [_row(outcome, lanes, has_nvme=has_nvme) for outcome in outcomes]
    width = max(map(len, rows))
    lines = format_rows([row + [""] * (width - len(row)) for row in rows])
    for outcome in outcomes:
        if len(outcome.refusal) > _SHORT:
            device = format_bytes(outcome.cell.limits.device_bytes)
            lines.append(f"{outcome.cell.policy}, {device}: {outcome.refusal}")
    return "\n".join(lines)


def _row(outcome: Outcome, lanes: Sequence[str], *, has_nvme: bool) -> list[str]:
    result, bounds = outcome.result, outcome.bounds
    cells = [outcome.cell.policy, format_bytes(outcome.cell.limits.device_bytes)]
    if result is None:
        return [*cells, outcome.refusal if len(outcome.refusal) <= _SHORT else "failed"]
    bound = f"{format_seconds(bounds.step_ns / 1e9)} ({bounds.limit})"
    tiers = (Tier.DEVICE, Tier.HOST, *((Tier.NVME,) if has_nvme else ()))
    return [
        *cells,
        format_seconds(result.step_ns / 1e9),
        bound,
        _percent(outcome.step_regret),
        format_seconds(result.stall_ns / 1e9),
        f"{result.num_faults:,.0f}",
        *(format_bytes(result.lane_bytes[lane]) for lane in lanes),
        _percent(outcome.traffic_regret),
        *(format_bytes(result.peak_bytes[tier]) for tier in tiers),
    ]


def _percent(regret: float | None) -> str:
    return "" if regret is None else f"{regret:+.1%}"


def write_csv(outcomes: Sequence[Outcome], file: TextIO) -> None:
    """Writes a line per cell: bytes, seconds and fractions as plain numbers; what is not, empty."""
    writer = csv.writer(file, lineterminator="\n")
    head = "policy device_bytes host_bytes nvme_bytes refusal step_s compute_s stall_s num_faults"
    head += " num_evictions num_clean_evictions device_peak_bytes host_peak_bytes nvme_peak_bytes"
    head += " bound_step_s bound_limit bound_in_bytes bound_out_bytes bound_both_bytes bound_kind"
    head += " step_regret traffic_regret"
    writer.writerow([*head.split(), *(f"{lane}_bytes" for lane in _LANES)])
    for outcome in outcomes:
        writer.writerow(_values(outcome))


def _values(outcome: Outcome) -> list[object]:
    limits, result, bounds = outcome.cell.limits, outcome.result, outcome.bounds
    measured: list[object] = [""] * 9
    moved: list[object] = [""] * len(_LANES)
    if result is not None:
        measured = [
            result.step_ns / 1e9,
            result.compute_ns / 1e9,
            result.stall_ns / 1e9,
            result.num_faults,
            result.num_evictions,
            result.num_clean_evictions,
            *(result.peak_bytes[tier] for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)),
        ]
        moved = [result.lane_bytes[lane] for lane in _LANES]
    return [
        outcome.cell.policy,
        limits.device_bytes,
        limits.host_bytes,
        limits.nvme_bytes,
        outcome.refusal,
        *measured,
        bounds.step_ns / 1e9,
        bounds.limit,
        bounds.in_bytes,
        bounds.out_bytes,
        bounds.both_bytes,
        bounds.name,
        "" if outcome.step_regret is None else outcome.step_regret,
        "" if outcome.traffic_regret is None else outcome.traffic_regret,
        *moved,
    ]
