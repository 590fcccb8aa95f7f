"""Times in which pages may be off the device, and the room that they give. Pure.

[Note: Absences]
    A page may be absent between two uses: from the moment after the one to the operation of the
    next. Operations count on past the end of the iteration, so a weight that is used last in
    operation 90 of 100 and first in operation 3 may be absent from 91 to 103.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tvm_pager.planning.traces.occupancy import Occupancy
from tvm_pager.planning.traces.trace_index import NEVER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tvm_pager.memory import PageKind, Tier
    from tvm_pager.planning.traces.trace_index import TraceIndex

__all__ = ["Absence", "Pressure", "Relief", "absences", "reachable_bytes"]

_NUM_BLOCKS = 1024


class Absence(NamedTuple):
    """A page off the device; see [Note: Absences].

    Attributes:
        page: its number when it leaves.
        after: the operation of its use before.
        until: the operation of its next use; N or more: in the next iteration.
        is_dirty: whether it was changed in the iteration by then, so that leaving moves bytes. An
            absence before it may have done that already: the placement looks again.
        to: where it goes; None: the next tier with room.
        fetch_from: the first moment, counted like `until`, at which it may come back; None: as the
            placement thinks best.
        replay_ns: device time of computing it again; None: it is moved.
    """

    page: int
    after: int
    until: int
    is_dirty: bool = True
    to: Tier | None = None
    fetch_from: int | None = None
    replay_ns: int | None = None


def absences(
    index: TraceIndex, kinds: Collection[PageKind] | None = None, min_bytes: int = 1
) -> list[Absence]:
    """All that a trace allows, in the order in which they begin.

    Args:
        index: of the trace.
        kinds: of pages; None: all.
        min_bytes: smaller pages are left out.
    """
    trace = index.trace
    apart = (index.next_use > index.use_op + 1) & (index.next_use != NEVER)
    apart &= index.next_use - index.use_op <= index.num_ops  # not a whole iteration unused
    apart &= index.frame_bytes[index.use_page] >= min_bytes
    if kinds is not None:
        wanted = np.array([page.kind in kinds for page in trace.pages], np.bool_)
        apart &= wanted[index.use_page]
    places = np.flatnonzero(apart)
    if not len(places):
        return []
    return [
        Absence(page, after, until, dirty)
        for page, after, until, dirty in zip(
            index.use_page[places].tolist(),
            index.use_op[places].tolist(),
            index.next_use[places].tolist(),
            index.use_is_dirty[places].tolist(),
            strict=True,
        )
    ]


def reachable_bytes(index: TraceIndex, absences: Iterable[Absence]) -> int:
    """Device bytes at the peak if all of them are taken."""
    pressure = Pressure(index, 0)
    for absence in absences:
        pressure.take(absence)
    return pressure.peak_bytes


class Pressure:
    """Device bytes by operation while some pages are absent, against the budget.

    Args:
        index: of the trace.
        budget_bytes: for pages and workspaces.
    """

    def __init__(self, index: TraceIndex, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._frame_bytes = index.frame_bytes
        self._occupancy = Occupancy(index.resident_bytes)
        self._peak: int | None = None  # known since the last change

    @property
    def peak_bytes(self) -> int:
        """The most at any operation."""
        if self._peak is None:
            self._peak = int(self._occupancy.nbytes.max(initial=0))
        return self._peak

    @property
    def fits(self) -> bool:
        """Whether every operation fits into the budget."""
        return self.peak_bytes <= self.budget_bytes

    def at(self, op: int) -> int:
        """Bytes while the operation runs."""
        return int(self._occupancy.nbytes[op])

    def take(self, absence: Absence) -> None:
        """The page is absent from the use before to the next."""
        self.add(absence.after + 1, absence.until, -int(self._frame_bytes[absence.page]))

    def add(self, begin: int, end: int, nbytes: int) -> None:
        """Adds bytes to the operations from `begin` up to `end`, which may lie past the end."""
        self._occupancy.add((begin, end - begin), nbytes)
        self._peak = None

    def helps(self, absence: Absence) -> bool:
        """Whether an operation that does not fit lies in the absence."""
        length = absence.until - absence.after - 1
        return self._occupancy.peak((absence.after + 1, length)) > self.budget_bytes

    def helpful(self, absences: Sequence[Absence]) -> list[Absence]:
        """Those that help, all at once."""
        if not absences:
            return []
        starts = np.array([absence.after + 1 for absence in absences], np.int64)
        lengths = np.array([absence.until for absence in absences], np.int64) - starts
        peaks = self._occupancy.peaks(starts % self._occupancy.num_moments, lengths)
        over = (peaks > self.budget_bytes).tolist()
        return [absence for absence, helps in zip(absences, over, strict=True) if helps]

    def room_from(self, begin: int, end: int, nbytes: int) -> int:
        """The first operation from which on, up to `end`, `nbytes` are free all the time."""
        return self._occupancy.first_fit(nbytes, self.budget_bytes, begin, end)


class Relief:
    """Memory pressure over time, as TERAIO and G10 weigh it: bytes over the budget times seconds.

    Operations are taken together in at most `_NUM_BLOCKS` blocks with the most that any of them
    needs, and an absence relieves the blocks that lie inside of it as a whole.
    """

    def __init__(self, index: TraceIndex, budget_bytes: int) -> None:
        self._num_ops = index.num_ops
        self._size = max(1, -(-index.num_ops // _NUM_BLOCKS))
        starts = np.arange(0, index.num_ops, self._size)
        # Operations that take no time count a little too.
        times = np.array([op.compute_ns + 1 for op in index.trace.ops], np.float64)
        self._num_blocks = len(starts)
        self._seconds, self._over = times, index.resident_bytes
        if self._size > 1:
            self._seconds = np.add.reduceat(times, starts)
            self._over = np.maximum.reduceat(index.resident_bytes, starts)
        self._seconds = self._seconds / 1e9
        self._over = self._over - budget_bytes

    def of(self, begin: int, end: int, nbytes: int) -> float:
        """Bytes over the budget that `nbytes` less would spare from `begin` to `end`."""
        total = 0.0
        for low, high in self._blocks(begin, end):
            over = self._over[low:high]
            spared = np.minimum(np.maximum(over, 0), nbytes)
            total += float(spared @ self._seconds[low:high])
        return total

    def take(self, begin: int, end: int, nbytes: int) -> None:
        """They are spared from now on."""
        for low, high in self._blocks(begin, end):
            self._over[low:high] -= nbytes

    def _blocks(self, begin: int, end: int) -> list[tuple[int, int]]:
        if begin >= self._num_ops:
            begin, end = begin - self._num_ops, end - self._num_ops
        parts = [(begin, min(end, self._num_ops)), (0, end - self._num_ops)]
        size, result = self._size, []
        for low, high in parts:
            # The last block may be shorter than others.
            last = self._num_blocks if high == self._num_ops else high // size
            if -(-low // size) < last:
                result.append((-(-low // size), last))
        return result
