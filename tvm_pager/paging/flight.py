"""Transfers in flight: submits them, and finishes the transitions that they belong to.

Everything runs under the pager's lock, except a wait that its caller declares to be unlocked.

[Note: Memory is reused only after its last reader]
    `settle` and `arrive` are the only ways out of an in-flight state. `settle` waits for every
    ticket of the page, also when the copy was superseded or has failed; `arrive` lets all use of
    the page come after the fetch in stream order, and the page remembers that the frames below are
    still being read. Device memory is released, and frames are freed, by the transitions that
    follow. So no byte is reused while a copy reads or writes it, whatever the order of write-back,
    fault, write and free (hazard: a write-back that was cancelled in the books and still ran).
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import TransferError
from tvm_pager.events import Event, EventKind
from tvm_pager.memory import Page, PageState, Tier
from tvm_pager.paging.failures import FailureLog, copy_failed
from tvm_pager.paging.view import host_frame_bytes
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.events import EventSink
    from tvm_pager.memory import PageTable
    from tvm_pager.paging.tier_policy import TierPolicy
    from tvm_pager.transfer.protocol import Backend, Checker, Ticket

__all__ = ["Flight"]

_TIER_IS_BROKEN = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT})
_UP = frozenset({Lane.H2D, Lane.N2D, Lane.N2H, Lane.R2D})
_MAX_ON_STREAM = 1024  # tickets
_WITHOUT_DEVICE = frozenset({Lane.H2N, Lane.N2H})


class Flight:
    """All tickets of one pager.

    Args:
        table: whose pages.
        backend: moves the bytes.
        policies: told of arrivals and departures.
        sink: takes the events.
        clock: nanoseconds.
        on_tier_closed: called when a tier has just been closed.
        owner_executors: used by every page whose `executors` is None.
        current_executor: the calling thread's executor; None where there are none.
        checker: compares what comes back with what left.
        wait_unlocked: runs a blocking call with the pager's lock given up.
    """

    def __init__(
        self,
        table: PageTable,
        backend: Backend,
        policies: dict[Tier, TierPolicy],
        sink: EventSink | None,
        clock: Callable[[], int],
        on_tier_closed: Callable[[], None],
        owner_executors: tuple[Any, ...],
        current_executor: Callable[[], Any] | None,
        checker: Checker | None,
        wait_unlocked: Callable[[Callable[[], None]], None],
    ) -> None:
        self.pages: dict[int, Page] = {}  # with tickets, oldest first
        self.num_failed_demotions = 0
        self.num_ended = 0  # transitions that ended, well or not
        self.failures = FailureLog()
        self.owner = owner_executors[0] if owner_executors else None
        self.checker = checker
        self._table = table
        self._backend = backend
        self._policies = policies
        self._sink = sink
        self._clock = clock
        self._on_tier_closed = on_tier_closed
        self._owner_executors = owner_executors
        self._current_executor = current_executor
        self._wait_unlocked = wait_unlocked
        self._started_ns: dict[int, int] = {}
        # Tickets that pages went on without, in stream order; they hold no memory. Who asks for the
        # backlog clears away what is done: the bound is for where nobody does.
        self._on_stream: deque[Ticket] = deque(maxlen=_MAX_ON_STREAM)
        self._queues: dict[Lane, deque[tuple[Page, tuple[Ticket, ...]]]] = {
            lane: deque() for lane in Lane
        }

    # --- starting --------------------------------------------------------------------------------

    def executors_of(self, page: Page) -> tuple[Any, ...]:
        """The executors whose queued work may use the page's device memory."""
        return self._owner_executors if page.executors is None else tuple(page.executors)

    def home_of(self, page: Page) -> Any:
        """The executor whose memory pool the page's device memory belongs to."""
        return page.home if page.home is not None else self.owner

    def submit(
        self, page: Page, lanes: dict[Lane, list[Piece]], priority: Priority
    ) -> tuple[Ticket, ...]:
        """Queues one transfer for each lane. The caller begins the transition with the tickets."""
        needs_device = not lanes.keys() <= _WITHOUT_DEVICE
        memory = page.memory() if needs_device else None
        after = self.executors_of(page) if needs_device else ()
        behind = page.readers and tuple(ticket for ticket in page.readers if not ticket.done())
        self._started_ns[page.id] = self._clock()
        tickets: tuple[Ticket, ...] = ()
        for lane, pieces in lanes.items():
            transfer = Transfer(page.id, lane, tuple(pieces), memory, after, page.source, behind)
            tickets = (*tickets, self._backend.submit(transfer, priority))
        if tickets:
            self.pages[page.id] = page
            self._queues[tickets[0].transfer.lane].append((page, tickets))
        return tickets

    def promote(self, page: Page) -> None:
        """Makes the page's transfers as urgent as an operation that waits for them."""
        for ticket in page.tickets:
            self._backend.promote(ticket, Priority.FAULT)

    def cancel(self, page: Page) -> bool:
        """Stops what has not begun; True if that is all of it. The caller settles the page.

        A fetch behind a copy down that is under way goes on: the page could go nowhere else.
        """
        if page.state is PageState.FETCHING and not all(ticket.done() for ticket in page.readers):
            return False
        stopped = [self._backend.cancel(ticket) for ticket in page.tickets]
        return all(stopped)

    # --- finishing -------------------------------------------------------------------------------

    def settle(self, page: Page, *, unlocked: bool = False) -> None:
        """Waits for the page's transfers and finishes the transition they belong to.

        See [Note: Memory is reused only after its last reader].

        Args:
            page: which.
            unlocked: whether the lock may be given up meanwhile; then the page may be in any state
                afterwards, and another thread may have got the error.

        Raises:
            TransferError: one of them failed; the page is in the state that the failure leads to.
        """
        tickets = page.tickets
        if not tickets:
            self.pages.pop(page.id, None)  # a dead page that the table has reaped
            return
        failure: TransferError | None = None
        for ticket in tickets:
            try:
                if unlocked and not ticket.done():
                    self._wait_unlocked(ticket.wait)
                else:
                    ticket.wait()
            except TransferError as error:
                failure = failure or error.with_traceback(None)  # else it holds this frame
        if page.tickets is tickets:  # else another thread has finished it
            self._finish(page, failure)

    def arrive(self, page: Page) -> None:
        """Makes a FETCHING page usable, in stream order where the backend has one.

        Blocks, with the lock given up, for what the host has to do; the page may be in any state
        afterwards.

        Raises:
            TransferError: as `settle`.
        """
        if self.checker is not None:
            self.settle(page, unlocked=True)
            return
        tickets = page.tickets
        executors = {*self._owner_executors, self.home_of(page)}
        if self._current_executor is not None:
            executors.add(self._current_executor())
        failure: TransferError | None = None
        for ticket in tickets:
            try:
                if ticket.is_certain:
                    self._backend.order(ticket, tuple(executors))
                else:
                    self._wait_unlocked(partial(self._backend.order, ticket, tuple(executors)))
            except TransferError as error:
                failure = failure or error.with_traceback(None)  # else it holds this frame
        if page.tickets is tickets:
            if failure is not None:
                self.settle(page)  # waits for the others
            else:
                self._finish(page, None)
                self._on_stream.extend(ticket for ticket in page.readers if ticket in tickets)

    def hand_over(self, page: Page) -> None:
        """A LEAVING page is fetched again: its copies down end by themselves, well.

        They read memory that has left the page, which must not keep it alive: nobody may ask them
        again.
        """
        self.pages.pop(page.id, None)
        self._on_stream.extend(page.tickets)
        self._report(page, None)
        for ticket in page.tickets:
            ticket.transfer.memory = None

    def backlog_bytes(self, lane: Lane) -> int:
        """See `planning.View.backlog_bytes`."""
        self._on_stream = deque((t for t in self._on_stream if not t.done()), _MAX_ON_STREAM)
        held = [ticket for page in self.pages.values() for ticket in page.tickets]
        return sum(
            ticket.transfer.nbytes
            for ticket in (*held, *self._on_stream)
            if ticket.transfer.lane is lane and not ticket.done()
        )

    def order_again(self, page: Page, executor: Any) -> None:
        """Lets `executor` too come after a fetch that others were ordered behind."""
        for ticket in page.readers:
            self._backend.order(ticket, (executor,))

    def reap(self) -> None:
        """Finishes what has ended by itself.

        Never blocks; failures show in the page's state and in the events. Looks at the oldest
        transfer of each lane only, until one is not done: O(lanes) where nothing has ended.
        """
        self._backend.poll()
        for queue in self._queues.values():
            while queue:
                page, tickets = queue[0]
                if page.tickets is tickets:
                    if not _are_done(tickets):
                        break
                    with contextlib.suppress(TransferError):
                        self.settle(page)
                queue.popleft()
        self._table.leave_limbo()

    def settle_any(self) -> bool:
        """Blocks, with the lock given up, for the oldest transfer; False if there is none."""
        page = next(iter(self.pages.values()), None)
        if page is None:
            return False
        self.promote(page)
        with contextlib.suppress(TransferError):  # the page's state and the events have it
            self.settle(page, unlocked=True)
        return True

    def settle_all(self) -> None:
        """Blocks, with the lock given up, until no transfer is under way."""
        while self.settle_any():
            pass

    def await_copies_down(self) -> None:
        """Blocks, with the lock held, until no page is on its way down; failures as in `reap`."""
        for page in list(self.pages.values()):
            if page.state in (PageState.WRITING_BACK, PageState.LEAVING):
                with contextlib.suppress(TransferError):
                    self.settle(page)

    def wait_for_limbo(self, tier: Tier) -> bool:
        """Blocks, with the lock given up, until free frames of the tier are not read any more."""
        for readers, place, _ in self._table.limbo:
            if place is tier:
                for ticket in readers:
                    self._wait_unlocked(ticket.wait)
                self._table.reap()
                return True
        return False

    def _finish(self, page: Page, failure: TransferError | None) -> None:
        self.pages.pop(page.id, None)
        self.num_ended += 1
        is_mismatch = False
        if failure is None and page.state is PageState.FETCHING:
            failure = self._mismatch(page)
            is_mismatch = failure is not None
        self._report(page, failure)
        if page.state is PageState.DEAD:
            self._table.bury(page)
            return
        if failure is not None:
            error = failure if is_mismatch else copy_failed(page, self._table, failure)
            self._fail(page, failure)
            if failure.errno == errno.ECANCELED:  # somebody wanted that
                return
            try:
                raise error
            finally:
                # Error and frame would hold each other, and with them the page's memory.
                del error, failure
        if page.state is PageState.FETCHING:
            self._table.finish_fetch(page)
            self._policies[Tier.DEVICE].used(page)
        elif page.state is PageState.WRITING_BACK:
            self._table.finish_write_back(page)
        elif page.state is PageState.LEAVING:
            self._table.finish_leave(page)
        else:
            self._table.finish_demote(page)
        if host_frame_bytes(page):
            self._policies[Tier.HOST].used(page)
        else:
            self._policies[Tier.HOST].removed(page)

    def _mismatch(self, page: Page) -> TransferError | None:
        memory = page.memory()
        if self.checker is None or memory is None or self.checker.is_intact(memory):
            return None
        lanes = ", ".join(ticket.transfer.lane.value for ticket in page.tickets)
        return TransferError(
            f"{page!r} came back over {lanes} with other bytes than it left with: its checksum "
            "differs. The host memory, the disk or the pager is at fault; its copies below are kept"
        )

    def _fail(self, page: Page, failure: TransferError) -> None:
        state = page.state
        if state is PageState.FETCHING:
            memory = page.memory()
            if memory is not None:
                self._backend.release_device(memory, (), (), self.home_of(page))
            if failure.errno == errno.ECANCELED:
                self._table.cancel_fetch(page)
            else:
                self._table.fail_fetch(page)
            self._policies[Tier.DEVICE].removed(page)  # it counts as there from the beginning
            return
        if state is PageState.LEAVING:
            self._table.fail_leave(page)
            return
        to_nvme = any(tier is Tier.NVME for _, tier, _ in self._table.arrivals_of(page.id))
        is_bad = to_nvme and failure.errno in _TIER_IS_BROKEN
        if state is PageState.WRITING_BACK:
            self._table.fail_write_back(page, is_bad=is_bad)
        else:
            self._table.fail_demote(page, is_bad=is_bad)
            self.num_failed_demotions += to_nvme and failure.errno != errno.ECANCELED
        if is_bad:
            if Tier.NVME not in self._table.closed_tiers:
                self.failures.tell_rest()
            self._table.close_tier(Tier.NVME, str(failure))
            self._on_tier_closed()  # last: the frames that are bad by now back no page

    # --- events ----------------------------------------------------------------------------------

    def emit(
        self, kind: EventKind, page: Page, nbytes: int, lane: str | None, start_ns: int, detail: str
    ) -> None:
        """Tells the sink, if there is one."""
        if self._sink is not None:
            self._sink.emit(Event(kind, page.id, nbytes, lane, start_ns, self._clock(), detail))

    def _report(self, page: Page, failure: TransferError | None) -> None:
        started_ns = self._started_ns.pop(page.id, self._clock())
        if failure is not None:
            if failure.errno != errno.ECANCELED:
                self.emit(EventKind.FAILURE, page, 0, None, started_ns, str(failure))
                self.failures.add(page, failure)
            return
        for ticket in page.tickets:
            lane = ticket.transfer.lane
            kind = EventKind.FETCH if lane in _UP else EventKind.WRITE_BACK
            self.emit(kind, page, ticket.transfer.nbytes, lane.value, started_ns, "")


def _are_done(tickets: tuple[Ticket, ...]) -> bool:
    for ticket in tickets:  # noqa: SIM110  # a generator takes four times as long for one ticket
        if not ticket.done():
            return False
    return True
