"""Pages on their way to the device before an operation asks for them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tvm_pager.errors import CommitError, TransferError
from tvm_pager.memory import Backing, Page, PageState
from tvm_pager.transfer.protocol import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tvm_pager.paging.pager import DemandPager

__all__ = ["Prefetcher"]

_FEW = 64


class Prefetcher:
    """Starts prefetches, and calls them off where a request needs their room. The lock is held."""

    def __init__(self, pager: DemandPager) -> None:
        self._pager = pager
        self._pages: dict[int, Page] = {}  # oldest first; what has arrived is dropped late
        self._most = _FEW  # of them, until those that have arrived are dropped

    def start(self, page: Page, *, may_evict: bool = False) -> bool:
        """Starts bringing a page to the device before an operation asks; False if it did not.

        Never takes the last bytes that the largest operation so far needs, never blocks for the
        copy. The lock is held.

        Args:
            page: which.
            may_evict: whether the policy's victims make room, as for an operation; that may block.
        """
        pager = self._pager
        pager.drain()
        if not page.can_be_fetched:
            return False
        wanted_bytes = page.frame_bytes + pager.admission.largest_need_bytes
        if may_evict and not pager.reservations.queue and pager.free_bytes < wanted_bytes:
            pager.evictor.evict_some(wanted_bytes - pager.free_bytes)
            if not page.can_be_fetched:
                return False
        if (
            pager.free_bytes - page.frame_bytes < pager.admission.largest_need_bytes
            or pager.reservations.queue
        ):
            return False
        return self._begin(page)

    def begin(self, page: Page) -> bool:
        """As `start` for a page that is off the device, and for whose bytes there is room.

        False if it did not, also where the bytes are lost, or cannot be backed any more.
        """
        try:
            return self._begin(page)
        except (CommitError, TransferError):
            return False

    def _begin(self, page: Page) -> bool:
        pager = self._pager
        memory = page.memory()  # kept alive by this reference until the transfers have it
        if memory is None:
            return False  # its last tensor has died, and the next `drain` takes it out
        if page.backing is Backing.RECIPE:
            pager.commit(pager.table.commit_of(page.nbytes), "prefetch")
        try:
            pager.mover.start_fetch(page, Priority.PREFETCH)
        except MemoryError:
            return False
        self._pages[page.id] = page
        if len(self._pages) > self._most:
            self._drop_arrived()
        return True

    def _drop_arrived(self) -> None:
        """Else they were kept for ever where nothing is called off. O(1) for each prefetch."""
        fetching = [page for page in self._pages.values() if page.state is PageState.FETCHING]
        self._pages = {page.id: page for page in fetching}
        self._most = max(_FEW, 2 * len(fetching))

    def cancel(self, beside: Iterable[Page] = ()) -> bool:
        """Takes the device memory of prefetches that have not begun; False if there are none."""
        pager = self._pager
        wanted = {page.id for page in beside}
        is_any = False
        for page in list(self._pages.values()):
            if page.state is not PageState.FETCHING:
                del self._pages[page.id]
            elif page.id not in wanted and pager.flight.cancel(page):
                del self._pages[page.id]
                with contextlib.suppress(TransferError):
                    pager.flight.settle(page)
                is_any = True
        return is_any
