"""Frames never overlap, patterns survive, free runs coalesce."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pager.memory import Extent, FrameAllocator

ALIGNMENT = 64
CAPACITY = 4096

actions = st.lists(st.tuples(st.booleans(), st.integers(0, 1500), st.integers(0, 30)), max_size=80)


@given(actions)
def test_a_pattern_written_on_allocation_is_intact_on_free(
    steps: list[tuple[bool, int, int]],
) -> None:
    allocator = FrameAllocator(CAPACITY, ALIGNMENT)
    tier = bytearray(CAPACITY)
    live: list[tuple[int, int, tuple[Extent, ...]]] = []  # pattern, asked bytes, frame
    for number, (allocates, nbytes, choice) in enumerate(steps):
        if allocates:
            frame = allocator.allocate(nbytes)
            free = CAPACITY - sum(extent.nbytes for _, _, taken in live for extent in taken)
            # Several extents: it fails exactly when there are too few bytes, never for
            # fragmentation.
            assert (frame is None) == (-(-nbytes // ALIGNMENT) * ALIGNMENT > free)
            if frame is None:
                continue
            assert sum(extent.nbytes for extent in frame) >= nbytes
            pattern = number % 255 + 1
            for offset, size in frame:
                assert offset % ALIGNMENT == size % ALIGNMENT == 0
                assert not any(tier[offset : offset + size])
                tier[offset : offset + size] = bytes([pattern]) * size
            live.append((pattern, nbytes, frame))
        elif live:
            pattern, _, frame = live.pop(choice % len(live))
            for offset, size in frame:
                assert tier[offset : offset + size] == bytes([pattern]) * size
                tier[offset : offset + size] = bytes(size)
            allocator.free(frame)
        allocator.check_invariants([frame for _, _, frame in live])
    for _, _, frame in live:
        allocator.free(frame)
    allocator.check_invariants([])
    assert allocator.largest_run_bytes == CAPACITY


def test_best_fit_takes_the_shortest_run_that_is_long_enough() -> None:
    allocator = FrameAllocator(10 * ALIGNMENT, ALIGNMENT)
    runs = [allocator.allocate(size * ALIGNMENT) for size in (3, 1, 2, 4)]
    assert None not in runs
    allocator.free(runs[0])  # type: ignore[arg-type]
    allocator.free(runs[2])  # type: ignore[arg-type]
    assert allocator.allocate(2 * ALIGNMENT) == runs[2]
    assert allocator.allocate(2 * ALIGNMENT) == (Extent(0, 2 * ALIGNMENT),)


def test_a_double_free_is_refused() -> None:
    allocator = FrameAllocator(CAPACITY, ALIGNMENT)
    frame = allocator.allocate(100)
    assert frame is not None
    allocator.free(frame)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(frame)
