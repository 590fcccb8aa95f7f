"""A trace that the pager has recorded, and what it takes to recognise it when it comes again."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from tvm_pager.memory import PageKind
from tvm_pager.paging.trace_facts import TraceFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tvm_pager.memory import Page
    from tvm_pager.paging.follower import Departure
    from tvm_pager.paging.plan_book import PlanBook
    from tvm_pager.paging.recorder import Origin, Recording
    from tvm_pager.planning import Limits, Trace

__all__ = ["UNKNOWN", "KnownTrace"]

UNKNOWN = -1  # a successor that was not recorded

_FADING = 0.75  # of a successor's weight, by each iteration that comes after the trace
_LEAST_WEIGHT = 0.01
_NUM_ALIKE = 4  # iterations that have left a trace in the same way

_KEPT = frozenset({PageKind.PARAM, PageKind.GRAD, PageKind.OPT_STATE, PageKind.BUFFER})


class KnownTrace:
    """One iteration that the program has run, by structure: names, page numbers, not sizes.

    Args:
        id: of its own, never used for another one.
        recording: how it was first seen.

    Attributes:
        trace: as recorded last.
        operands: of each operation, page numbers as passed.
        names: of the operations.
        ids: numbers of the pages that live through the iteration, by page id.
        carried: numbers of the pages that the iteration before creates, by their origin.
        num_mentioned: the pages with smaller numbers are named by some operation.
        is_confirmed: whether the program has done it, or nearly it, twice, about as large.
        uses: of each page, the operations that name it, rising.
        created_bytes: device bytes of all pages that are born in it.
        last_followed: a number that rises with each iteration.
        book: its plan; None: it has none.
        limits: what the plan was made for; None: nobody was asked for one.
    """

    def __init__(self, id: int, recording: Recording) -> None:
        self.id = id
        self.is_confirmed = False
        self.last_followed = 0
        # Deviations of iterations that were followed to their end, and how often, by departure.
        self._deviations: dict[Departure, tuple[int, int]] = {}
        self._num_misses = 0
        self._successors: dict[int, float] = {}  # weights, by trace id
        self._facts: TraceFacts | None = None
        self.book: PlanBook | None = None
        self.limits: Limits | None = None
        self._shared: dict[int, int] = {}  # operations in common at the beginning, by other's id
        self._take(recording)

    def _take(self, recording: Recording) -> None:
        self.trace, self.operands = recording.trace, recording.operands
        self.names = [op.name for op in self.trace.ops]
        self.num_mentioned = recording.num_mentioned
        self.carried: dict[Origin, int] = dict(recording.carried)
        pages = self.trace.pages
        self.ids = {
            page_id: number
            for page_id, number in recording.numbers.items()
            if pages[number].born is None and pages[number].died is None
        }
        uses: list[list[int]] = [[] for _ in pages]
        for index, op in enumerate(self.trace.ops):
            for number in op.reads:
                uses[number].append(index)
        self.uses = uses
        self.created_bytes = _created_bytes(self.trace)

    @property
    def facts(self) -> TraceFacts:
        """What the trace says of its pages to those who ask; kept."""
        if self._facts is None or self._facts.trace is not self.trace:
            self._facts = TraceFacts(self.trace, self.uses)
        return self._facts

    def origins_in(self, recording: Recording) -> dict[int, Origin]:
        """Of the pages that the recorded iteration has created and that are alive; by page id."""
        pages = recording.trace.pages
        return {
            page_id: (self.id, number)
            for page_id, number in recording.numbers.items()
            if pages[number].born is not None and pages[number].died is None
        }

    def as_own(self, origins: Mapping[int, Origin]) -> dict[int, Origin]:
        """The same numbers in this trace, which begins as the other one."""
        return {page_id: (self.id, number) for page_id, (_, number) in origins.items()}

    def is_same_as(self, recording: Recording) -> bool:
        """Whether the recording is of an iteration that does the same to the same pages."""
        return (
            len(self.trace.ops) == len(recording.trace.ops)
            and self.operands == recording.operands
            and all(
                mine.name == other.name and mine.creates == other.creates
                for mine, other in zip(self.trace.ops, recording.trace.ops, strict=True)
            )
            # Two models of the same structure have other pages for the same numbers.
            and all(
                recording.numbers.get(page_id, number) == number
                for page_id, number in self.ids.items()
                if number < self.num_mentioned
            )
        )

    def confirm(self, recording: Recording) -> None:
        """The program did it again: `recording` is better, as what came before is known.

        What was confirmed, and creates as much as before, keeps trace and plan.
        """
        # Numbers of pages that no operation mentions depend on what came before.
        if self.is_confirmed and self.created_bytes == _created_bytes(recording.trace):
            self.carried |= {o: n for o, n in recording.carried.items() if n < self.num_mentioned}
            return
        carried = {o: n for o, n in self.carried.items() if n < recording.num_mentioned}
        self._take(recording)
        self.carried = carried | self.carried
        self.book = self.limits = None
        self._close()

    def confirm_as_like(
        self, other: KnownTrace, recording: Recording, pages: Sequence[Page | None]
    ) -> None:
        """The program did nearly what the iteration before, of the trace `other`, had done.

        Args:
            other: was followed to its end while this one was recorded.
            recording: of this one.
            pages: what pages stood for those of `other`, by number.
        """
        for number, page in enumerate(pages):
            mine = None if page is None else recording.numbers.get(page.id)
            target = self.carried.get((other.id, number))
            if mine is not None and target is not None:
                self.carried[self.id, mine] = target
        self._close()

    def _close(self) -> None:
        """Knows from now on what pages become where the trace follows on itself."""
        self.is_confirmed = True
        pages = list(self.trace.pages)
        for (trace_id, number), target in self.carried.items():
            if trace_id == self.id and number < len(pages) and target < len(pages):
                page = pages[number]
                # What is dead before its first operation is no part of the next iteration.
                has_next = pages[target].born is None and pages[target].died != 0
                if page.born is not None and page.died is None and has_next:
                    pages[number] = page._replace(becomes=target)
        self.trace = replace(self.trace, pages=tuple(pages))

    def followed(self, departure: Departure | None, deviation: int) -> None:
        """It has been followed to its end; see the attributes of `Follower`."""
        if departure is not None:
            before, num = self._deviations.get(departure, (deviation, 0))
            self._deviations[departure] = deviation, num + 1 if before == deviation else 1

    def is_left_at(self, departure: Departure) -> bool:
        """Whether the program goes its own way from there on, the same each time so far.

        Then that is worth a trace of its own.
        """
        return self._deviations.get(departure, (0, 0))[1] >= _NUM_ALIKE

    def followed_by(self, known: KnownTrace | None) -> None:
        """What came after it; None: nobody knows. The second time that, it is worth a recording."""
        self._num_misses = 0 if known is not None else self._num_misses + 1
        if known is not None:
            self._successors = {
                id: _FADING * weight
                for id, weight in self._successors.items()
                if weight > _LEAST_WEIGHT
            }
            self._successors[known.id] = self._successors.get(known.id, 0.0) + 1.0

    @property
    def successor(self) -> int | None:
        """Id of the trace that comes after it most often of late; None: nothing did so far.

        So one other iteration after a long run of equal ones (tokens, then a step of training)
        makes nobody expect that after each of them.
        """
        if self._num_misses > 1:
            return UNKNOWN
        return max(self._successors, key=self._successors.__getitem__, default=None)

    def forget(self, id: int) -> None:
        """There is no trace of that id any more."""
        self._successors.pop(id, None)

    def is_input(self, number: int) -> bool:
        """Whether the page comes from before the iteration, and no model or optimizer keeps it."""
        page = self.trace.pages[number]
        return page.born is None and page.kind not in _KEPT

    def next_use(self, number: int, index: int) -> int | None:
        """The first operation from `index` on that names the page; None: no more."""
        uses = self.uses[number]
        at = bisect_left(uses, index)
        return uses[at] if at < len(uses) else None

    def num_shared(self, other: KnownTrace) -> int:
        """How many operations the two have in common at their beginning."""
        found = self._shared.get(other.id)
        if found is None:
            mine = zip(self.trace.ops, self.operands, strict=True)
            others = zip(other.trace.ops, other.operands, strict=True)
            found = sum(
                1
                for _ in itertools.takewhile(
                    lambda pair: (
                        pair[0][1] == pair[1][1]
                        and pair[0][0].name == pair[1][0].name
                        and pair[0][0].creates == pair[1][0].creates
                    ),
                    zip(mine, others, strict=False),
                )
            )
            self._shared[other.id] = other._shared[self.id] = found
        return found


def _created_bytes(trace: Trace) -> int:
    return sum(page.frame_bytes for page in trace.pages if page.born is not None)
