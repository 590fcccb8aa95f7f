"""Frames of one tier below the device: which byte ranges are taken.

[Note: Frames may be several extents]
    A frame is a tuple of extents. Best fit keeps it at one extent while a free run is long enough;
    otherwise it is gathered from the longest runs. So an allocation fails only when the tier really
    has too few free bytes: fragmentation costs copies of smaller pieces, never a failed eviction,
    and no compaction is needed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

__all__ = ["Extent", "FrameAllocator"]


class Extent(NamedTuple):
    """A contiguous byte range of a tier; both numbers are multiples of the tier's alignment."""

    offset: int
    nbytes: int


class FrameAllocator:
    """Best-fit allocator over [0, capacity_bytes) with coalescing.

    Not thread-safe: the page table's lock covers it.

    Args:
        capacity_bytes: size of the tier; rounded down to the alignment.
        alignment: every extent starts and ends at a multiple of it.
    """

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        if alignment <= 0 or capacity_bytes < 0:
            raise ValueError(f"{capacity_bytes=} must be >= 0 and {alignment=} > 0")
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self.used_bytes = 0
        self.peak_bytes = 0
        self._starts: list[int] = []  # free runs by address
        self._length: dict[int, int] = {}  # start -> bytes
        self._by_length: list[tuple[int, int]] = []  # (bytes, start), sorted
        if self.capacity_bytes:
            self._insert(0, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_run_bytes(self) -> int:
        return self._by_length[-1][0] if self._by_length else 0

    def rounded(self, nbytes: int) -> int:
        """Bytes that a frame of `nbytes` takes."""
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Takes a frame of at least `nbytes` bytes, or returns None and changes nothing.

        O(number of free runs) in the worst case, for the list insertions; see [Note: Frames may be
        several extents].
        """
        need = self.rounded(nbytes)
        if need > self.free_bytes:
            return None
        extents: list[Extent] = []
        while need:
            position = bisect_left(self._by_length, (need, -1))
            length, start = self._by_length[min(position, len(self._by_length) - 1)]
            taken = min(length, need)
            self._remove(start)
            if length > taken:
                self._insert(start + taken, length - taken)
            extents.append(Extent(start, taken))
            need -= taken
            self.used_bytes += taken
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return tuple(extents)

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Gives a frame back.

        The caller guarantees that no transfer reads or writes it any more.
        """
        for extent in extents:
            self._free_one(extent)

    def _free_one(self, extent: Extent) -> None:
        start, end = extent.offset, extent.offset + extent.nbytes
        position = bisect_left(self._starts, start)
        before = self._starts[position - 1] if position else None
        after = self._starts[position] if position < len(self._starts) else None
        overlaps_before = before is not None and before + self._length[before] > start
        if overlaps_before or (after is not None and after < end) or end > self.capacity_bytes:
            raise AssertionError(f"{extent} freed twice or never allocated: {before=} {after=}")
        if before is not None and before + self._length[before] == start:
            self._remove(before)
            start = before
        if after == end:
            end += self._length[after]
            self._remove(after)
        self._insert(start, end - start)
        self.used_bytes -= extent.nbytes

    def _insert(self, start: int, nbytes: int) -> None:
        insort(self._starts, start)
        self._length[start] = nbytes
        insort(self._by_length, (nbytes, start))

    def _remove(self, start: int) -> None:
        nbytes = self._length.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (nbytes, start))]

    def check_invariants(self, frames: list[tuple[Extent, ...]]) -> None:
        """Checks that `frames` (all frames taken) and the free runs tile the tier exactly once."""
        taken = [(extent.offset, extent.nbytes) for frame in frames for extent in frame]
        runs = sorted(taken + [(start, self._length[start]) for start in self._starts])
        position = 0
        for offset, nbytes in runs:
            if offset != position or nbytes <= 0 or offset % self.alignment:
                raise AssertionError(
                    f"byte {position} of the tier: next run is {offset=} {nbytes=}"
                )
            position += nbytes
        if position != self.capacity_bytes or sum(n for _, n in taken) != self.used_bytes:
            raise AssertionError(f"{position=} {self.capacity_bytes=} {self.used_bytes=}")
        if self._by_length != sorted((n, s) for s, n in self._length.items()):
            raise AssertionError("the two indices of free runs disagree")
