"""Who uses what when: a trace, indexed for planners and simulators.

[Note: Uses]
    A use is an operation that reads, writes or creates a page. Uses are numbered from 0 in the
    order of the operations, and within one in the order of `reads`, then `creates`. The arrays that
    begin with `use_` have an entry per use.

[Note: Past the boundary]
    An iteration is followed by its like. The first operation of the next one is number N of N, the
    last one of the iteration before is number -1: a page that is alive at the end is used next
    where the page that it becomes is used first. Where a page's life in other iterations matters,
    an index may so lie outside of 0 to N - 1; NEVER and ALWAYS stand for what has no such index.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from tvm_pager.planning.traces.reuse import reuse_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.traces.trace import Trace

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

__all__ = ["ALWAYS", "NEVER", "TraceIndex"]

NEVER: Final = 1 << 62  # later than every operation
ALWAYS: Final = -NEVER  # earlier than every operation


class TraceIndex:
    """Uses, lifetimes and occupancy of a trace; see [Note: Uses] and [Note: Past the boundary].

    Takes 0.05 s for 30,000 operations. What only some need is computed when it is asked for.

    Attributes:
        trace: what is indexed.
        num_ops: N.
        frame_bytes: by page, what it takes on the device.
        born: by page: the operation that creates it; -1: it was there before.
        died: by page: the first moment at which it is dead; N + 1: it lives on.
        becomes: by page: its number in the next iteration; -1: none.
        comes_from: by page: its number in the iteration before; -1: none.
        use_op: operation of each use; it never falls.
        use_page: page of each use.
        use_writes: whether the use changes the page's bytes; creating does.
        by_page: numbers of all uses, page by page, each page's in order.
        first_of_page: where in `by_page` the uses of a page begin, and behind the last page's end.
        first_use: by page: its first use, or what it becomes is used first, or NEVER.
        next_from_end: by page alive at the end: its next use, in a later iteration, or NEVER.
        last_before_begin: by page alive at the beginning: its last use, earlier, or ALWAYS.
        next_use: by use: the operation of the page's next use, or NEVER.
        previous_use: by use: the operation of the page's use before, or ALWAYS.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.num_ops = num_ops = len(trace.ops)
        pages = trace.pages
        self.frame_bytes = _ints([page.frame_bytes for page in pages])
        self.born = _ints([-1 if page.born is None else page.born for page in pages])
        self.died = _ints([num_ops + 1 if page.died is None else page.died for page in pages])
        self.becomes = _ints([-1 if page.becomes is None else page.becomes for page in pages])
        self.comes_from = np.full(len(pages), -1, np.int64)
        continues = np.flatnonzero(self.becomes >= 0)
        self.comes_from[self.becomes[continues]] = continues
        self._list_uses()
        self._link_uses()

    # --- uses of a page --------------------------------------------------------------------------

    def uses(self, page: int) -> IntArray:
        """Operations that use the page, in order."""
        return self.use_op[self._uses_of(page)]

    def next_use_from(self, page: int, moment: int) -> int:
        """The first operation, `moment` itself or later, that uses the page; NEVER: it dies unused.

        Past the end it goes on with what the page becomes. Less `moment`, that is a distance in
        operations.
        """
        uses = self.uses(page)
        place = int(np.searchsorted(uses, moment))
        return int(uses[place]) if place < len(uses) else int(self.next_from_end[page])

    def last_use_before(self, page: int, moment: int) -> int:
        """The last operation before `moment` that uses the page; ALWAYS: there is none.

        Before the beginning it goes on with what the page was.
        """
        uses = self.uses(page)
        place = int(np.searchsorted(uses, moment))
        return int(uses[place - 1]) if place else int(self.last_before_begin[page])

    def is_dirty(self, page: int, written_back: int, moment: int) -> bool:
        """Whether an operation in [`written_back`, `moment`) changed the page.

        So a copy that was made of it at the moment `written_back` is stale at `moment`. Creating
        the page counts.
        """
        uses = self._uses_of(page)
        ops = self.use_op[uses]
        begin, end = np.searchsorted(ops, (written_back, moment))
        return bool(self.use_writes[uses[begin:end]].any())

    @cached_property
    def use_is_dirty(self) -> BoolArray:
        """By use: whether the page was changed in this iteration, by then and since its birth.

        That is whether it has to be written back when it leaves after the use, if a copy below was
        current when the iteration began.
        """
        changed = np.cumsum(self.use_writes[self.by_page])
        starts = self.first_of_page[:-1]
        before = np.where(starts > 0, changed[np.maximum(starts, 1) - 1], 0) if len(changed) else 0
        dirty = changed - np.repeat(before, np.diff(self.first_of_page)) > 0
        result = np.empty(len(dirty), np.bool_)
        result[self.by_page] = dirty
        return result

    @cached_property
    def use_reuse_bytes(self) -> IntArray:
        """By use: bytes of the other pages that were used since the page's use before it.

        Uses of the same operation as either count as far as they lie between the two. The use
        before may lie in the iteration before; -1: there is none in either. Under LRU a use finds
        its page if these bytes and its operation's fit.
        """
        return reuse_bytes(self.use_page, self.becomes, self.frame_bytes)

    @cached_property
    def dead_from(self) -> IntArray:
        """By page: the first moment at which it is dead, past the end too; NEVER: it lives on."""
        known = np.where(self.becomes < 0, np.minimum(self.died, self.num_ops), NEVER)
        return np.where(known != NEVER, known, _follow(self.becomes, known, self.num_ops, NEVER))

    # --- bytes -----------------------------------------------------------------------------------

    @cached_property
    def created_bytes(self) -> IntArray:
        """By operation: device bytes of the pages that it creates."""
        born = np.flatnonzero(self.born >= 0)
        return _sums(self.born[born], self.frame_bytes[born], self.num_ops)

    @cached_property
    def named_bytes(self) -> IntArray:
        """By operation: what it needs on the device at once: operands, results, workspace.

        No budget below the largest can work, unless the operation is split.
        """
        named = _sums(self.use_op, self.frame_bytes[self.use_page], self.num_ops)
        return named + self.workspace_bytes

    @cached_property
    def workspace_bytes(self) -> IntArray:
        """By operation."""
        return _ints([op.workspace_bytes for op in self.trace.ops])

    @cached_property
    def alive_bytes(self) -> IntArray:
        """By moment, 0 to N: device bytes of all pages that are alive then."""
        changes = np.zeros(self.num_ops + 3, np.int64)
        np.add.at(changes, self.born + 1, self.frame_bytes)
        np.add.at(changes, np.maximum(self.died, self.born + 1), -self.frame_bytes)
        return np.cumsum(changes)[: self.num_ops + 1]

    @cached_property
    def resident_bytes(self) -> IntArray:
        """By operation: device bytes while it runs if nothing ever leaves the device."""
        return self.alive_bytes[:-1] + self.created_bytes + self.workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """Device bytes that the iteration takes if nothing leaves the device."""
        most = max(int(self.resident_bytes.max(initial=0)), int(self.alive_bytes.max(initial=0)))
        return most + self.trace.overhead_bytes

    # --- construction ----------------------------------------------------------------------------

    def _uses_of(self, page: int) -> IntArray:
        return self.by_page[self.first_of_page[page] : self.first_of_page[page + 1]]

    def _list_uses(self) -> None:
        use_page: list[int] = []
        use_writes: list[bool] = []
        counts: list[int] = []
        for op in self.trace.ops:
            use_page += op.reads
            use_page += op.creates
            if op.writes:
                use_writes += [page in op.writes for page in op.reads]
            else:
                use_writes += [False] * len(op.reads)
            use_writes += [True] * len(op.creates)
            counts.append(len(op.reads) + len(op.creates))
        self.use_op = np.repeat(np.arange(self.num_ops, dtype=np.int64), _ints(counts))
        self.use_page = _ints(use_page)
        self.use_writes = np.array(use_writes, np.bool_)
        self.by_page = np.argsort(self.use_page, kind="stable").astype(np.int64)
        num_uses = np.bincount(self.use_page, minlength=len(self.trace.pages))
        self.first_of_page = np.concatenate(([0], np.cumsum(num_uses))).astype(np.int64)

    def _link_uses(self) -> None:
        ops = self.use_op[self.by_page]
        starts, ends = self.first_of_page[:-1], self.first_of_page[1:]
        used = np.flatnonzero(ends > starts)
        first = np.full(len(starts), NEVER, np.int64)
        last = np.full(len(starts), ALWAYS, np.int64)
        first[used] = ops[starts[used]]
        last[used] = ops[ends[used] - 1]
        self.next_from_end = _follow(self.becomes, first, self.num_ops, NEVER)
        self.first_use = np.where(first != NEVER, first, self.next_from_end)
        self.last_before_begin = _follow(self.comes_from, last, -self.num_ops, ALWAYS)
        self.next_use = np.full(len(ops), NEVER, np.int64)
        self.previous_use = np.full(len(ops), ALWAYS, np.int64)
        if len(ops):
            following, preceding = np.empty_like(ops), np.empty_like(ops)
            following[:-1], preceding[1:] = ops[1:], ops[:-1]
            following[ends[used] - 1] = self.next_from_end[used]
            preceding[starts[used]] = self.last_before_begin[used]
            self.next_use[self.by_page] = following
            self.previous_use[self.by_page] = preceding


def _follow(links: IntArray, found: IntArray, shift: int, missing: int) -> IntArray:
    """Per page: the operation in `found` of the page that it is linked to, `shift` further on.

    Where that page has none, its own link is followed, and so on.
    """
    result = np.full(len(links), missing, np.int64)
    pending = np.flatnonzero(links >= 0)
    places = links[pending]
    for distance in range(1, len(links) + 1):
        if not len(pending):
            break
        hits = found[places] != missing
        result[pending[hits]] = found[places[hits]] + distance * shift
        # One that is linked to itself is never used, and need not be asked again.
        goes_on = ~hits & (links[places] >= 0) & (links[places] != places)
        pending, places = pending[goes_on], links[places[goes_on]]
    return result


def _sums(places: IntArray, values: IntArray, length: int) -> IntArray:
    result = np.zeros(length, np.int64)
    np.add.at(result, places, values)
    return result


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int64)
