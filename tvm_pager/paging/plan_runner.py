"""Does what a plan says when its moments come. The pager's lock is held.

[Note: What a fetch may take]
    A fetch begins when its bytes are free now and will not be wanted before its deadline: the
    occupancy to expect (plan_book.py), corrected by how far the run is from it now, stays within
    the budget with the page on top. What has been fetched before its deadline, and released before
    its own, is part of the present difference and of what is expected from that deadline on, so it
    is corrected for there (`_expected`), until that deadline has come and `base_bytes` knows of it
    (`_passed_bytes`). Fetches are tried by deadline; the first one that finds no room stops the
    others, which would take it.
"""

from __future__ import annotations

import contextlib
from bisect import insort
from collections import Counter
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.memory import PageState, Tier
from tvm_pager.planning.plan import Clean, Evict, Fetch
from tvm_pager.planning.traces.occupancy import Occupancy
from tvm_pager.transfer.protocol import Priority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.memory import Page
    from tvm_pager.paging.follower import Follower
    from tvm_pager.paging.known_trace import KnownTrace
    from tvm_pager.paging.pager import DemandPager
    from tvm_pager.paging.plan_book import PlanBook

__all__ = ["PlanRunner"]

_DEAD, _RESIDENT, _FETCHING = PageState.DEAD, PageState.RESIDENT, PageState.FETCHING
_NEVER = 1 << 62  # no moment comes so late
_REAP_EVERY = 4  # operations: asking whether a copy has ended costs as much as one of them


