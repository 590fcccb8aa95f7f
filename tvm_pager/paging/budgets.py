"""Budgets that change while the pager runs: what does not fit any more leaves first.

[Note: Shrinking the slab]
    Memory is given back in whole regions at the end of the slab. Frames there move: new ones are
    taken below the cut from then on, copies that the device makes redundant are dropped, and the
    other pages go through the device once and are written back below the cut. Where that cannot be,
    the slab shrinks inside a region, whose memory stays locked; and where that cannot be either,
    nothing has changed but the pages' places.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from tvm_pager.errors import BudgetError, CommitError, PagerError, TransferError
from tvm_pager.memory import PageState, Tier
from tvm_pager.paging.limits import commit_limit_bytes
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from tvm_pager.memory import Page
    from tvm_pager.paging.pager import DemandPager

__all__ = ["Budgets"]


class Budgets:
    """Changes what a pager may use. The lock is held, and given up while something blocks."""

    def __init__(self, pager: DemandPager) -> None:
        self._pager = pager

    def set_device(self, nbytes: int) -> None:
        """Changes the device's budget; evicts down to it. Blocks.

        Raises:
            BudgetError: pinned pages do not fit; nothing has changed.
            CommitError: all tiers together could not back the live pages; nothing has changed.
        """
        pager = self._pager
        before = pager.budget_bytes
        pager.drain()
        self._check_commit(commit_limit_bytes(pager.table, nbytes), nbytes, "device")
        pager.budget_bytes = nbytes
        try:
            pager.make_room(0, f"a device budget of {format_bytes(nbytes)}")
        except PagerError:
            pager.budget_bytes = before
            raise
        finally:
            pager.update_commit_limit()

    def set_host(self, nbytes: int) -> None:
        """Changes the slab's page space; moves what lies beyond it. Blocks.

        Raises:
            BudgetError: the frames beyond do not fit below; the capacity is what it was.
            CommitError: all tiers together could not back the live pages; nothing has changed.
            TransferError: a page could not be moved, or the system refuses memory.
        """
        pager = self._pager
        frames = pager.table.frames[Tier.HOST]
        pager.drain()
        if nbytes < frames.capacity_bytes:
            lost = frames.capacity_bytes - frames.rounded(nbytes)
            limit = commit_limit_bytes(pager.table, pager.budget_bytes) - lost
            self._check_commit(limit, nbytes, "host")
            cut = self._shrink_host(nbytes)
            pager.backend.resize_host(cut)
        pager.backend.resize_host(nbytes)
        frames.grow(pager.backend.host_capacity_bytes)
        pager.update_commit_limit()

    def _shrink_host(self, nbytes: int) -> int:
        """Empties what lies beyond, and gives the capacity that is left; see the note above."""
        pager = self._pager
        frames = pager.table.frames[Tier.HOST]
        for cut in sorted({pager.backend.host_border(nbytes), nbytes}):
            try:
                self._empty_beyond(cut, is_tried=cut < nbytes)
            except TransferError as error:
                if error.errno != errno.ENOSPC:
                    raise
            if frames.shrink(cut):
                return cut
        raise BudgetError(
            f"a host budget of {format_bytes(nbytes)}: frames in use reach "
            f"{format_bytes(frames.highest_used_bytes)}, and what lies beyond found no room below. "
            "Give an nvme directory, or free tensors first"
        )

    def _check_commit(self, limit: int, nbytes: int, what: str) -> None:
        committed = self._pager.table.committed_bytes
        if committed > limit:
            raise CommitError(
                f"a {what} budget of {format_bytes(nbytes)} would leave {format_bytes(limit)} that "
                f"device, host and nvme can back, and {format_bytes(committed)} are taken; free "
                "tensors first, or give a larger nvme budget"
            )

    def _empty_beyond(self, cut: int, *, is_tried: bool) -> None:
        pager = self._pager
        table = pager.table
        pager.flight.settle_all()
        table.host_limit_bytes, table.may_exceed_limit = cut, is_tried
        try:
            for page in list(table.pages.values()):
                if self._reaches(page, cut):
                    self._move(page)
            while pager.flight.settle_any() or pager.flight.wait_for_limbo(Tier.HOST):
                pass
        finally:
            table.host_limit_bytes, table.may_exceed_limit = None, False

    def _move(self, page: Page) -> None:
        pager = self._pager
        if pager.table.frames[Tier.NVME].capacity_bytes and page.state is PageState.EVICTED:
            with contextlib.suppress(TransferError):
                if pager.host_room.demote(page):
                    pager.flight.settle(page, unlocked=True)
        memory = page.memory()  # kept alive by this reference until the end
        if memory is None:
            pager.drain()  # its last tensor has died, and its frames with it
        elif any(segment.host is not None for segment in page.segments):
            pager.admit([page], 0, "a smaller host budget")
            pager.table.drop_host_copies(page)
            pager.policies[Tier.HOST].removed(page)

    @staticmethod
    def _reaches(page: Page, cut: int) -> bool:
        return any(
            extent.offset + extent.nbytes > cut
            for segment in page.segments
            for extent in segment.host or ()
        )
