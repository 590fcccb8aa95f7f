"""Admission: the operands of an operation on the device, with room for what it creates."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tvm_pager.errors import BudgetError, TransferError
from tvm_pager.events import Event, EventKind
from tvm_pager.interrupts import renew
from tvm_pager.memory import Backing, Page, PageState, Tier
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.events import EventSink
    from tvm_pager.paging.pager import DemandPager

__all__ = ["Admission"]


class Admission:
    """Grants requests whole; see [Note: Reservation] in reservations.py.

    Args:
        pager: whose pages.
        sink: takes an event for each fault.
        clock: nanoseconds.

    Attributes:
        largest_need_bytes: of one request so far: what a prefetch must leave free.
    """

    def __init__(
        self, pager: DemandPager, sink: EventSink | None, clock: Callable[[], int]
    ) -> None:
        self.largest_need_bytes = 0
        self._pager = pager
        self._sink = sink
        self._clock = clock

    def admit(self, pages: Sequence[Page], new_bytes: int, operation: str) -> None:
        """See `DemandPager.admit`."""
        renew()
        pager = self._pager
        pager.drain()
        pager.flight.reap()
        distinct = list({page.id: page for page in pages}.values())
        dropped = [
            page for page in distinct if page.backing is Backing.RECIPE and not page.is_on_device
        ]
        again = sum(pager.table.commit_of(page.nbytes) for page in dropped)
        pager.commit(new_bytes + again, operation)
        faults = [
            page
            for page in distinct
            if page.state is not PageState.RESIDENT and page.state is not PageState.WRITING_BACK
        ]
        need_bytes = new_bytes + sum(page.frame_bytes for page in faults)
        self.largest_need_bytes = max(self.largest_need_bytes, need_bytes)
        num_absent = sum(not page.is_on_device for page in faults)
        start_ns = self._clock()
        pager.running.append(distinct)
        try:
            self._bring(distinct, new_bytes, operation)
        finally:
            pager.running.remove(distinct)
        if pager.watch is not None:
            pager.iterations.waited(num_absent, self._clock() - start_ns)
        if self._sink is not None:
            for page in faults:
                event = Event(
                    EventKind.FAULT, page.id, page.nbytes, None, start_ns, self._clock(), operation
                )
                self._sink.emit(event)

    def _bring(self, pages: list[Page], new_bytes: int, operation: str) -> None:
        pager = self._pager
        # Waiting gives up the lock, and others may evict meanwhile what was there. Who needs no
        # room stands in nobody's way.
        while (
            not self._are_here(pages)
            or pager.free_bytes < new_bytes
            or (new_bytes and pager.reservations.queue)
        ):
            with pager.reservations.request() as turn:
                is_granted = False
                while not is_granted:
                    missing = self._missing(pages)
                    need = sum(page.frame_bytes for page in missing) + new_bytes
                    is_granted = not pager.reservations.make_room(turn, need, operation, pages)
                for page in missing:
                    self._start_fetch(page, operation)
            for page in pages:  # also those that another thread, or a prefetch, has started
                if page.state is PageState.FETCHING:
                    pager.flight.promote(page)
                    pager.flight.arrive(page)
            if self._are_here(pages) and pager.free_bytes >= new_bytes:
                return

    @staticmethod
    def _are_here(pages: list[Page]) -> bool:
        for page in pages:
            if page.state is not PageState.RESIDENT and page.state is not PageState.WRITING_BACK:
                return False
        return True

    def _missing(self, pages: list[Page]) -> list[Page]:
        """The pages that have to be fetched; ends the copies down that are in the way."""
        while True:
            for page in pages:
                self._stop_leaving(page)
            missing = [page for page in pages if not page.is_on_device]
            # Else one was moved during another's wait.
            if not any(page.state is PageState.DEMOTING for page in missing):
                return missing

    def _stop_leaving(self, page: Page) -> None:
        """Ends a copy down that is in the way of a fetch: called off, or waited for."""
        pager = self._pager
        if page.state is PageState.DEMOTING:
            pager.flight.cancel(page)
            with contextlib.suppress(TransferError):  # the bytes are in the slab all the same
                pager.flight.settle(page, unlocked=True)

    def _start_fetch(self, page: Page, operation: str) -> None:
        pager = self._pager
        if any(segment.host is not None for segment in page.segments):
            pager.policies[Tier.HOST].used(page)
        while not page.is_on_device and page.state is not PageState.DEMOTING:
            try:
                pager.mover.start_fetch(page)
            except MemoryError as error:  # fragmented, or others hold what the books call free
                if not pager.evictor.evict_some(page.frame_bytes):
                    raise BudgetError(
                        f"{operation}: the device refused {format_bytes(page.nbytes)} for {page!r} "
                        f"although {format_bytes(pager.free_bytes)} of the budget are free; lower "
                        "the device budget"
                    ) from error
