"""Many simulations of one trace: every policy under every set of budgets, in several processes."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.errors import BudgetError, CommitError, PolicyError
from tvm_pager.simulation.bounds import Bounds, least_below_bytes, least_device_bytes, roofline
from tvm_pager.simulation.simulator import SimulationOptions, SimulationResult, simulate
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.planning import HardwareProfile, Limits, Trace

__all__ = ["Cell", "Outcome", "sweep"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one set of budgets."""

    policy: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell came to.

    Attributes:
        cell: which.
        bounds: what no policy beats there.
        result: None where it could not run.
        refusal: why not, and what would be needed, or how its policy failed; "" if it ran.
    """

    cell: Cell
    bounds: Bounds
    result: SimulationResult | None
    refusal: str = ""

    @property
    def step_regret(self) -> float | None:
        """How much longer than the roofline a step takes: 0.25 is a quarter."""
        if self.result is None or not self.bounds.step_ns:
            return None
        return self.result.step_ns / self.bounds.step_ns - 1

    @property
    def traffic_regret(self) -> float | None:
        """How many more bytes cross the device's border than must; None where none have to."""
        if self.result is None or not self.bounds.both_bytes:
            return None
        moved = self.result.lane_bytes
        return (
            moved["d2h"] + moved["d2n"] + moved["h2d"] + moved["n2d"]
        ) / self.bounds.both_bytes - 1


@dataclass(frozen=True, slots=True)
class _Work:
    trace: Trace
    hardware: HardwareProfile
    options: SimulationOptions


_work: _Work | None = None  # of this process


def sweep(
    trace: Trace,
    hardware: HardwareProfile,
    policies: Sequence[str],
    budgets: Sequence[Limits],
    options: SimulationOptions | None = None,
    *,
    num_jobs: int = 1,
) -> list[Outcome]:
    """Simulates every policy under every set of budgets; by budgets, then by policies. Blocks.

    Args:
        trace: one iteration.
        hardware: the machine's rates.
        policies: by name.
        budgets: sets of them.
        options: of each simulation; its policy is not looked at. Sinks work with one job only.
        num_jobs: processes.

    Raises:
        ConfigError: the profile lacks a disk. A cell that does not fit, or whose policy fails, is
            no error.
    """
    work = _Work(trace, hardware, options or SimulationOptions())
    cells = [Cell(policy, limits) for limits, policy in itertools.product(budgets, policies)]
    num_jobs = max(1, min(num_jobs, len(cells)))
    if num_jobs == 1:
        _take(work)
        bounds, ends = list(map(_bound, budgets)), list(map(_run, cells))
    else:
        # Fresh processes: a forked one would have this one's threads' locks without the threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_jobs, context, _take, (work,)) as pool:
            waiting = pool.map(_bound, budgets)
            ends = list(pool.map(_run, cells))
            bounds = list(waiting)
    outcomes = []
    for cell, (result, refusal) in zip(cells, ends, strict=True):
        outcomes.append(Outcome(cell, bounds[budgets.index(cell.limits)], result, refusal))
    return outcomes


def _take(work: _Work) -> None:
    global _work
    _work = work


def _the_work() -> _Work:
    if _work is None:
        raise AssertionError("no work was given to this process")
    return _work


def _bound(limits: Limits) -> Bounds:
    work = _the_work()
    return roofline(work.trace, work.hardware, limits)


def _run(cell: Cell) -> tuple[SimulationResult | None, str]:
    work, limits = _the_work(), cell.limits
    least_bytes = least_device_bytes(work.trace)
    if limits.device_bytes < least_bytes:
        return None, f"needs device >= {format_bytes(least_bytes)}"
    try:
        options = dataclasses.replace(work.options, policy=cell.policy)
        return simulate(work.trace, work.hardware, limits, options), ""
    except CommitError:
        return None, f"needs host + nvme >= {format_bytes(least_below_bytes(work.trace, limits))}"
    except BudgetError as error:
        return None, f"does not fit: {error}"
    except PolicyError as error:  # the other cells may be worth having all the same
        return None, str(error)
