"""What a policy sees of the pager: `planning.View` over the page table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.memory import Backing, Page, PageKind, PageState, Tier
from tvm_pager.memory.tier_books import COMMIT_ALIGNMENT
from tvm_pager.planning import PageView
from tvm_pager.transfer.protocol import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tvm_pager.memory import PageTable
    from tvm_pager.paging.follower import Follower
    from tvm_pager.planning import Lineage

__all__ = ["PagerView"]


_SMALL_BYTES = 64 << 10  # 0.1 ms of a disk that takes that long, or fifty times, for any request


class PagerView:
    """Read-only for policies; the pager rebinds it to a tier before each decision."""

    def __init__(self, table: PageTable) -> None:
        self.in_use: Collection[int] = ()  # ids of the operands of operations that are running now
        self._table = table
        self.spares_small = False  # see [Note: Small pages] in host_room.py
        self._tier = Tier.DEVICE
        self._follow: Callable[[], Follower | None] = lambda: None
        self._following: Callable[[], Follower | None] = lambda: None
        self._backlog: Callable[[Lane], int] = lambda _: 0
        self._now: Callable[[], int] = lambda: 0

    def attach(
        self,
        follow: Callable[[], Follower | None],
        following: Callable[[], Follower | None],
        backlog: Callable[[Lane], int],
        now: Callable[[], int],
    ) -> None:
        """Takes what tells of traces, lanes and time; each is called for each question.

        Args:
            follow: gives who knows where in a trace the program is; traces are wanted from then on.
            following: gives the same, and wants nothing.
            backlog: gives the bytes that are queued or under way on a lane.
            now: gives how many operations have begun to run.
        """
        self._follow, self._following, self._backlog, self._now = follow, following, backlog, now

    @property
    def operation_index(self) -> int:
        return self._now()

    def bind(self, tier: Tier) -> None:
        self._tier = tier

    def page(self, page_id: int) -> PageView:
        page = self._table.pages[page_id]
        return PageView(
            page.id,
            _kind_of(page, self._following),
            page.nbytes,
            self._table.tier_of(page),
            page.is_clean,
            page.pins,
            page.last_use,
        )

    def kind_of(self, page_id: int) -> PageKind:
        """What the page holds, by a trace where nothing else tells; one is wanted from then on."""
        return _kind_of(self._table.pages[page_id], self._follow)

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
        if page.state is not PageState.EVICTED or (self.spares_small and is_small(page)):
            return False
        unique = sum(segment.nbytes for segment in page.segments if segment.nvme is None)
        return not unique or unique + COMMIT_ALIGNMENT <= self._table.frames[Tier.NVME].free_bytes

    def next_use(self, page_id: int) -> float | None:
        follower = self._follow()
        return None if follower is None else follower.next_use(page_id)

    def lineage(self, page_id: int) -> Lineage | None:
        follower, number = self._place_of(page_id)
        if follower is None or number is None:
            return None
        return follower.known.facts.lineage(number, follower.index, follower.pages)

    def seconds_since_use(self, page_id: int) -> float | None:
        follower, number = self._place_of(page_id)
        if follower is None or number is None:
            return None
        unused_ns = follower.known.facts.unused_ns(number, follower.index - 1)
        return None if unused_ns is None else unused_ns / 1e9

    def module(self, page_id: int) -> str:
        follower, number = self._place_of(page_id)
        return "" if follower is None or number is None else follower.known.facts.module(number)

    def layer(self, page_id: int) -> int | None:
        follower, number = self._place_of(page_id)
        return None if follower is None or number is None else follower.known.facts.layer(number)

    def backlog_bytes(self, lane: str) -> int:
        try:
            wanted = Lane(lane)
        except ValueError:
            lanes = ", ".join(known.value for known in Lane)
            raise ValueError(f"view.backlog_bytes: no lane {lane!r}; there are {lanes}") from None
        return self._backlog(wanted)

    def frame_bytes(self, page_id: int) -> int:
        page = self._table.pages[page_id]
        return page.frame_bytes if self._tier is Tier.DEVICE else host_frame_bytes(page)

    def _place_of(self, page_id: int) -> tuple[Follower | None, int | None]:
        """Who follows a trace, and the page's number in it."""
        follower = self._follow()
        return follower, None if follower is None else follower.number_of(page_id)


def is_small(page: Page) -> bool:
    """Whether the time to ask a disk for the page counts, and its bytes do not."""
    return page.nbytes <= _SMALL_BYTES


def host_frame_bytes(page: Page) -> int:
    """Bytes of the slab that the page's frames take."""
    return sum(
        extent.nbytes
        for segment in page.segments
        if segment.host is not None
        for extent in segment.host
    )


def _kind_of(page: Page, follow: Callable[[], Follower | None]) -> PageKind:
    """What the page holds. The trace knows of every birth what became of it; the program does not.

    What the program tells later (an optimizer, of gradients) is certain, and comes first.
    """
    if page.kind is not PageKind.OTHER:
        return page.kind
    follower = follow()
    if follower is None:
        return page.kind
    number = follower.number_of(page.id)
    return page.kind if number is None else follower.known.trace.pages[number].kind
