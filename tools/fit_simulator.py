"""Fits two constants of the simulator to two measured cells, and says how far off all others are.

    python tools/bench_policies.py --budgets 36GB,20GB --json bench.json --traces traces
    python tools/fit_simulator.py bench.json --traces traces --profile h200.json
    python tools/fit_simulator.py b36.json b20.json --traces traces --profile h200.json \
        --fit lru@20GB,lookahead@36GB --constants link,compute --json fit.json

A cell is a policy under a device budget. The first table has its measured step (`spread`: most less
least, over the median), the simulated one without constants (`plain`) and with them (`fitted`), and
the errors of both; cells that were fitted have a star. The second one has the bytes of a step,
measured, and the errors of the simulated ones in all and by lane. Below: worst and median error
of the cells that were not fitted, and whether they keep to 8 % of the step and 1 % of the bytes.
Cells that did not run are left out, and named.

The constants, which are `link`, `compute`, `submit` and `launch`, are explained in
simulated_cells.py. Without `--constants` those two of the first three are taken that explain the
cells best with least change; `launch` is in the trace, as recorded, and is fitted only if it is
named. Without `--fit` the cells are those that move most and least a second, among the half with
the least spread. Exit code: 0, or 2 if something is no good.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

from tools.calibration import CONSTANTS, fit
from tools.fit_table import Cell, Report, Row
from tools.simulated_cells import Case, Constants, Simulations
from tvm_pager.errors import ConfigError, PagerError
from tvm_pager.planning import HardwareProfile, Trace
from tvm_pager.planning.traces.trace_file import load
from tvm_pager.units import parse_bytes

__all__ = ["main"]

_DEFAULT_NAMES = ("link", "compute", "submit")
_NUM_FITTED = 2


@dataclass(slots=True)
class Bench:
    """What the files say.

    Attributes:
        cells: that ran.
        traces: by the key of their cases.
        left_out: names of what did not run, each with the reason.
    """

    cells: list[Cell]
    traces: dict[str, Trace]
    left_out: list[str]


# --- reading -------------------------------------------------------------------------------------


def _read(args: argparse.Namespace) -> Bench:
    bench = Bench([], {}, [])
    for path in args.files:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            budgets = document["budgets"]
            host = parse_bytes(args.host or document["host"])
            for budget in budgets:
                _read_budget(bench, args, document["model"], budget, host)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"{path}: not what `tools/bench_policies.py --json` writes ({error!r})"
            ) from error
    seen: set[str] = set()
    for cell in bench.cells:
        if cell.name in seen:
            raise ConfigError(f"{cell.name} was measured twice; give one file for each budget")
        seen.add(cell.name)
    return bench


def _read_budget(
    bench: Bench, args: argparse.Namespace, model: str, budget: dict[str, Any], host_bytes: int
) -> None:
    text = budget["budget"]
    if budget["failure"]:
        bench.left_out.append(f"everything at {text}: {budget['failure']}")
        return
    cells = []
    nvme_bytes = parse_bytes(args.nvme)
    key = f"{model}-{text}"
    for values in budget["cells"]:
        name = f"{values['policy']}@{text}"
        reason = _reason(values, budget["budget_bytes"])
        if reason:
            bench.left_out.append(f"{name}: {reason}")
            continue
        lanes = values["bytes_per_step"]
        if not nvme_bytes and any(n for lane, n in lanes.items() if "n" in lane):
            raise ConfigError(f"{name} has moved bytes on NVMe; say how much there is with --nvme")
        cells.append(
            Cell(
                name,
                Case(
                    key,
                    values["policy"],
                    budget["budget_bytes"],
                    host_bytes,
                    nvme_bytes,
                    args.engine,
                ),
                values["median_s"],
                values["spread"],
                lanes,
                all(block["is_settled"] for block in values["blocks"]),
            )
        )
    if cells:
        bench.cells += cells
        bench.traces[key] = _trace(args.traces, key)


def _reason(values: dict[str, Any], budget_bytes: int) -> str:
    """Why a cell has nothing to compare; "" if it has."""
    if values["failure"]:
        return str(values["failure"])
    if "median_s" in values:
        return ""
    bound_bytes = values["bound_bytes"]
    if bound_bytes is not None and bound_bytes > budget_bytes:
        return f"needs {bound_bytes / 1e9:.4g} GB"
    return "was not reached"


def _trace(directory: Path, key: str) -> Trace:
    path = directory / f"{key}.trace"
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: the iteration that was recorded; measure with "
            f"`tools/bench_policies.py --traces {directory}`"
        )
    return load(path)


# --- choosing ------------------------------------------------------------------------------------


def _chosen(text: str | None, cells: Sequence[Cell], num_constants: int) -> list[Cell]:
    """The cells to fit."""
    if text is None:
        settled = [cell for cell in cells if cell.is_settled]
        usual = statistics.median([cell.spread for cell in settled]) if settled else 0.0
        steady = [cell for cell in settled if cell.spread <= usual]
        steady.sort(key=lambda cell: (cell.moved_bytes / cell.step_s, cell.name))
        chosen = [steady[-1], steady[0]] if len(steady) > 1 else steady
    else:
        by_place = {(c.case.policy, c.case.device_bytes): c for c in cells}
        chosen = []
        for name in filter(None, text.split(",")):
            policy, _, budget = name.partition("@")
            if not budget:
                raise ConfigError(f"--fit {name}: a policy, @, and a budget are needed")
            cell = by_place.get((policy, parse_bytes(budget)))
            if cell is None:
                known = ", ".join(cell.name for cell in cells) or "none"
                raise ConfigError(f"--fit {name}: no such cell has run; there are: {known}")
            if cell not in chosen:
                chosen.append(cell)
    if len(chosen) < num_constants:
        raise ConfigError(
            f"{num_constants} constants need as many cells, not {len(chosen)} "
            f"({', '.join(c.name for c in chosen) or 'none'}); give more cells with --fit, or "
            "fewer constants with --constants"
        )
    return chosen


def _names(text: str | None) -> tuple[tuple[str, ...], int]:
    """Names of constants to choose from, and how many of them are fitted."""
    if text is None:
        return _DEFAULT_NAMES, _NUM_FITTED
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    unknown = [name for name in names if name not in CONSTANTS]
    if unknown or not 0 < len(names) <= _NUM_FITTED:
        raise ConfigError(
            f"--constants {text}: one or two of {', '.join(CONSTANTS)} are needed: two cells "
            "determine no more"
        )
    return names, len(names)


# --- all of it -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Fits, compares and prints; blocks for some seconds a cell. Returns the exit code."""
    args = _parse(argv)
    try:
        _report(args)
    except PagerError as error:
        print(f"fit_simulator: {error}", file=sys.stderr)
        return 2
    return 0


