"""What a policy sees of the pager: `planning.View` over the page table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.memory import Backing, Page, PageState, Tier
from tvm_pager.memory.page_table import COMMIT_ALIGNMENT
from tvm_pager.planning import PageView

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tvm_pager.memory import PageTable

__all__ = ["PagerView"]


class PagerView:
    """Read-only for policies; the pager rebinds it to a tier before each decision."""

    def __init__(self, table: PageTable) -> None:
        self.operation_index = 0
        self.in_use: Collection[int] = ()  # ids of the operands of operations that are running now
        # How many operations from now a page is used again, if a trace is followed.
        self.foresee: Callable[[int], float | None] = lambda _: None
        self._table = table
        self._tier = Tier.DEVICE

    def bind(self, tier: Tier) -> None:
        self._tier = tier

    def page(self, page_id: int) -> PageView:
        page = self._table.pages[page_id]
        return PageView(
            page.id,
            page.kind,
            page.nbytes,
            self._table.tier_of(page),
            page.is_clean,
            page.pins,
            page.last_use,
        )

    def evictable(self, page_id: int) -> bool:
        page = self._table.pages.get(page_id)
        if page is None:
            return False
        if self._tier is Tier.DEVICE:
            return (
                (page.state is PageState.RESIDENT or page.state is PageState.WRITING_BACK)
                and page.backing is not Backing.NONE
                and not page.pins
                and page.nbytes > 0
                and page_id not in self.in_use
            )
        if page.tickets:
            return False
        if page.state is PageState.RESIDENT:
            return True  # the device has the bytes, so the host's frames are redundant
        if page.state is not PageState.EVICTED:
            return False
        unique = sum(segment.nbytes for segment in page.segments if segment.nvme is None)
        return not unique or unique + COMMIT_ALIGNMENT <= self._table.frames[Tier.NVME].free_bytes

    def next_use(self, page_id: int) -> float | None:
        return self.foresee(page_id)

    def frame_bytes(self, page_id: int) -> int:
        page = self._table.pages[page_id]
        return page.frame_bytes if self._tier is Tier.DEVICE else host_frame_bytes(page)


def host_frame_bytes(page: Page) -> int:
    """Bytes of the slab that the page's frames take."""
    return sum(
        extent.nbytes
        for segment in page.segments
        if segment.host is not None
        for extent in segment.host
    )
