"""Where in a known trace the program is now. The pager's lock is held.

[Note: Matching]
    An operation is the one that the trace says next if it has its name and names its pages. Sizes
    may differ. A page may stand for another number than it has, or for one at all, if the trace's
    page of that number is not there (what a skipped layer would have made), or is an input: there
    when the iteration begins, and nothing that a model or an optimizer keeps. The program may hold
    on to batches and tokens of earlier iterations.
    An operation that does not fit is looked for in the next `WINDOW` operations of the trace, by a
    page that lives through the iteration: so skipped layers are passed over. Until one fits, the
    program is lost, and its place in the trace stays: so insertions are passed over.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tvm_pager.memory import PageState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tvm_pager.memory import Page, PageTable
    from tvm_pager.paging.known_trace import KnownTrace
    from tvm_pager.paging.plan_runner import PlanRunner
    from tvm_pager.paging.recorder import Origin

__all__ = ["WINDOW", "Departure", "Follower", "Guide", "Onlooker"]

WINDOW = 500  # operations: about four layers of a transformer, backward included
_MAX_TAIL = 50  # operations behind the end of a trace that make no other one of the iteration
_TAIL_PART = 20  # and not more than this part of it at the end are left out
_DEAD = PageState.DEAD

Departure: TypeAlias = tuple[int, str]  # the operation that was to come, and what came instead


class Guide(Protocol):
    """Who is told when the program leaves the trace, and comes back."""

    def take_over(self, follower: Follower, name: str, pages: Sequence[Page]) -> bool:
        """Whether another trace has the same beginning and goes on so; then that one is followed.

        Asked at the first operation that does not fit.
        """
        ...

    def departs(self, follower: Follower, departure: Departure) -> bool:
        """Whether the trace is followed no longer, as what comes now is known to be another one.

        Asked at the first operation that does not fit, and that no other trace goes on with.
        """
        ...

    def lost(self, follower: Follower, was_exact: bool) -> bool:
        """The operation has no place in the trace; whether it may take the fast path."""
        ...

    def found(self, follower: Follower) -> None:
        """The program was lost, and is in the trace again."""
        ...


class Onlooker:
    """The `Guide` of a follower that only looks on."""

    def take_over(self, follower: Follower, name: str, pages: Sequence[Page]) -> bool:
        return False

    def departs(self, follower: Follower, departure: Departure) -> bool:
        return False

    def lost(self, follower: Follower, was_exact: bool) -> bool:
        return False

    def found(self, follower: Follower) -> None:
        """There is nothing to do."""


class Follower:
    """Follows one trace through one iteration.

    Args:
        table: whose pages.
        known: the trace.
        origins: of the pages that the iteration before has created, by page id.
        runner: does what the trace's plan says; None: nobody does.
        guide: see there.

    Attributes:
        index: the operation that comes next.
        pages: by number; None: none, or gone before anybody looked.
        num_lost: operations since the last one that fitted.
        num_resyncs: how often it was lost, or jumped, and found its place again.
        is_exact: whether everything so far was as in the trace, and nothing else.
        departure: the first operation that was not, before the last few; None: there was none.
        deviation: a digest of all of them.
    """

    def __init__(
        self,
        table: PageTable,
        known: KnownTrace,
        origins: Mapping[int, Origin],
        runner: PlanRunner | None,
        guide: Guide,
    ) -> None:
        self.known = known
        self.index = 0
        self.num_lost = 0
        self.num_resyncs = 0
        self.is_exact = True
        self.departure: Departure | None = None
        self.deviation = 0
        self.pages: list[Page | None] = [None] * len(known.trace.pages)
        self._table = table
        self._origins = origins
        self._given_runner = runner
        self._runner = runner if known.book is not None else None
        self._guide = guide
        self._names: list[str | None] = [*known.names, None]
        self._operands, self._ops = known.operands, known.trace.ops
        # What the plan begins at each moment, to look whether there is anything.
        self._moments: Sequence[object] = () if known.book is None else known.book.at
        self._numbers: dict[int, int] = {}  # by page id
        self._next_id = table.num_created
        self._last = -1  # the operation that ran last, if it fitted
        self._num_born = 0  # in it, so far
        self._num_other = 0  # operations that were passed over, on either side
        self._has_learned = False
        alive = table.pages
        for page_id, number in known.ids.items():
            if page_id in alive:
                self._assign(alive[page_id], number)
        for page_id, origin in origins.items():
            carried = known.carried.get(origin)
            if carried is not None and page_id in alive:
                self._assign(alive[page_id], carried)

    def begin_plan(self) -> None:
        """Starts the trace's plan at the operation that comes next, if it has one."""
        if self._runner is not None:
            self._runner.start(self.known, self.pages, self.index)

    # --- each operation --------------------------------------------------------------------------

    def advance(self, name: str, pages: Sequence[Page]) -> bool:
        """An operation is about to run: does what is planned for its moment.

        Returns:
            Whether it may take the fast path, as nobody records it.
        """
        # Steps in Python are what counts here: 1 us an operation.
        if self._table.num_created != self._next_id:
            self._look_at_births()
        index = self.index
        if self._names[index] == name:
            expected = self._operands[index]
            if len(expected) == len(pages):
                number_of = self._numbers.get
                for place, page in enumerate(pages):
                    if number_of(page.id) != expected[place]:
                        break
                else:
                    if self.num_lost or self._runner is not None:
                        self._step(index)
                    else:
                        self._last, self._num_born, self.index = index, 0, index + 1
                    return True
        return self._find(name, pages)

    def continued_in(self, known: KnownTrace, name: str, pages: Sequence[Page]) -> Follower | None:
        """One that is at the same place of another trace, if that has the same beginning.

        None if it has not, or does not go on with this operation.
        """
        index = self.index
        if (
            index >= len(known.names)
            or known.names[index] != name
            or self.known.num_shared(known) < index
        ):
            return None
        other = Follower(self._table, known, self._origins, self._given_runner, self._guide)
        other.index, other._last, other._next_id = index, self._last, self._next_id
        mentioned = [
            max((*self._operands[i], *self.known.trace.ops[i].creates), default=-1)
            for i in range(index)
        ]
        for number in range(max(mentioned, default=-1) + 1):
            page = self.pages[number]
            if page is not None and page.state is not _DEAD:
                if other._is_there(number) and other.pages[number] is not page:
                    return None  # another model with the same structure
                other._assign(page, number)
        return other if other._num_fitting(index, _distinct(pages)) >= 0 else None

    def accept(self, pages: Sequence[Page]) -> None:
        """The operation that is about to run is the next one of the trace."""
        self._accept(self.index, _distinct(pages))

    def _step(self, index: int) -> None:
        self._last, self._num_born, self.index = index, 0, index + 1
        if self.num_lost:
            self.num_lost = 0
            self.num_resyncs += 1
            self._guide.found(self)
        runner = self._runner
        if runner is not None:
            if runner.unused:
                for number in self._operands[index]:
                    if number in runner.unused:
                        runner.use(number)
            if runner.leaving or runner.waiting or self._moments[index] is not None:
                runner.run(index)

    def _look_at_births(self) -> None:
        first, alive = self._next_id, self._table.pages
        self._next_id = self._table.num_created
        if self._last < 0 or first == self._next_id:
            return
        numbers, pages = self._numbers, self.pages
        creates, place = self._ops[self._last].creates, self._num_born
        for page_id in range(first, self._next_id):
            if place == len(creates):
                break
            number = creates[place]
            numbers[page_id] = number
            pages[number] = alive.get(page_id)
            place += 1
        self._num_born = place

    def _assign(self, page: Page, number: int) -> None:
        self._numbers[page.id] = number
        self.pages[number] = page

    # --- what is not as expected -----------------------------------------------------------------

    def _find(self, name: str, pages: Sequence[Page]) -> bool:
        distinct = _distinct(pages)
        index = self.index
        if self._names[index] == name:
            num_exact = self._num_fitting(index, distinct)
            if num_exact > 0 or (num_exact == 0 and not self.num_lost):
                self._accept(index, distinct)
                return True
        was_exact = self.is_exact
        if was_exact and self._guide.take_over(self, name, pages):
            return True
        self.is_exact = False
        if not self.is_nearly_over:
            self.deviation = hash((self.deviation, index, name))
            if was_exact:
                self.departure = index, name
                if self._guide.departs(self, self.departure):
                    return False
        found = self._search(name, distinct)
        if found is not None:
            self.num_resyncs += not self.num_lost
            self._num_other += found - index
            self.index = found
            self._last = -1
            if self._runner is not None:
                self._runner.start(self.known, self.pages, found)
            self._accept(found, distinct)
            return True
        self.num_lost += 1
        self._num_other += 1
        self._last = -1
        return self._guide.lost(self, was_exact)

    def _search(self, name: str, distinct: list[Page]) -> int | None:
        """The nearest operation that fits; see [Note: Matching]."""
        known, last = self.known, self.index + WINDOW
        for page in distinct:
            number = self._numbers.get(page.id)
            if number is None:
                continue
            uses = known.uses[number]
            is_persistent = known.trace.pages[number].born is None
            for index in uses[bisect_left(uses, self.index) :]:
                if index > last:
                    break
                if known.names[index] == name:
                    num_exact = self._num_fitting(index, distinct)
                    if num_exact == len(distinct) or (num_exact > 0 and is_persistent):
                        return index
        return None

    def _num_fitting(self, index: int, distinct: list[Page]) -> int:
        """How many operands have the expected numbers; -1 if one can not stand for its own."""
        reads = self.known.trace.ops[index].reads
        if len(reads) != len(distinct):
            return -1
        num_exact = 0
        for page, number in zip(distinct, reads, strict=True):
            if self._numbers.get(page.id) == number:
                num_exact += 1
            elif self._is_there(number) and not self.known.is_input(number):
                return -1
        return num_exact

    def _is_there(self, number: int) -> bool:
        page = self.pages[number]
        return page is not None and page.state is not _DEAD

    def _accept(self, index: int, distinct: list[Page]) -> None:
        for page, number in zip(distinct, self.known.trace.ops[index].reads, strict=True):
            before = self._numbers.get(page.id)
            if before != number:
                if before is not None:
                    self.is_exact = False
                replaced = self.pages[number]
                if replaced is not None and self._numbers.get(replaced.id) == number:
                    del self._numbers[replaced.id]
                self._assign(page, number)
                self._has_learned = True
        self._step(index)

    def died(self, page: Page) -> None:
        """The page is gone, and is kept no longer: dead pages would survive young collections."""
        number = self._numbers.pop(page.id, None)
        if number is not None and self.pages[number] is page:
            self.pages[number] = None

    # --- what others want to know ----------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the trace has been followed to its end, and little came behind it."""
        return self.index == len(self.known.names) and self.num_lost <= _MAX_TAIL

    @property
    def is_nearly_over(self) -> bool:
        """Whether only a few operations are left, such as those that bring the next batch."""
        num_ops = len(self.known.names)
        is_near = num_ops - self.index <= min(_MAX_TAIL, num_ops // _TAIL_PART)
        return is_near and self.num_lost <= _MAX_TAIL

    @property
    def is_alike(self) -> bool:
        """Whether it was followed to its end, and most of it was done, and little else."""
        return self.is_nearly_over and self._num_other * 2 <= len(self.known.names)

    def origins(self) -> dict[int, Origin]:
        """Of the pages that this iteration has created and that are alive; by page id."""
        self._look_at_births()
        known = self.known
        return {
            page.id: (known.id, number)
            for number, (page, facts) in enumerate(zip(self.pages, known.trace.pages, strict=True))
            if page is not None and facts.born is not None and page.state is not _DEAD
        }

    def learn(self) -> None:
        """Keeps what pages stood for the trace's, for the next time."""
        if not self._has_learned:
            return
        known, alive = self.known, self._table.pages
        known.ids = {
            page_id: number
            for page_id, number in known.ids.items()
            if page_id in alive and ((page := self.pages[number]) is None or page.id == page_id)
        }
        for number, page in enumerate(self.pages):
            facts = known.trace.pages[number]
            if facts.born is None and facts.died is None and self._is_there(number):
                assert page is not None
                known.ids[page.id] = number

    def number_of(self, page_id: int) -> int | None:
        """The page's number in the trace; None: it has none."""
        self._look_at_births()
        return self._numbers.get(page_id)

    def next_use(self, page_id: int) -> float | None:
        """See `planning.View.next_use`; the operation that runs is the last one that fitted."""
        number = self.number_of(page_id)
        if number is None:
            return None
        pages, now = self.known.trace.pages, self.index - 1
        use = self.known.next_use(number, self.index)
        if use is not None:
            return use - now
        following = pages[number].becomes
        if pages[number].died is not None or following is None:
            return math.inf if pages[number].died is not None else None
        use = self.known.next_use(following, 0)
        return math.inf if use is None else len(self.known.names) - now + use


def _distinct(pages: Sequence[Page]) -> list[Page]:
    return list(dict.fromkeys(pages))
