"""Moves single pages between tiers: write-back, eviction, fetch.

Decides where a written-back page goes, never which page leaves. Everything runs under the pager's
lock. See [Note: Memory is reused only after its last reader] in flight.py.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.events import EventKind
from tvm_pager.memory import Backing, Page, PageState, Tier
from tvm_pager.paging.failures import room_below
from tvm_pager.paging.frame_pieces import with_frame
from tvm_pager.transfer.protocol import Lane, Piece, Priority
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import Extent, PageTable, Segment
    from tvm_pager.memory.tier_books import Arrival
    from tvm_pager.paging.flight import Flight
    from tvm_pager.paging.host_room import HostRoom
    from tvm_pager.paging.tier_policy import TierPolicy
    from tvm_pager.transfer.protocol import Backend

__all__ = ["Mover"]

_DOWN = {Tier.HOST: Lane.D2H, Tier.NVME: Lane.D2N}


class Mover:
    """Write-back, eviction and fetch of single pages.

    Args:
        table: whose pages.
        backend: owns device memory.
        flight: carries the transfers.
        host_room: makes room in the slab.
        device_policy: told of evictions.
        may_leave: whether a page may be evicted now; asked again after each wait.
        clock: nanoseconds.
    """

    def __init__(
        self,
        table: PageTable,
        backend: Backend,
        flight: Flight,
        host_room: HostRoom,
        device_policy: TierPolicy,
        may_leave: Callable[[int], bool],
        clock: Callable[[], int],
    ) -> None:
        self.num_evicted = 0
        self._table = table
        self._backend = backend
        self._flight = flight
        self._host_room = host_room
        self._device_policy = device_policy
        self._may_leave = may_leave
        self._clock = clock

    # --- down ------------------------------------------------------------------------------------

    def start_write_back(
        self, page: Page, to: Tier | None = None, priority: Priority = Priority.FAULT
    ) -> None:
        """Starts copying the dirty segments down; the page stays on the device.

        Does not block on the copy. May block, with the lock given up, for room in the slab; if the
        page has another state then, nothing happens.

        Raises:
            TransferError: no tier below has room for them.
        """
        dirty = [part for part in self._table.segments_of(page) if part.is_dirty]
        memory = page.memory()  # kept alive by this reference until the transfers have it
        if page.has_source or not dirty or memory is None:
            return  # None: its last tensor has died, and the pager's next `drain` takes it out
        host = self._table.frames[Tier.HOST]
        need = sum(host.rounded(part.nbytes) for part in dirty)
        if to is not Tier.NVME and self._table.host_free_bytes < need:
            self._host_room.free(min(need, host.capacity_bytes))
            if page.state is not PageState.RESIDENT:
                return
        arrivals: list[Arrival] = []
        pieces: dict[Lane, list[Piece]] = {}
        for segment in self._table.segments_of(page):
            if not segment.is_dirty:
                continue
            found = self._frame_for(segment, to)
            if found is None:
                self._table.release_frames(arrivals)
                raise TransferError(self._no_room(page), errno.ENOSPC)
            tier, frame = found
            arrivals.append((segment, tier, frame))
            run = with_frame(segment, frame, to_frame=True)
            pieces.setdefault(_DOWN[tier], []).extend(run)
        if arrivals:
            tickets = self._flight.submit(page, pieces, priority)
            self._table.begin_write_back(page, arrivals, tickets)

    def _frame_for(
        self, segment: Segment, to: Tier | None
    ) -> tuple[Tier, tuple[Extent, ...]] | None:
        """Where the segment's bytes can go; DRAM first, unless NVMe is wanted."""
        for tier in (Tier.NVME, Tier.HOST) if to is Tier.NVME else (Tier.HOST, Tier.NVME):
            frame = self._table.allocate(tier, segment.nbytes)
            if frame is not None:
                return tier, frame
        frame = self._table.allocate_beyond(segment.nbytes)
        return None if frame is None else (Tier.HOST, frame)

    def evict(self, page: Page, to: Tier | None = None) -> bool:
        """Writes the page back if it is dirty, then takes its device memory away.

        Where memory is released in stream order the host waits for no copy to DRAM; for one to NVMe
        it does, because that could still fail. Gives up the lock while it blocks.

        Returns:
            False if the page stayed: it died, or was used, pinned or written meanwhile.

        Raises:
            TransferError: the page could not be written to any tier; it stays on the device,
                unharmed.
        """
        if page.state is PageState.FETCHING:
            self._flight.settle(page)
        memory = page.memory()  # kept alive by this reference until the end
        if memory is None:
            return False  # its last tensor died since it was chosen; the next `drain` takes it out
        start_ns = self._clock()
        was_clean = page.is_clean
        is_leaving = False
        while not is_leaving and not page.is_clean:
            num_closed = len(self._table.closed_tiers)
            try:
                self._begin_write_back(page, to)
                is_leaving = self._is_certain(page)
                if not is_leaving:
                    self._flight.settle(page, unlocked=True)
            except TransferError:
                if len(self._table.closed_tiers) == num_closed:
                    raise
                to = None  # a tier has just closed: the next round can only use the other
            if not self._may_leave(page.id):
                return False
        if page.state is PageState.WRITING_BACK and not is_leaving:
            with contextlib.suppress(TransferError):
                self._flight.settle(page)  # of a page that is clean in spite of it
        if page.pins:
            return False
        self._release(page, memory)
        if is_leaving:
            self._table.leave(page)
        else:
            self._table.evict(page)
        self._device_policy.removed(page)
        self.num_evicted += 1
        self._flight.emit(
            EventKind.EVICT, page, page.nbytes, None, start_ns, "clean" if was_clean else "dirty"
        )
        if is_leaving and all(ticket.done() for ticket in page.tickets):
            self._flight.settle(page)
        return True

    def _begin_write_back(self, page: Page, to: Tier | None) -> None:
        """As `start_write_back`, but where no tier has room it waits for transfers, one by one.

        A page that is being fetched has frames below as well as on the device. The reserve of the
        commit limit is for one such page, and there may be many: when they have arrived, their
        copies below are redundant.
        """
        while page.state is PageState.RESIDENT:
            try:
                self.start_write_back(page, to)
                return
            except TransferError:
                if not self._flight.settle_any():
                    raise
            if not self._may_leave(page.id):
                return

    def _is_certain(self, page: Page) -> bool:
        """Whether the device memory may go before the write-back is done."""
        if page.state is not PageState.WRITING_BACK or page.is_superseded:
            return False
        is_certain = True
        for ticket in page.tickets:
            if not ticket.is_certain:
                self._flight.promote(page)
                is_certain = all(ticket.is_certain for ticket in page.tickets)
                break
        # A checksum is taken of the device's bytes, and they are poisoned then.
        return is_certain and self._flight.checker is None

    def _release(self, page: Page, memory: object) -> None:
        flight = self._flight
        if flight.checker is not None:
            flight.checker.seal(memory)
        home = flight.home_of(page)
        self._backend.release_device(memory, flight.executors_of(page), page.tickets, home)
        page.executors = None if page.home is None else {flight.owner, page.home}

    # --- up --------------------------------------------------------------------------------------

    def start_fetch(self, page: Page, priority: Priority = Priority.FAULT) -> None:
        """Allocates device memory and starts filling it. The caller has made room.

        Does not block on the copy.

        Raises:
            MemoryError: the device has no room although the books say so; the page stays where it
                was.
            TransferError: the bytes were lost with the device.
        """
        if page.is_lost:
            raise TransferError(
                f"the bytes of {page!r} were lost: the device failed while they were on their way "
                "down. Start again from the last checkpoint",
                errno.EIO,
            )
        self._backend.allocate_device(page.memory(), page.nbytes, self._flight.home_of(page))
        if page.state is PageState.LEAVING:
            self._flight.hand_over(page)
        self._table.begin_fetch(page)
        self._table.in_flight(page, self._flight.submit(page, self.pieces_below(page), priority))

    def pieces_below(self, page: Page) -> dict[Lane, list[Piece]]:
        """What a fetch of the page copies, by lane: from DRAM where it is there, else from NVMe.

        A page with a source comes from there.
        """
        if page.has_source:
            lane = Lane.N2D if page.backing is Backing.FILE else Lane.R2D
            return {lane: [Piece(0, 0, 0, page.nbytes)]} if page.nbytes else {}
        pieces: dict[Lane, list[Piece]] = {}
        for segment in page.segments:
            lane, frame = (
                (Lane.H2D, segment.host) if segment.host is not None else (Lane.N2D, segment.nvme)
            )
            if frame is None:
                raise AssertionError(f"{page!r} has a segment without a copy")
            pieces.setdefault(lane, []).extend(with_frame(segment, frame, to_frame=False))
        return pieces

    def _no_room(self, page: Page) -> str:
        return (
            f"no tier below the device can take the {format_bytes(page.nbytes)} of {page!r} "
            f"({room_below(self._table)}); it stays on the device. Give a larger host or nvme "
            "budget"
        )
