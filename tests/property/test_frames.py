"""Frames never overlap, patterns survive, free runs coalesce, also while the tier changes size."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from tvm_pager.memory import Extent, FrameAllocator

ALIGNMENT = 64
CAPACITY = 4096
LARGEST = 2 * CAPACITY

sizes = st.integers(0, 1500)
capacities = st.integers(0, LARGEST)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), sizes, st.just(0)),
        st.tuples(st.just("below"), sizes, capacities),
        st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("grow"), capacities, st.just(0)),
        st.tuples(st.just("shrink"), capacities, st.just(0)),
    ),
    max_size=80,
)


def rounded_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def rounded_down(nbytes: int) -> int:
    return nbytes // ALIGNMENT * ALIGNMENT


@dataclass
class Tier:
    """The allocator beside a model that knows only bytes: 0 is free, anything else is a frame's."""

    allocator: FrameAllocator = field(default_factory=lambda: FrameAllocator(CAPACITY, ALIGNMENT))
    memory: bytearray = field(default_factory=lambda: bytearray(CAPACITY))
    live: list[tuple[int, tuple[Extent, ...]]] = field(default_factory=list)  # pattern, frame

    def free_runs(self, limit: int) -> list[tuple[int, int]]:
        """Gives (bytes, start) of the free runs below `limit`, read from the memory alone."""
        runs = []
        start = None
        for offset in range(0, min(limit, len(self.memory)) + ALIGNMENT, ALIGNMENT):
            is_free = offset < min(limit, len(self.memory)) and not self.memory[offset]
            if is_free and start is None:
                start = offset
            elif not is_free and start is not None:
                runs.append((offset - start, start))
                start = None
        return sorted(runs)

    def allocate(self, nbytes: int, below: int | None, pattern: int) -> None:
        limit = len(self.memory) if below is None else rounded_down(below)
        runs = self.free_runs(limit)
        need = rounded_up(nbytes)
        frame = self.allocator.allocate(nbytes, below=below)
        # Several extents: it fails exactly when there are too few bytes, never for fragmentation.
        assert (frame is None) == (need > sum(length for length, _ in runs))
        if frame is None:
            event("full" if below is None else "full below the limit")
            return
        assert sum(size for _, size in frame) == need
        fitting = [start for length, start in runs if length >= need > 0]
        if fitting:
            assert frame == (Extent(fitting[0], need),), "the shortest run that is long enough"
        elif need:
            event("several extents")
            assert frame[0] == Extent(runs[-1][1], runs[-1][0]), "the longest run first"
        for offset, size in frame:
            assert offset % ALIGNMENT == size % ALIGNMENT == 0
            assert offset + size <= limit
            assert not any(self.memory[offset : offset + size])
            self.memory[offset : offset + size] = bytes([pattern]) * size
        self.live.append((pattern, frame))

    def free(self, choice: int) -> None:
        pattern, frame = self.live.pop(choice % len(self.live))
        for offset, size in frame:
            assert self.memory[offset : offset + size] == bytes([pattern]) * size
            self.memory[offset : offset + size] = bytes(size)
        self.allocator.free(frame)

    def grow(self, nbytes: int) -> None:
        if nbytes < len(self.memory):
            with pytest.raises(ValueError, match="shrink"):
                self.allocator.grow(rounded_down(nbytes))
            return
        self.allocator.grow(nbytes)
        self.memory += bytes(rounded_down(nbytes) - len(self.memory))

    def shrink(self, nbytes: int) -> None:
        if nbytes >= len(self.memory) + ALIGNMENT:
            with pytest.raises(ValueError, match="grow"):
                self.allocator.shrink(nbytes)
            return
        is_free = not any(self.memory[rounded_down(nbytes) :])
        assert self.allocator.shrink(nbytes) == is_free
        event("shrunk" if is_free else "refused to shrink")
        if is_free:
            del self.memory[rounded_down(nbytes) :]

    def check(self) -> None:
        allocator = self.allocator
        allocator.check_invariants([frame for _, frame in self.live])
        runs = self.free_runs(len(self.memory))
        assert allocator.capacity_bytes == len(self.memory)
        assert allocator.free_bytes == sum(length for length, _ in runs)
        assert allocator.largest_run_bytes == max(runs, default=(0, 0))[0], "runs coalesce"
        assert allocator.highest_used_bytes == rounded_up(len(self.memory.rstrip(b"\0")))
        for limit in (0, CAPACITY // 3, CAPACITY, LARGEST):
            expected = sum(length for length, _ in self.free_runs(rounded_down(limit)))
            assert allocator.free_bytes_below(limit) == expected


@given(actions)
@example([("allocate", 64, 0), ("shrink", 64, 0), ("grow", 4096, 0), ("allocate", 1500, 0)])
@example([("allocate", 1500, 0), ("allocate", 64, 0), ("free", 0, 0), ("below", 1500, 1000)])
def test_a_pattern_written_on_allocation_is_intact_on_free(
    steps: list[tuple[str, int, int]],
) -> None:
    tier = Tier()
    for number, (action, size, limit) in enumerate(steps):
        if action in ("allocate", "below"):
            tier.allocate(size, limit if action == "below" else None, number % 255 + 1)
        elif action == "grow":
            tier.grow(size)
        elif action == "shrink":
            tier.shrink(size)
        elif tier.live:
            tier.free(size)
        tier.check()
    while tier.live:
        tier.free(0)
    tier.check()
    assert tier.allocator.largest_run_bytes == tier.allocator.capacity_bytes
    assert tier.allocator.shrink(0)


def test_best_fit_takes_the_shortest_run_that_is_long_enough() -> None:
    allocator = FrameAllocator(10 * ALIGNMENT, ALIGNMENT)
    runs = [allocator.allocate(size * ALIGNMENT) for size in (3, 1, 2, 4)]
    assert None not in runs
    allocator.free(runs[0])  # type: ignore[arg-type]
    allocator.free(runs[2])  # type: ignore[arg-type]
    assert allocator.allocate(2 * ALIGNMENT) == runs[2]
    assert allocator.allocate(2 * ALIGNMENT) == (Extent(0, 2 * ALIGNMENT),)


def test_frames_moved_below_a_limit_make_room_to_shrink() -> None:
    """Scenario: the host budget is halved.

    1. The frame in the upper half cannot stay, and what is freed below does not tempt best fit.
    2. Its bytes move to a frame below the limit, in two extents.
    3. The upper half is free: the tier shrinks, and grows again later.
    """
    allocator = FrameAllocator(10 * ALIGNMENT, ALIGNMENT)
    first, low, second, middle, high = (
        allocator.allocate(size * ALIGNMENT) for size in (1, 1, 1, 4, 2)
    )
    assert None not in (first, low, second, middle, high)
    allocator.free(first)  # type: ignore[arg-type]
    allocator.free(second)  # type: ignore[arg-type]
    limit = 7 * ALIGNMENT
    assert not allocator.shrink(limit)
    assert allocator.capacity_bytes == 10 * ALIGNMENT
    assert allocator.highest_used_bytes == 9 * ALIGNMENT
    assert allocator.free_bytes_below(limit) == 2 * ALIGNMENT
    assert allocator.allocate(3 * ALIGNMENT, below=limit) is None
    moved = allocator.allocate(2 * ALIGNMENT, below=limit)
    assert moved is not None
    assert sorted(moved) == [(0, ALIGNMENT), (2 * ALIGNMENT, ALIGNMENT)]
    allocator.free(high)  # type: ignore[arg-type]
    assert allocator.shrink(limit)
    assert (allocator.capacity_bytes, allocator.free_bytes) == (limit, 0)
    assert allocator.allocate(1) is None
    allocator.grow(8 * ALIGNMENT + 1)
    assert allocator.allocate(1) == (Extent(limit, ALIGNMENT),)
    assert allocator.peak_bytes == 9 * ALIGNMENT


def test_a_double_free_is_refused() -> None:
    allocator = FrameAllocator(CAPACITY, ALIGNMENT)
    frame = allocator.allocate(100)
    assert frame is not None
    allocator.free(frame)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(frame)


def test_a_frame_beyond_a_shrunk_tier_is_refused() -> None:
    allocator = FrameAllocator(CAPACITY, ALIGNMENT)
    assert allocator.shrink(ALIGNMENT)
    with pytest.raises(AssertionError, match="never allocated"):
        allocator.free((Extent(CAPACITY - ALIGNMENT, ALIGNMENT),))