class PlanRunner:
    """Executes one plan at a time. It never blocks but for an eviction at its deadline.

    Attributes:
        leaving: evictions that have begun and are not over, by page number.
        waiting: fetches that may begin and have not, by deadline, priority and arrival.
        unused: deadlines of the fetches that have begun and found no use yet, by page number.
        late: pages whose fetch had begun and was still queued when their operation came.
        dropped: pages with an action that found no chance up to its deadline.
        reasons: why, for people.
    """

    def __init__(self, pager: DemandPager) -> None:
        self.unused: dict[int, int] = {}
        self.late: list[int] = []
        self.dropped: set[int] = set()
        self.reasons: Counter[str] = Counter()
        self._pager = pager
        self._book: PlanBook | None = None
        self._pages: Sequence[Page | None] = ()
        self.leaving: dict[int, Evict] = {}
        self.waiting: list[tuple[int, int, int, Fetch]] = []
        self._num_waited = 0
        self._expected = Occupancy.of([0])  # what is busy by moment, corrected; see the note
        self._corrections: list[tuple[int, int]] = []  # a heap of (deadline, less bytes)
        self._passed_bytes = 0  # of corrections whose deadline has come
        self._retry_at, self._retry_below = 0, 0
        self._stuck: tuple[int, int, int, Fetch] | None = None
        self._next_due = 0  # before it, and unless a copy ends, none of `leaving` can go
        self._num_ended = -1  # copies, when `leaving` was looked through
        self._unwanted: list[Page] = []
        self._is_busy = False

    # --- following a trace -----------------------------------------------------------------------

    def start(self, known: KnownTrace, pages: Sequence[Page | None], moment: int) -> None:
        """Goes on by the plan of a trace, whatever is where now. O(pages).

        Args:
            known: has a plan.
            pages: by number; kept, and looked at again at each moment.
            moment: which is about to come.
        """
        self._book, self._pages = known.book, pages
        self._forget_moves()
        book = self._book
        assert book is not None
        self._expected = Occupancy(book.busy.nbytes)
        for number, page in enumerate(pages):
            if page is None or page.state is _DEAD:
                continue
            if page.is_on_device:
                if not book.is_present(number, moment):
                    until = known.next_use(number, moment)
                    last = len(known.trace.ops) if until is None else until
                    self._evict(Evict(number, moment, last), moment)
            elif book.is_present(number, moment) and number not in self.unused:
                use = known.next_use(number, moment)
                if use is not None:
                    self._wait(Fetch(number, moment, use))
        for action in book.open_at(moment) if moment else ():
            self._begin(action, moment)

    def renumber(self, follower: Follower) -> None:
        """Another trace has taken over: what is on its way has other numbers there."""
        renumbered: dict[int, int] = {}
        for number, deadline in self.unused.items():
            page = self._pages[number]
            if page is None:
                continue
            other = follower.number_of(page.id)
            if other is None:
                self._unwanted.append(page)
            else:
                renumbered[other] = deadline
        self.unused = renumbered

    def run(self, moment: int) -> None:
        """Begins what may begin now, and ends what is due. The next operation has this number."""
        book = self._book
        if book is None or self._is_busy:
            return
        actions = book.at[moment]
        self._is_busy = True  # an eviction may give up the lock, and others come here
        try:
            if moment % _REAP_EVERY == 0:
                self._pager.flight.reap()
            for action in actions or ():
                self._begin(action, moment)
            if self.leaving:
                self._release(moment)
            if self.waiting:
                self._fetch(moment)
        finally:
            self._is_busy = False

    def use(self, number: int) -> None:
        """An operation names a page that was fetched for it."""
        del self.unused[number]
        page = self._pages[number]
        if page is None or page.state is not _FETCHING:
            return
        if not all(ticket.is_certain or ticket.done() for ticket in page.tickets):
            self.late.append(number)

    def stop(self, *, keep_from: int | None = None) -> None:
        """Follows the plan no longer: fetches that found no use are called off or released.

        Args:
            keep_from: those with this deadline or a later one stay: the iteration is over, as
                planned, and they are for the next one.
        """
        self._book = None
        self._forget_moves()
        for number, deadline in self.unused.items():
            page = self._pages[number]
            if page is not None and (keep_from is None or deadline < keep_from):
                self._unwanted.append(page)
        self.unused.clear()
        self.release_unwanted()

    def release_unwanted(self) -> bool:
        """Takes the device memory of fetches that found no use; True if some went."""
        pager, unwanted = self._pager, self._unwanted
        self._unwanted = []
        has_freed = False
        for page in unwanted:
            if page.state is _FETCHING:
                if not pager.flight.cancel(page):
                    self._unwanted.append(page)  # in flight: later
                    continue
                with contextlib.suppress(TransferError):
                    pager.flight.settle(page)
                has_freed = True
            elif page.state is _RESIDENT and page.is_clean and pager.evictor.may_leave(page.id):
                with contextlib.suppress(TransferError):
                    has_freed |= pager.mover.evict(page)
        return has_freed

    def _forget_moves(self) -> None:
        self.leaving.clear()
        self.waiting.clear()
        self._corrections.clear()
        self._passed_bytes = 0
        self._retry_at = self._next_due = 0

    # --- single actions --------------------------------------------------------------------------

    def _begin(self, action: Evict | Fetch | Clean, moment: int) -> None:
        page = self._pages[action.page]
        if page is None or page.state is _DEAD:
            self._drop(action.page, "the page is not there")
        elif isinstance(action, Fetch):
            if action.to is Tier.HOST:
                self._stage(action, page)
            else:
                self._wait(action)
        elif not page.is_on_device:
            if moment == 0 and isinstance(action, Evict):
                return  # what the iteration does not use, and is away since an earlier one
            self._drop(action.page, "the page is off the device already")
        elif isinstance(action, Clean):
            self._write_back(page, action.to)
        else:
            self._evict(action, moment)

    def _drop(self, number: int, reason: str) -> None:
        self.dropped.add(number)
        self.reasons[reason] += 1

    def _wait(self, action: Fetch) -> None:
        self._num_waited += 1
        insort(self.waiting, (action.deadline, action.priority, self._num_waited, action))
        self._retry_at = 0

    def _stage(self, action: Fetch, page: Page) -> None:
        if page.state is not PageState.EVICTED or not self._pager.host_room.promote(page):
            self._drop(action.page, "no room in the slab, or the page is elsewhere")

    def _evict(self, action: Evict, moment: int) -> None:
        self.leaving[action.page] = action
        self._next_due = 0
        page = self._pages[action.page]
        if page is not None:
            self._write_back(page, action.to)

    def _write_back(self, page: Page, to: Tier | None) -> None:
        """Starts a copy down, unless room for it would have to be made first, which blocks."""
        if page.state is not _RESIDENT or page.is_clean:
            return
        frames = self._pager.table.frames
        host = frames[Tier.HOST]
        if to is not Tier.NVME and self._pager.table.host_free_bytes < host.rounded(page.nbytes):
            if to is Tier.HOST or not frames[Tier.NVME].capacity_bytes:
                return  # at its deadline, then
            to = Tier.NVME
        try:
            self._pager.mover.start_write_back(page, to, Priority.WRITE_BACK)
        except TransferError:
            self.reasons["no tier below has room"] += 1

    # --- leaving ---------------------------------------------------------------------------------

    def _release(self, moment: int) -> None:
        num_ended = self._pager.flight.num_ended
        if moment < self._next_due and num_ended == self._num_ended:
            return
        self._num_ended, next_due = num_ended, _NEVER
        for number, action in list(self.leaving.items()):
            page = self._pages[number]
            if page is None or page.state is _DEAD or not page.is_on_device:
                self.leaving.pop(number, None)
                continue
            is_due = moment >= action.deadline
            is_over = page.state is _RESIDENT and page.is_clean
            if not (is_due or is_over):
                next_due = min(next_due, action.deadline)
                continue
            if self._pager.evictor.may_leave(page.id) and self._leave(page, action):
                self.leaving.pop(number, None)
                if moment < action.deadline:
                    self._correct(action.deadline, page.frame_bytes)
                self._retry_at = 0
            elif is_due:
                self.leaving.pop(number, None)
                self._drop(number, "the page was in use at the deadline of its eviction")
            else:
                next_due = 0  # it could go, but is in use now
        self._next_due = next_due

    def _leave(self, page: Page, action: Evict) -> bool:
        try:
            return self._pager.mover.evict(page, action.to)
        except TransferError:
            self.reasons["the page could not be written"] += 1
            return False

    # --- coming ----------------------------------------------------------------------------------

    def _fetch(self, moment: int) -> None:
        if self._is_stuck(moment):
            return
        kept: list[tuple[int, int, int, Fetch]] = []
        waiting, self.waiting = self.waiting, []
        for position, entry in enumerate(waiting):
            action = entry[3]
            page = self._pages[action.page]
            if page is None or page.state is _DEAD or page.is_on_device:
                self._retry_at = 0
                continue  # gone, or there
            if action.deadline <= moment:
                self._retry_at = 0
                self._drop(action.page, "no room for a fetch up to its deadline")
                continue
            if not page.can_be_fetched:
                kept.append(entry)  # a copy to or from the disk is in the way
                continue
            if not self._has_room(page, moment, action.deadline):
                self._stuck = None if kept else entry
                kept += waiting[position:]
                break
            if self._pager.prefetcher.begin(page):
                self.unused[action.page] = action.deadline
                self._correct(action.deadline, -page.frame_bytes)
            else:
                self._drop(action.page, "the device or the tier below refused")
        self.waiting = kept + self.waiting  # new ones: from a wait without the lock

    def _is_stuck(self, moment: int) -> bool:
        """Whether the first fetch found no room the last time, and would find none again."""
        entry = self.waiting[0]
        if entry is not self._stuck or entry[0] <= moment:
            return False
        pager, book, page = self._pager, self._book, self._pages[entry[3].page]
        if page is None or book is None or not page.can_be_fetched:
            return False
        used_bytes = pager.table.device_used_bytes
        if used_bytes + page.frame_bytes > pager.budget_bytes - pager.overhead_bytes:
            return True
        beyond = used_bytes - book.base_bytes[moment]
        return moment < self._retry_at and beyond > self._retry_below

    def _has_room(self, page: Page, moment: int, deadline: int) -> bool:
        """See [Note: What a fetch may take]."""
        pager, book = self._pager, self._book
        assert book is not None
        nbytes = page.frame_bytes
        used_bytes = pager.table.device_used_bytes
        limit_bytes = pager.budget_bytes - pager.overhead_bytes
        if used_bytes + nbytes > limit_bytes or pager.reservations.queue:
            return False
        beyond = used_bytes - book.base_bytes[moment]
        corrections = self._corrections
        # `base_bytes` knows of evictions that are due now, and not of fetches that are.
        while corrections and (
            corrections[0][0] < moment or (corrections[0][0] == moment and corrections[0][1] < 0)
        ):
            self._passed_bytes -= heappop(corrections)[1]
        room = limit_bytes - nbytes - beyond + self._passed_bytes
        busiest_bytes, busiest = self._expected.busiest(moment, deadline)
        if busiest_bytes <= room:
            return True
        self._retry_at = busiest + 1
        self._retry_below = beyond - (busiest_bytes - room)
        return False

    def _correct(self, deadline: int, nbytes: int) -> None:
        """From a deadline on the page's bytes are not what the plan says, but `nbytes` more."""
        heappush(self._corrections, (deadline, -nbytes))
        self._expected.add((deadline, self._expected.num_moments - deadline), nbytes)
