"""Frames of one tier below the device: which byte ranges are taken.

[Note: Frames may be several extents]
    A frame is a tuple of extents. Best fit keeps it at one extent while a free run is long enough;
    otherwise it is gathered from the longest runs. So an allocation fails only when the tier really
    has too few free bytes: fragmentation costs copies of smaller pieces, never a failed eviction,
    and no compaction is needed.

[Note: A tier that changes size]
    A tier grows at once. It shrinks only when no frame reaches beyond its new end. Whoever shrinks
    it moves those frames first, into frames from `allocate(..., below=new end)`; until it is done,
    all other allocations take the same limit, or they would fill what was just emptied.
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

    @property
    def highest_used_bytes(self) -> int:
        """Where the last frame ends; 0 without frames. The tier can shrink to this. O(1)."""
        last = self._starts[-1] if self._starts else self.capacity_bytes
        is_at_end = bool(self._starts) and last + self._length[last] == self.capacity_bytes
        return last if is_at_end else self.capacity_bytes

    def free_bytes_below(self, limit_bytes: int) -> int:
        """Free bytes that `allocate(..., below=limit_bytes)` can give. O(number of free runs)."""
        return sum(length for length, _ in self._runs_below(limit_bytes))

    def grow(self, capacity_bytes: int) -> None:
        """Makes the tier end at `capacity_bytes`, rounded down to the alignment.

        Raises:
            ValueError: that is less than it has.
        """
        end = capacity_bytes // self.alignment * self.alignment
        if end < self.capacity_bytes:
            raise ValueError(f"{capacity_bytes=} is below {self.capacity_bytes}: shrink does that")
        if end > self.capacity_bytes:
            start, self.capacity_bytes = self.capacity_bytes, end
            self._add_run(start, end)

    def shrink(self, capacity_bytes: int) -> bool:
        """Makes the tier end at `capacity_bytes`, rounded down to the alignment.

        Returns False and changes nothing if a frame reaches beyond; see [Note: A tier that changes
        size].

        Raises:
            ValueError: that is more than it has, or negative.
        """
        end = capacity_bytes // self.alignment * self.alignment
        if not 0 <= end <= self.capacity_bytes:
            raise ValueError(
                f"{capacity_bytes=} is not in [0, {self.capacity_bytes}]: grow does more"
            )
        if end < self.highest_used_bytes:
            return False
        if end < self.capacity_bytes:
            start = self._starts[-1]
            self._remove(start)
            if start < end:
                self._insert(start, end - start)
            self.capacity_bytes = end
        return True

    def allocate(self, nbytes: int, *, below: int | None = None) -> tuple[Extent, ...] | None:
        """Takes a frame of at least `nbytes` bytes, or returns None and changes nothing.

        O(number of free runs) in the worst case, for the list insertions; see [Note: Frames may be
        several extents].

        Args:
            nbytes: size; what it takes is `rounded(nbytes)`.
            below: every extent ends at this offset or before it; always O(number of free runs).
        """
        need = self.rounded(nbytes)
        if need > self.free_bytes:
            return None
        runs = self._by_length
        if below is not None and below < self.capacity_bytes:
            runs = self._runs_below(below)
            if need > sum(length for length, _ in runs):
                return None
        extents: list[Extent] = []
        while need:
            index = min(bisect_left(runs, (need, -1)), len(runs) - 1)
            length, start = runs[index]
            taken = min(length, need)
            self._take(start, taken)
            if runs is not self._by_length:
                del runs[index]
            extents.append(Extent(start, taken))
            need -= taken
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return tuple(extents)

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Gives a frame back.

        The caller guarantees that no transfer reads or writes it any more.
        """
        for extent in extents:
            self._free_one(extent)

    def _runs_below(self, limit_bytes: int) -> list[tuple[int, int]]:
        """Free runs as in `_by_length`, cut off at the limit."""
        limit = limit_bytes // self.alignment * self.alignment
        starts = self._starts[: bisect_left(self._starts, limit)]
        return sorted((min(self._length[start], limit - start), start) for start in starts)

    def _take(self, start: int, nbytes: int) -> None:
        """Takes the first bytes of the free run at `start`."""
        length = self._length.pop(start)
        del self._by_length[bisect_left(self._by_length, (length, start))]
        position = bisect_left(self._starts, start)
        if length > nbytes:
            start += nbytes
            self._starts[position] = start  # what is left keeps its place among its neighbours
            self._length[start] = length - nbytes
            insort(self._by_length, (length - nbytes, start))
        else:
            del self._starts[position]
        self.used_bytes += nbytes

    def _free_one(self, extent: Extent) -> None:
        self._add_run(extent.offset, extent.offset + extent.nbytes)
        self.used_bytes -= extent.nbytes

    def _add_run(self, start: int, end: int) -> None:
        """Makes [start, end) free, joined with the free runs beside it."""
        position = bisect_left(self._starts, start)
        before = self._starts[position - 1] if position else None
        after = self._starts[position] if position < len(self._starts) else None
        overlaps_before = before is not None and before + self._length[before] > start
        if overlaps_before or (after is not None and after < end) or end > self.capacity_bytes:
            raise AssertionError(
                f"[{start}, {end}) freed twice or never allocated: {before=} {after=} "
                f"{self.capacity_bytes=}"
            )
        if before is not None and before + self._length[before] == start:
            self._remove(before)
            start = before
        if after == end:
            end += self._length[after]
            self._remove(after)
        self._insert(start, end - start)

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
