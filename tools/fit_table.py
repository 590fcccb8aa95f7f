"""What fitting the simulator has brought: measured cells beside simulated ones, text and JSON."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm_pager.observe.table import format_rows

if TYPE_CHECKING:
    from tools.calibration import Fit
    from tools.simulated_cells import Case, Simulated

__all__ = ["Cell", "Report", "Row"]

_STEP_TARGET, _BYTES_TARGET = 0.08, 0.01
_BORDER = ("d2h", "h2d", "d2n", "n2d")  # lanes over the device's border
_LANES = (*_BORDER, "h2n", "n2h")


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured of one policy under one budget, and how it is simulated.

    Attributes:
        name: policy and budget.
        case: for the simulator.
        step_s: the median.
        spread: of single steps; most less least, over the median.
        lane_bytes: of a step, by lane.
        is_settled: whether the policy had settled in each block.
    """

    name: str
    case: Case
    step_s: float
    spread: float
    lane_bytes: Mapping[str, float]
    is_settled: bool

    @property
    def moved_bytes(self) -> float:
        """Over the device's border in a step."""
        return sum(self.lane_bytes.get(lane, 0) for lane in _BORDER)

    def step_error(self, simulated: Simulated) -> float:
        """As a fraction of what was measured; more than 0: simulated as too slow."""
        return simulated.step_s / self.step_s - 1

    def bytes_errors(self, simulated: Simulated) -> dict[str, float]:
        """By lane that moved more than nothing when it was measured, and of the border: "all"."""
        errors = {
            lane: simulated.lane_bytes[lane] / nbytes - 1
            for lane, nbytes in self.lane_bytes.items()
            if nbytes
        }
        total = sum(simulated.lane_bytes[lane] for lane in _BORDER)
        if self.moved_bytes:
            errors["all"] = total / self.moved_bytes - 1
        elif total:
            errors["all"] = 1.0  # all of them are too many
        return errors


@dataclass(frozen=True, slots=True)
class Row:
    """A cell beside its simulations."""

    cell: Cell
    plain: Simulated
    fitted: Simulated
    is_fitted: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All of it.

    Attributes:
        fit: the constants.
        physical: what they come to, for the trace of the first cell that was fitted.
        fitted_to: names of cells.
        rows: the cells, in the order of the files.
        left_out: cells that did not run, each with the reason.
    """

    fit: Fit
    physical: Mapping[str, float]
    fitted_to: Sequence[str]
    rows: Sequence[Row]
    left_out: Sequence[str]

    def text(self) -> str:
        """For people."""
        notes = [line for text in self.left_out for line in _wrapped(f"left out: {text}")]
        unsettled = [row.cell.name for row in self.rows if not row.cell.is_settled]
        if unsettled:
            notes += _wrapped(f"measured before it had settled: {', '.join(unsettled)}")
        parts = [_step_table(self.rows), _bytes_table(self.rows), notes]
        parts += [self._fit_lines(), _summary(self.rows)]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON: seconds, bytes, fractions."""
        fitted = _others(self.rows, is_plain=False)
        return {
            "fitted_to": list(self.fitted_to),
            "fitted": list(self.fit.names),
            "constants": self.fit.constants._asdict(),
            "physical": dict(self.physical),
            "fit_error": self.fit.error,
            "at_limit": list(self.fit.at_limit),
            "as_good": list(self.fit.as_good),
            "cells": [_row_dict(row) for row in self.rows],
            "left_out": list(self.left_out),
            "others": {"plain": _others(self.rows, is_plain=True), "fitted": fitted},
            "step_is_held": not _missed(fitted.get("step", {}), _STEP_TARGET),
            "bytes_are_held": not _missed(fitted.get("all", {}), _BYTES_TARGET),
        }

    def _fit_lines(self) -> list[str]:
        found, physical = self.fit, self.physical
        rates = [f"{lane} {physical[f'{lane}_bytes_per_s'] / 1e9:.1f}" for lane in ("h2d", "d2h")]
        meaning = {
            "link": f": {', '.join(rates)} GB/s one way, in large chunks",
            "compute": "",
            "submit": f": {physical['submit_s'] * 1e6:.0f} us a copy",
            "launch": f": {physical['launch_s'] * 1e6:.1f} us an operation",
        }
        lines = _wrapped(
            f"fitted to {', '.join(self.fitted_to)} (*), within {found.error:.1%}, in "
            f"{found.num_simulations} simulations:"
        )
        for name in found.names:
            lines.append(f"  {name} x {getattr(found.constants, name):.3f}{meaning[name]}")
        if found.at_limit:
            limits = ", ".join(found.at_limit)
            lines.append(f"  {limits}: at the end of what makes sense; something else is missing")
        for other in self.fit.as_good:
            values = ", ".join(f"{name} x {value:.2f}" for name, value in other.items())
            lines.append(f"  these cells cannot tell it from {values}")
        return lines


