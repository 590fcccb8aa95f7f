"""Which pages leave the device next, and their write-back ahead of need.

[Note: Write-back ahead of need]
    A dirty victim costs its copy down at the moment when room is wanted. So the policy is asked for
    more than is wanted now; the victims that may still stay are written back meanwhile, beside the
    operations that run, and are clean when their turn comes. A page that was used since it was
    chosen is passed over. Nothing leaves earlier than it would without.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.memory import PageState, Tier
from tvm_pager.transfer.protocol import Priority

if TYPE_CHECKING:
    from tvm_pager.paging.pager import DemandPager

__all__ = ["Evictor"]


class Evictor:
    """Chooses and evicts. The pager's lock is held, and given up while an eviction blocks.

    Args:
        pager: whose pages.
        ahead_bytes: how much is chosen and cleaned beyond what is wanted.
    """

    def __init__(self, pager: DemandPager, ahead_bytes: int) -> None:
        self.ahead_bytes = ahead_bytes
        self._pager = pager
        self._chosen: deque[tuple[int, Tier | None, int]] = deque()  # page id, to, when
        self._num_chosen_bytes = 0  # about: of pages that died since they are counted still

    def evict_some(self, need_bytes: int) -> bool:
        """Evicts until `need_bytes` are freed or nothing more can go; False if nothing went.

        A victim that cannot be written stays, and others go instead.

        Raises:
            TransferError: nothing went, because a victim could not be written to any tier.
        """
        need_bytes = max(need_bytes, 1)
        stuck: dict[int, TransferError] = {}
        iterations = self._pager.iterations
        if iterations.runner.release_unwanted():
            return True
        freed = self._evict_chosen(need_bytes, stuck)
        is_anew = iterations.is_planned  # then nothing is chosen, or cleaned, ahead of need
        while freed < need_bytes and self._choose(need_bytes - freed + self._bytes_of(stuck)):
            num_stuck, is_anew = len(stuck), True
            freed += self._evict_chosen(need_bytes - freed, stuck)
            if len(stuck) == num_stuck:
                break
        if not is_anew and self._num_chosen_bytes < self.ahead_bytes // 2:
            is_anew = self._choose(0)
        if is_anew and self.ahead_bytes and not iterations.is_planned:
            self._clean_chosen()
        used_bytes = self._pager.table.device_used_bytes
        self._pager.drain()  # victims may have died since they were chosen
        has_freed = freed > 0 or self._pager.table.device_used_bytes < used_bytes
        if stuck and not has_freed:
            error = next(iter(stuck.values()))
            stuck.clear()
            try:
                raise error
            finally:
                del error  # error and frame would hold each other, and the pages behind them
        return has_freed

    def evict_all(self) -> int:
        """See `DemandPager.evict_all`."""
        pager = self._pager
        pager.drain()
        before = pager.table.device_used_bytes
        pager.flight.settle_all()
        pager.device_policy.replay()
        for page in list(pager.table.pages.values()):
            if self.may_leave(page.id):
                try:
                    pager.mover.evict(page)
                except TransferError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        pager.flight.settle_all()
        return before - pager.table.device_used_bytes

    def forget_chosen(self) -> None:
        """The next victims are chosen anew: another policy chooses from now on."""
        self._chosen.clear()
        self._num_chosen_bytes = 0

    def may_leave(self, page_id: int) -> bool:
        """Whether the page could be evicted now."""
        pager = self._pager
        pager.view.in_use = {page.id for pages in pager.running for page in pages}
        pager.view.bind(Tier.DEVICE)  # making room on the host has bound it elsewhere
        return pager.view.evictable(page_id)

    def _choose(self, need_bytes: int) -> bool:
        pager = self._pager
        pager.view.in_use = {page.id for pages in pager.running for page in pages}
        victims = pager.iterations.victims(need_bytes) if need_bytes else None
        if self.ahead_bytes and victims is None:
            victims = pager.device_policy.victims(need_bytes + self.ahead_bytes, pager.view)
        if victims is None and need_bytes:
            victims = pager.device_policy.victims(need_bytes, pager.view)
        if not victims:
            return False
        # Anew, in the policy's present order: most of those that are left come first again.
        now, pages = pager.operation_index, pager.table.pages
        self._chosen = deque((page_id, to, now) for page_id, to in victims)
        self._num_chosen_bytes = sum(pages[page_id].frame_bytes for page_id, _ in victims)
        return True

    def _bytes_of(self, stuck: dict[int, TransferError]) -> int:
        pages = self._pager.table.pages
        return sum(pages[page_id].frame_bytes for page_id in stuck if page_id in pages)

    def _evict_chosen(self, need_bytes: int, stuck: dict[int, TransferError]) -> int:
        pager, freed = self._pager, 0
        if self._chosen:
            pager.device_policy.replay()  # stamps what was used
        while self._chosen and freed < need_bytes:
            page_id, to, chosen_at = self._chosen.popleft()
            page = pager.table.pages.get(page_id)
            self._num_chosen_bytes -= page.frame_bytes if page is not None else 0
            if page is None or page.last_use > chosen_at or not self.may_leave(page_id):
                continue
            if page_id in stuck:
                continue
            try:
                freed += page.frame_bytes if pager.mover.evict(page, to) else 0
            except TransferError as error:
                stuck[page_id] = error.with_traceback(None)  # it holds frames, which hold pages
        return freed

    def _clean_chosen(self) -> None:
        pager = self._pager
        host = pager.table.frames[Tier.HOST]
        for page_id, to, _ in self._chosen:
            page = pager.table.pages.get(page_id)
            if page is not None and page.state is PageState.RESIDENT and not page.is_clean:
                if to is not Tier.NVME and pager.table.host_free_bytes < host.rounded(page.nbytes):
                    break  # making room there would block
                with contextlib.suppress(TransferError):  # its turn will tell
                    pager.mover.start_write_back(page, to, Priority.WRITE_BACK)
