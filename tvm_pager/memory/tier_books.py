"""The books of the tiers below the device: frames taken, free, in limbo, and committed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tvm_pager.memory.page import Backing, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tvm_pager.memory.frames import Extent, FrameAllocator
    from tvm_pager.memory.page import Page, Segment

__all__ = ["COMMIT_ALIGNMENT", "Arrival", "TierBooks"]

COMMIT_ALIGNMENT = 4096  # what a page may take below the device, whatever its size
Arrival = tuple["Segment", Tier, "tuple[Extent, ...]"]  # a frame that a transfer is filling


class TierBooks:
    """Frames of DRAM and NVMe. The pager's lock is held; nothing blocks.

    [Note: Limbo]
        A fetch that was ordered before its use in stream order still reads its frames. If they are
        freed meanwhile, no other copy may fill them yet: they wait in limbo until it is done.
    """

    def __init__(self, host: FrameAllocator, nvme: FrameAllocator) -> None:
        self.frames = {Tier.HOST: host, Tier.NVME: nvme}
        self.closed_tiers: dict[Tier, str] = {}  # tier -> why it takes no new frames
        # Of NVMe: a write there failed, so nothing goes there again.
        self.bad_frames: list[tuple[Extent, ...]] = []
        self.host_limit_bytes: int | None = None  # no new frame beyond it, while the slab shrinks
        self.may_exceed_limit = False  # rather than fail: it is tried, and less would do
        self._limbo: deque[tuple[tuple[Any, ...], Tier, tuple[Extent, ...]]] = deque()

    @property
    def limbo(self) -> list[tuple[tuple[Any, ...], Tier, tuple[Extent, ...]]]:
        """Free frames that fetches still read, oldest first: (fetches, tier, frame)."""
        return list(self._limbo)

    def allocate(self, tier: Tier, nbytes: int) -> tuple[Extent, ...] | None:
        """A frame for a transfer that is about to start, or None if the tier is full.

        Also in a closed tier: the pages that live must still be able to change places.
        """
        below = self.host_limit_bytes if tier is Tier.HOST else None
        return self.frames[tier].allocate(nbytes, below=below)

    @property
    def host_free_bytes(self) -> int:
        """What `allocate` can give in DRAM. O(1), but while the slab shrinks."""
        host, below = self.frames[Tier.HOST], self.host_limit_bytes
        return host.free_bytes if below is None else host.free_bytes_below(below)

    def allocate_beyond(self, nbytes: int) -> tuple[Extent, ...] | None:
        """A frame in DRAM, also beyond the limit if that is only tried; None: there is none."""
        return self.frames[Tier.HOST].allocate(nbytes) if self.may_exceed_limit else None

    def release_frames(self, arrivals: Iterable[Arrival]) -> None:
        """Gives back frames of `allocate` for which no transfer was submitted."""
        for _, tier, frame in arrivals:
            self.frames[tier].free(frame)

    def free_after(self, readers: tuple[Any, ...], tier: Tier, frame: tuple[Extent, ...]) -> None:
        """Frees a frame once the tickets in `readers` are done; see [Note: Limbo]."""
        if readers:
            self._limbo.append((readers, tier, frame))
        else:
            self.frames[tier].free(frame)

    def leave_limbo(self) -> None:
        """Frees the oldest frames in limbo whose readers are done."""
        while self._limbo and all(ticket.done() for ticket in self._limbo[0][0]):
            _, tier, frame = self._limbo.popleft()
            self.frames[tier].free(frame)

    def close_tier(self, tier: Tier, reason: str) -> None:
        """No new page counts on this tier any more; those that live go on using it."""
        self.closed_tiers.setdefault(tier, reason)

    # --- commit ----------------------------------------------------------------------------------

    @staticmethod
    def commit_of(nbytes: int) -> int:
        """Bytes that a page may take in the tiers below, in the worst case."""
        return -(-nbytes // COMMIT_ALIGNMENT) * COMMIT_ALIGNMENT

    def committed_of(self, page: Page) -> int:
        """Bytes that the page counts as committed: none while its source alone backs it."""
        if page.backing is Backing.FILE:
            return 0
        if page.backing is Backing.RECIPE and not page.is_on_device:
            return 0
        return self.commit_of(page.nbytes)