def _report(args: argparse.Namespace) -> None:
    hardware = HardwareProfile.load(args.profile)
    bench = _read(args)
    names, num_constants = _names(args.constants)
    chosen = _chosen(args.fit, bench.cells, num_constants)
    num_jobs = args.jobs or len(os.sched_getaffinity(0))
    with Simulations(bench.traces, hardware, num_jobs) as simulations:
        print(f"fitting to {', '.join(cell.name for cell in chosen)}", file=sys.stderr)
        found = fit(simulations, {c.case: c.step_s for c in chosen}, names, num_constants)
        print(f"simulating {len(bench.cells)} cells", file=sys.stderr)
        rows = _compare(simulations, bench, chosen, found.constants)
    physical = found.constants.physical(bench.traces, chosen[0].case.trace, hardware)
    report = Report(found, physical, [cell.name for cell in chosen], rows, bench.left_out)
    print(report.text())
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")


def _compare(
    simulations: Simulations, bench: Bench, chosen: Sequence[Cell], constants: Constants
) -> list[Row]:
    """Simulates every cell without and with the constants. Those that are refused are left out."""
    wanted = [(cell.case, some) for cell in bench.cells for some in (Constants(), constants)]
    results = iter(simulations.run(wanted))
    rows = []
    for cell in bench.cells:
        plain, fitted = next(results), next(results)
        refusal = plain.refusal or fitted.refusal
        if refusal:
            bench.left_out.append(f"{cell.name}: the simulator refuses it: {refusal}")
        else:
            rows.append(Row(cell, plain, fitted, cell in chosen))
    return rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="of `bench_policies --json`")
    parser.add_argument("--traces", type=Path, required=True, help="of `bench_policies --traces`")
    parser.add_argument("--profile", required=True, help="of the machine that was measured")
    parser.add_argument("--fit", help="cells, as policy@budget, with commas")
    parser.add_argument("--constants", help=f"one or two of {', '.join(CONSTANTS)}, with commas")
    parser.add_argument("--host", help="page-locked memory; default: what the file says")
    parser.add_argument("--nvme", default="0", help="size of the swap file")
    parser.add_argument("--engine", default="raw", help="which of the profile's disks")
    parser.add_argument("--jobs", type=int, default=0, help="processes; default: every core")
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