def _step_table(rows: Sequence[Row]) -> list[str]:
    table = [["cell", "step s", "spread", "plain", "error", "fitted", "error"]]
    for row in rows:
        cell = row.cell
        table.append(
            [
                f"{cell.name}{' *' if row.is_fitted else ''}",
                f"{cell.step_s:.4f}",
                f"{cell.spread:.0%}",
                f"{row.plain.step_s:.4f}",
                f"{cell.step_error(row.plain):+.1%}",
                f"{row.fitted.step_s:.4f}",
                f"{cell.step_error(row.fitted):+.1%}",
            ]
        )
    return format_rows(table)


def _bytes_table(rows: Sequence[Row]) -> list[str]:
    lanes = [lane for lane in _LANES if any(row.cell.lane_bytes.get(lane) for row in rows)]
    largest = max(row.cell.moved_bytes for row in rows)
    unit, size = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    head = ["cell", unit, "plain", "error", "fitted", "error"]
    table = [[*head, *(text for lane in lanes for text in (lane, "error"))]]
    for row in rows:
        cell = row.cell
        plain, fitted = cell.bytes_errors(row.plain), cell.bytes_errors(row.fitted)
        line = [f"{cell.name}{' *' if row.is_fitted else ''}", f"{cell.moved_bytes / size:.4g}"]
        for simulated, errors in ((row.plain, plain), (row.fitted, fitted)):
            moved = sum(simulated.lane_bytes[lane] for lane in _BORDER)
            line += [f"{moved / size:.4g}", _percent(errors.get("all"))]
        for lane in lanes:
            line += [f"{cell.lane_bytes.get(lane, 0) / size:.4g}", _percent(fitted.get(lane))]
        table.append(line)
    return format_rows(table)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def _others(rows: Sequence[Row], *, is_plain: bool) -> dict[str, dict[str, float]]:
    """Errors of the cells that were not fitted, without signs: of what, by cell."""
    errors: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.is_fitted:
            continue
        simulated = row.plain if is_plain else row.fitted
        found = {"step": row.cell.step_error(simulated), **row.cell.bytes_errors(simulated)}
        for what, error in found.items():
            errors.setdefault(what, {})[row.cell.name] = abs(error)
    return errors


def _summary(rows: Sequence[Row]) -> list[str]:
    plain, fitted = _others(rows, is_plain=True), _others(rows, is_plain=False)
    if "step" not in fitted:
        return ["no other cell is left to test the constants"]
    num = len(fitted["step"])
    table = [[f"not fitted: {num}", "worst", "of", "median", "plain: worst", "median"]]
    for what in ("step", "all", *_LANES):
        if what not in fitted:
            continue
        worst = max(fitted[what], key=lambda name: fitted[what][name])
        table.append(
            [
                {"step": "step", "all": "bytes"}.get(what, f"bytes, {what}"),
                f"{fitted[what][worst]:.1%}",
                worst,
                f"{statistics.median(fitted[what].values()):.1%}",
                f"{max(plain[what].values()):.1%}",
                f"{statistics.median(plain[what].values()):.1%}",
            ]
        )
    lines = format_rows(table)
    for what, label, target in (("step", "step", _STEP_TARGET), ("all", "bytes", _BYTES_TARGET)):
        missed = _missed(fitted.get(what, {}), target)
        text = "held" if not missed else f"missed by {len(missed)} of {num}: {', '.join(missed)}"
        lines += _wrapped(f"{label} within {target:.0%}: {text}")
    return lines


def _missed(errors: Mapping[str, float], target: float) -> list[str]:
    return [name for name, error in errors.items() if error > target]


def _row_dict(row: Row) -> dict[str, Any]:
    cell = row.cell
    return {
        "cell": cell.name,
        "is_fitted": row.is_fitted,
        "is_settled": cell.is_settled,
        "step_s": cell.step_s,
        "spread": cell.spread,
        "lane_bytes": dict(cell.lane_bytes),
        **{
            label: {
                "step_s": simulated.step_s,
                "compute_s": simulated.compute_s,
                "stall_s": simulated.stall_s,
                "lane_bytes": dict(simulated.lane_bytes),
                "step_error": cell.step_error(simulated),
                "bytes_errors": cell.bytes_errors(simulated),
            }
            for label, simulated in (("plain", row.plain), ("fitted", row.fitted))
        },
    }


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, subsequent_indent="  ")
