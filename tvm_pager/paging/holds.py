"""Pages that others work on after the operation has returned, such as a collective in flight.

[Note: Work of others]
    The pager did not start the work and gets no event of its end: it asks, the oldest one at each
    `DemandPager.drain`, all of them where room is lacking. Nobody calls back into the pager, so
    no thread of the other party ever takes its lock. A request that such work blocks waits and asks
    again, as it waits for the pins of other threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tvm_pager.memory import PageState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.memory import Page
    from tvm_pager.paging.pager import DemandPager

__all__ = ["Holds", "OutsideWork"]


class OutsideWork(Protocol):
    """Work on pages that the pager neither started nor runs."""

    pages: Sequence[Page]  # each once; resident, and to stay so
    written: Sequence[Page]  # those of `pages` whose bytes it may change
    # Whether it ends whatever this process does next: a blocked request may wait for it.
    is_awaitable: bool
    ends_at_boundary: bool  # for want of a `done` that could be trusted

    def done(self) -> bool:
        """Whether it will touch its pages no more. Neither blocks nor raises."""
        ...


class Holds:
    """The works that hold pages now. Used under the pager's lock."""

    def __init__(self, pager: DemandPager) -> None:
        self._pager = pager
        self.works: list[OutsideWork] = []  # oldest first

    def add(self, work: OutsideWork) -> None:
        """Holds the pages of `work` until it is done."""
        self.poll()  # a program that never lacks room would gather works for ever
        for page in work.pages:
            self._pager.hold(page)
        self.works.append(work)

    def poll(self) -> None:
        """Ends the holds of all works that are done."""
        self._end(lambda work: work.done())

    def poll_oldest(self) -> None:
        """As `poll`, if the oldest work is done: cheap enough for each operation."""
        works = self.works
        if works and (works[0].done() or _is_abandoned(works[0])):
            self.poll()

    def pass_boundary(self) -> None:
        """An iteration boundary: ends the holds of the works that cannot tell their end."""
        self._end(lambda work: work.ends_at_boundary or work.done())

    @property
    def can_end(self) -> bool:
        """Whether a blocked request may wait for one of the works."""
        return any(work.is_awaitable for work in self.works)

    def _end(self, is_over: Callable[[OutsideWork], bool]) -> None:
        # Taken out first: asking may run any code, which may come back here.
        works, self.works = self.works, []
        going_on = []
        for work in works:
            if is_over(work) or _is_abandoned(work):
                self._release(work)
            else:
                going_on.append(work)
        self.works = going_on + self.works

    def _release(self, work: OutsideWork) -> None:
        for page in work.written:
            if page.state is not PageState.DEAD:
                self._pager.written(page)  # until now
        for page in work.pages:
            if page.state is not PageState.DEAD:
                self._pager.drop(page)


def _is_abandoned(work: OutsideWork) -> bool:
    """Whether all tensors on its pages are gone, and the pages with them."""
    return all(page.state is PageState.DEAD for page in work.pages)
