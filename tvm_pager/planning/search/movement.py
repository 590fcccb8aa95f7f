"""From a timetable to the actions of a plan. Pure.

[Note: Iterations that differ]
    A timetable takes each decision from one iteration or the next, which may differ by a block or
    two. So the whole occupancy curve is looked at once more: where it does not fit, a fetch is
    issued later, or memory is given up earlier.

[Note: Late deadlines]
    Memory is given up at a moment that the clock of the model has chosen. Where nothing else needs
    it, the deadline comes later: a copy that takes longer than the model says delays nobody then.

[Note: Across the boundary]
    Actions lie within one iteration. A page that leaves across its end is written back in the one
    and gives its memory up in the next, as the page that it has become.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tvm_pager.memory import Tier
from tvm_pager.planning.plan import Clean, Evict, Fetch, MovementPlan
from tvm_pager.planning.search.schedule import STAYS
from tvm_pager.planning.traces.occupancy import Occupancy

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.plan import Action
    from tvm_pager.planning.search.grid import Grid
    from tvm_pager.planning.search.schedule import Timetable
    from tvm_pager.planning.traces.trace_index import TraceIndex

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

__all__ = ["movement_plan"]

_GRACE_S = 2e-3  # how much later than expected a copy may end without delaying anybody
_ORDER: dict[type, int] = {Evict: 0, Clean: 1, Fetch: 2}


def movement_plan(
    index: TraceIndex, grid: Grid, timetable: Timetable, on_disk: BoolArray, budget: int
) -> MovementPlan:
    """Makes the plan that a timetable stands for; without a prediction.

    Args:
        index: of the trace.
        grid: all its gaps are chosen ones.
        timetable: when what moves.
        on_disk: by version: whether it is written to NVMe.
        budget: of the device, in bytes.
    """
    timetable = _with_grace(grid, _fitted(grid, timetable, budget), budget)
    writer = _Writer(index, grid, timetable, on_disk)
    for gap in range(len(grid.gaps)):
        if grid.gaps.is_endless[gap]:
            writer.add_endless(gap)
        elif timetable.released[gap] != STAYS:
            writer.add(gap)
    actions = sorted(writer.actions, key=lambda action: (action.earliest, _ORDER[type(action)]))
    return MovementPlan(tuple(actions), frozenset(writer.absent))


def _fitted(grid: Grid, timetable: Timetable, budget: int) -> Timetable:
    """The same, made to fit; see [Note: Iterations that differ]."""
    gaps = grid.gaps
    num = gaps.num_moments
    ends = gaps.start + gaps.length
    leaves = timetable.released != STAYS
    until = np.where(timetable.fetched == STAYS, ends, timetable.fetched)
    since = timetable.released.copy()
    leaves &= (since < until) | gaps.is_endless
    since[gaps.is_endless], until[gaps.is_endless] = 0, num
    leaves |= gaps.is_endless
    curve = Occupancy(grid.needed_bytes)
    for gap in np.flatnonzero(leaves).tolist():
        curve.add((int(since[gap]), int(until[gap] - since[gap])), -int(gaps.nbytes[gap]))
    for block in np.flatnonzero(curve.nbytes > budget).tolist():
        for lap in (0, num):  # gaps are counted from where they begin
            at = block + lap
            early = leaves & (until <= at) & (at < ends)
            slow = leaves & (gaps.start <= at) & (at < since)
            for gap in np.flatnonzero(early)[np.argsort(-ends[early], kind="stable")].tolist():
                if curve.nbytes[block] <= budget:
                    break
                curve.add((int(until[gap]), at + 1 - int(until[gap])), -int(gaps.nbytes[gap]))
                until[gap] = at + 1
            for gap in np.flatnonzero(slow)[np.argsort(since[slow], kind="stable")].tolist():
                if curve.nbytes[block] <= budget:
                    break
                curve.add((at, int(since[gap]) - at), -int(gaps.nbytes[gap]))
                since[gap] = at
    return dataclasses.replace(
        timetable,
        released=np.where(leaves & ~gaps.is_endless, since, STAYS),
        fetched=np.where(leaves & gaps.is_fetched, until, STAYS),
    )


def _with_grace(grid: Grid, timetable: Timetable, budget: int) -> Timetable:
    """The same with deadlines as late as they do no harm; see [Note: Late deadlines]."""
    gaps = grid.gaps
    num = gaps.num_moments
    released = timetable.released.copy()
    until = np.where(timetable.fetched == STAYS, gaps.start + gaps.length, timetable.fetched)
    curve = Occupancy(grid.needed_bytes)
    for gap in np.flatnonzero(released != STAYS).tolist():
        length = int(until[gap] - released[gap])
        curve.add((int(released[gap]), length), -int(gaps.nbytes[gap]))
    for gap in np.flatnonzero(gaps.is_endless).tolist():
        curve.add((0, num), -int(gaps.nbytes[gap]))
    begins = timetable.begins_s
    is_slow = (released > gaps.start) & (released != STAYS)
    for gap in np.flatnonzero(is_slow)[np.argsort(released[is_slow], kind="stable")].tolist():
        moment, nbytes = int(released[gap]), int(gaps.nbytes[gap])
        lap = moment // num
        in_time = int(np.searchsorted(begins, begins[moment - lap * num] + _GRACE_S))
        stop = min(in_time + lap * num, (lap + 1) * num - 1, int(until[gap]) - 1)
        if stop > moment:
            later = curve.last_fit(nbytes, budget, moment, stop)
            curve.add((moment, later - moment), nbytes)
            released[gap] = later
    return dataclasses.replace(timetable, released=released)


class _Moment(NamedTuple):
    """A moment as an operation, and the iteration that it lies in: -1, 0 or 1."""

    lap: int
    op: int


class _Writer:
    def __init__(
        self, index: TraceIndex, grid: Grid, timetable: Timetable, on_disk: BoolArray
    ) -> None:
        self.actions: list[Action] = []
        self.absent: set[int] = set()
        self._index, self._grid = index, grid
        self._timetable, self._on_disk = timetable, on_disk
        self._num_ops = index.num_ops
        self._written: set[int] = set()

    def add_endless(self, gap: int) -> None:
        """The page is absent all the time."""
        page = int(self._grid.gaps.page[gap])
        self.absent.add(page)
        self.actions.append(Evict(page, 0, 0, self._tier(gap)))

    def add(self, gap: int) -> None:
        """The page leaves and returns, or dies."""
        gaps, timetable = self._grid.gaps, self._timetable
        num = gaps.num_moments
        start = int(gaps.start[gap])
        released, fetched = int(timetable.released[gap]), int(timetable.fetched[gap])
        version = int(gaps.version[gap])
        to = self._tier(gap)
        copied = start
        if gaps.out_bytes[version] and version not in self._written:
            self._written.add(version)
            copied = min(int(timetable.copied[gap]), released)
        self._leave(gap, copied, released, to)
        end = start + int(gaps.length[gap])
        if fetched != STAYS:
            at, need = self._moment(fetched), self._moment(end)
            deadline = need.op if need.lap == at.lap else self._num_ops
            self.actions.append(Fetch(self._page(gap, at.lap), at.op, deadline))
        back = fetched if fetched != STAYS else end
        if released < num <= back and self._page(gap, 1) >= 0:
            self.absent.add(self._page(gap, 1))

    def _leave(self, gap: int, copied: int, released: int, to: Tier | None) -> None:
        start = int(self._grid.gaps.start[gap])
        if copied < 0 and self._page(gap, -1) < 0:
            copied = 0
        begun, given_up = self._moment(max(copied, start)), self._moment(released)
        if copied < start or begun.lap != given_up.lap:
            at, due = self._moment(copied), self._moment(start)
            deadline = due.op if due.lap == at.lap else self._num_ops
            deadline = max(deadline, at.op)
            self.actions.append(Clean(self._page(gap, at.lap), at.op, deadline, to))
        if begun.lap != given_up.lap:
            begun = _Moment(given_up.lap, 0)
        page = self._page(gap, given_up.lap)
        self.actions.append(Evict(page, begun.op, given_up.op, to))

    def _tier(self, gap: int) -> Tier | None:
        return Tier.NVME if self._on_disk[self._grid.gaps.version[gap]] else None

    def _moment(self, moment: int) -> _Moment:
        lap, block = divmod(moment, self._grid.gaps.num_moments)
        return _Moment(lap, int(self._grid.first_op[block]))

    def _page(self, gap: int, lap: int) -> int:
        """The page's number in the iteration; negative: it was not there."""
        page = int(self._grid.gaps.page[gap])
        if lap < 0:
            return int(self._index.comes_from[page])
        return page if not lap else int(self._index.becomes[page])
