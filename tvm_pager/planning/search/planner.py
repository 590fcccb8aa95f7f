"""The search for a plan: which gaps, and when. Pure.

[Note: Search]
    A few rounds, as many as the size of the trace allows, each of a choice of gaps and a timetable
    for them; the shortest step wins, then the fewest bytes.

    - The choice leaves some of the budget free in some rounds, so that copies under way have room.
    - After each round bytes get another weight. Where operations waited for a lane, what moved on
      it since it was last idle made them wait, and counts in full; what moves while its lane is
      idle now and then counts less. The weights are averaged over the rounds.

[Note: What is kept]
    All that does not depend on the limits is computed once per planner.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tvm_pager.planning.cost.cost_model import evaluate
from tvm_pager.planning.hardware.lanes import lane_rates
from tvm_pager.planning.search.choice import choose_gaps
from tvm_pager.planning.search.gaps import find_gaps
from tvm_pager.planning.search.grid import Grid, without_small_pages
from tvm_pager.planning.search.movement import movement_plan
from tvm_pager.planning.search.schedule import make_timetable
from tvm_pager.planning.search.spill import spilled_versions
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.hardware.lanes import LaneRates
    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.plan import MovementPlan
    from tvm_pager.planning.search.choice import Choice
    from tvm_pager.planning.search.gaps import Gaps
    from tvm_pager.planning.search.schedule import Timetable
    from tvm_pager.planning.traces.trace import Trace

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["Candidates", "Planner"]

_SLACKS = (0.0, 0.0, 0.01, 0.02, 0.0, 0.01, 0.02, 0.04)  # of the budget, left free by round
_ROUND_WORK = 30_000  # operations and gaps that all rounds together look at, about
_MIN_ROUNDS = 1
_IDLE_WEIGHT = 0.25  # of a byte that makes nobody wait
_STALL_S = 10e-6  # shorter waits are noise


class _Attempt(NamedTuple):
    """A round's result."""

    step_s: float
    moved_bytes: int
    grid: Grid
    timetable: Timetable
    on_disk: BoolArray


class Planner:
    """Plans iterations that are like one trace, under any limits.

    Args:
        trace: of a steady iteration.
        hardware: of the machine.
    """

    def __init__(self, trace: Trace, hardware: HardwareProfile) -> None:
        self.trace = trace
        self.hardware = hardware
        self.index = TraceIndex(trace)
        self._seconds = np.array([op.compute_ns for op in trace.ops], np.float64) * 1e-9

    def plan(self, limits: Limits, slowness: float = 1.0) -> MovementPlan | None:
        """The best plan found, with its prediction.

        Args:
            limits: budgets.
            slowness: how much longer copies take than was measured.

        Returns:
            None: no plan keeps to the limits.
        """
        if not self.trace.ops:
            return None
        candidates = self.candidates(limits)
        if int(candidates.grid.least_bytes.max()) > limits.device_bytes:
            return None
        rates = lane_rates(self.hardware, limits, slowness)
        best = _Search(self, candidates, limits, rates).best()
        if best is None:
            return None
        plan = movement_plan(
            self.index, best.grid, best.timetable, best.on_disk, limits.device_bytes
        )
        result = evaluate(self.trace, plan, self.hardware, limits, self.index, rates)
        return dataclasses.replace(plan, prediction=result.prediction)

    def candidates(self, limits: Limits) -> Candidates:
        """The gaps to choose from: of large pages, if that suffices."""
        if int(self._large.grid.least_bytes.max()) <= limits.device_bytes:
            return self._large
        return self._all

    @cached_property
    def _gaps(self) -> Gaps:
        return find_gaps(self.index)

    @cached_property
    def _large(self) -> Candidates:
        gaps = without_small_pages(self._gaps, self.index.peak_bytes)
        return Candidates(gaps, Grid.of(self.index, gaps, self._seconds))

    @cached_property
    def _all(self) -> Candidates:
        return Candidates(self._gaps, Grid.of(self.index, self._gaps, self._seconds))

    def grid_of(self, gaps: Gaps) -> Grid:
        """A grid of those gaps only."""
        return Grid.of(self.index, gaps, self._seconds)


class Candidates(NamedTuple):
    """Gaps to choose from, in moments of operations, and their grid."""

    gaps: Gaps
    grid: Grid


class _Search:
    """The rounds for one budget; see [Note: Search]."""

    def __init__(
        self, planner: Planner, candidates: Candidates, limits: Limits, rates: LaneRates
    ) -> None:
        self._planner, self._limits, self._rates = planner, limits, rates
        self._gaps, self._grid = candidates
        num_ops = self._gaps.num_moments
        self._need = (self._gaps.start + self._gaps.length - 1) % num_ops
        versions, first = np.unique(self._gaps.version, return_index=True)
        self._leave = np.zeros(len(self._gaps.out_bytes), np.int64)
        self._leave[versions] = self._gaps.start[first]
        self._in_weight = np.ones(num_ops)
        self._out_weight = np.ones(num_ops)
        self._known: Choice | None = None

    def best(self) -> _Attempt | None:
        """Searches."""
        num_rounds = _ROUND_WORK // (self._gaps.num_moments + len(self._gaps))
        best: _Attempt | None = None
        for turn, slack in enumerate(_SLACKS[: max(num_rounds, _MIN_ROUNDS)]):
            attempt = self._attempt(slack)
            if attempt is None:
                return None
            if best is None or attempt[:2] < best[:2]:
                best = attempt
            if not (attempt.timetable.in_stall_s.any() or attempt.timetable.out_stall_s.any()):
                break
            self._weigh(attempt, turn)
        return best

    def _attempt(self, slack: float) -> _Attempt | None:
        gaps, limits = self._gaps, self._limits
        target = int(limits.device_bytes * (1 - slack))
        excess = self._grid.needed_bytes - np.maximum(target, self._grid.least_bytes)
        choice = choose_gaps(
            self._grid.gaps,
            excess,
            gaps.in_bytes * self._in_weight[self._need],
            gaps.out_bytes * self._out_weight[self._leave],
            self._known,
        )
        if choice is None:
            return None
        self._known = choice
        chosen = gaps.take(choice.chosen)
        grid = self._planner.grid_of(chosen)
        on_disk = spilled_versions(grid.gaps, limits, self._rates.has_disk)
        if on_disk is None:
            return None
        timetable = make_timetable(grid, on_disk, limits.device_bytes, self._rates)
        return _Attempt(timetable.step_s, sum(gaps.moved(choice.chosen)), grid, timetable, on_disk)

    def _weigh(self, attempt: _Attempt, turn: int) -> None:
        """New weights from what operations waited for."""
        timetable, block_of = attempt.timetable, attempt.grid.block_of
        share = (turn + 1) ** -0.7
        for weights, stalls, is_busy in (
            (self._in_weight, timetable.in_stall_s, timetable.in_busy),
            (self._out_weight, timetable.out_stall_s, timetable.out_busy),
        ):
            critical = np.where(_critical(stalls, is_busy), 1.0, _IDLE_WEIGHT)
            weights *= 1 - share
            weights += share * critical[block_of]


def _critical(stalls: FloatArray, is_busy: BoolArray) -> BoolArray:
    """By block: whether its lane was busy from there on until an operation waited for it."""
    result = np.zeros(len(stalls), np.bool_)
    is_critical = False
    for block in [*reversed(range(len(stalls)))] * 2:  # around the boundary
        if stalls[block] > _STALL_S:
            is_critical = True
        elif not is_busy[block]:
            is_critical = False
        result[block] = is_critical
    return result
