"""Room in the slab: copies that are redundant are dropped, the rest goes to NVMe.

[Note: Small pages]
    A disk takes as long for a bias as for a quarter of a megabyte, or for several on a network. So
    pages up to 64 KiB stay in the slab, whatever the policy, as long as larger ones make room and
    they take a sixteenth of it at most; else they go as any other. There are not more of them than
    a policy can pass over quickly, each time that it chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.memory import Page, PageState, Tier
from tvm_pager.paging.frame_pieces import between_frames
from tvm_pager.paging.view import host_frame_bytes, is_small
from tvm_pager.transfer.protocol import Lane, Piece, Priority

if TYPE_CHECKING:
    from tvm_pager.memory import PageTable
    from tvm_pager.memory.tier_books import Arrival
    from tvm_pager.paging.flight import Flight
    from tvm_pager.paging.tier_policy import TierPolicy
    from tvm_pager.paging.view import PagerView

__all__ = ["HostRoom"]

_SMALL_PART = 16  # of the slab, one part of so many
_MOST_SMALL = 4096
_COUNT_EVERY = 256  # choices: counting takes O(pages)


class HostRoom:
    """Frees slab bytes as the host's policy says.

    Several pages are demoted at once, and room is there when the oldest has arrived: so the disk is
    never idle between two pages.

    Args:
        table: whose frames.
        flight: carries the demotions.
        policy: chooses.
        view: what it sees.
        ahead_bytes: room that is made ready beyond what is asked, while the disk has nothing else
            to do.
    """

    def __init__(
        self,
        table: PageTable,
        flight: Flight,
        policy: TierPolicy,
        view: PagerView,
        ahead_bytes: int,
    ) -> None:
        self.ahead_bytes = ahead_bytes
        self._table = table
        self._flight = flight
        self._policy = policy
        self._view = view
        self._demoting: dict[int, Page] = {}  # oldest first; what has arrived is dropped late
        self._num_choices = 0
        self._spares_small = False

    def free(self, need_bytes: int) -> bool:
        """Blocks, with the lock given up, until `need_bytes` are free; False if they cannot be."""
        if need_bytes > self._table.frames[Tier.HOST].capacity_bytes:
            return False
        num_failed = self._flight.num_failed_demotions
        while self._table.host_free_bytes < need_bytes:
            self._flight.reap()
            self._table.reap()  # also those whose copies have overtaken older ones
            missing = need_bytes - self._table.host_free_bytes
            if missing <= 0:
                break
            if self._flight.num_failed_demotions != num_failed:
                # A disk that refuses at once would be asked for ever.
                return self._drop_redundant(need_bytes)
            page = self._oldest()
            try:
                if page is not None:
                    self._flight.promote(page)
                    self._flight.settle(page, unlocked=True)
                    continue
            except TransferError:
                return self._drop_redundant(need_bytes)
            if self._flight.wait_for_limbo(Tier.HOST):
                continue
            if not self._start(missing, Priority.FAULT):
                return self._drop_redundant(need_bytes)
        self._free_ahead()
        return True

    def demote(self, page: Page, priority: Priority = Priority.FAULT) -> bool:
        """Starts taking the page's bytes out of the slab; False if none can leave."""
        dropped = self._table.drop_host_copies(page)
        if page.state is not PageState.EVICTED or not host_frame_bytes(page):
            if not host_frame_bytes(page):
                self._policy.removed(page)
            return dropped > 0
        arrivals: list[Arrival] = []
        pieces: list[Piece] = []
        for segment in page.segments:
            if segment.host is None:
                continue
            frame = self._table.allocate(Tier.NVME, segment.nbytes)
            if frame is None:
                break
            arrivals.append((segment, Tier.NVME, frame))
            pieces.extend(between_frames(segment.page_offset, segment.nbytes, segment.host, frame))
        if not arrivals:
            return dropped > 0
        tickets = self._flight.submit(page, {Lane.H2N: pieces}, priority)
        self._table.begin_demote(page, arrivals, tickets)
        self._demoting[page.id] = page
        return True

    def promote(self, page: Page, priority: Priority = Priority.PREFETCH) -> bool:
        """Starts bringing an EVICTED page's bytes from NVMe to the slab; False if it did not.

        Makes no room. What is on NVMe stays current there.
        """
        arrivals: list[Arrival] = []
        pieces: list[Piece] = []
        for segment in page.segments:
            if segment.host is not None or segment.nvme is None:
                continue
            frame = self._table.allocate(Tier.HOST, segment.nbytes)
            if frame is None:
                self._table.release_frames(arrivals)
                return False
            arrivals.append((segment, Tier.HOST, frame))
            pieces.extend(between_frames(segment.page_offset, segment.nbytes, segment.nvme, frame))
        if not arrivals:
            return False
        tickets = self._flight.submit(page, {Lane.N2H: pieces}, priority)
        self._table.begin_demote(page, arrivals, tickets)
        return True

    def _start(self, nbytes: int, priority: Priority) -> bool:
        victims = None
        if self._may_spare_small():
            self._view.spares_small = True
            try:
                victims = self._policy.victims(nbytes, self._view)
            finally:
                self._view.spares_small = False
        if victims is None:
            victims = self._policy.victims(nbytes, self._view)
        # All of them leave: `any` over a generator would stop at the first that did.
        started = [
            self.demote(page, priority)
            for victim in victims or ()
            if (page := self._table.pages[victim.page_id]).tickets == ()
        ]
        return any(started)

    def _may_spare_small(self) -> bool:
        if self._num_choices % _COUNT_EVERY == 0:
            small = [
                host_frame_bytes(page)
                for page in self._table.pages.values()
                if page.state is PageState.EVICTED and is_small(page)
            ]
            capacity_bytes = self._table.frames[Tier.HOST].capacity_bytes
            has_few = len(small) <= _MOST_SMALL and sum(small) * _SMALL_PART <= capacity_bytes
            self._spares_small = has_few
        self._num_choices += 1
        return self._spares_small

    def _drop_redundant(self, need_bytes: int) -> bool:
        """Where NVMe takes nothing: gives up copies of pages that are on the device. O(pages)."""
        table = self._table
        for page in list(table.pages.values()):
            if table.host_free_bytes >= need_bytes:
                break
            if page.state is PageState.RESIDENT and host_frame_bytes(page):
                table.drop_host_copies(page)
                self._policy.removed(page)
        while table.host_free_bytes < need_bytes and self._flight.wait_for_limbo(Tier.HOST):
            pass
        return table.host_free_bytes >= need_bytes

    def _free_ahead(self) -> None:
        missing = self.ahead_bytes - self._table.host_free_bytes
        if missing > 0 and self._oldest() is None:
            self._start(missing, Priority.WRITE_BACK)

    def _oldest(self) -> Page | None:
        while self._demoting:
            page = next(iter(self._demoting.values()))
            if page.state is PageState.DEMOTING or (page.state is PageState.DEAD and page.tickets):
                return page
            del self._demoting[page.id]
        return None
