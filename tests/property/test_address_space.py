"""Virtual ranges are disjoint, never reused, and translate to where the byte is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pager.memory import FrameAllocator, PageTable, Tier
from tvm_pager.memory.invariants import check_table


def make_table(host_bytes: int = 1 << 20, segment_bytes: int = 4096) -> PageTable:
    return PageTable(
        FrameAllocator(host_bytes, 4096), FrameAllocator(1 << 20, 4096), segment_bytes=segment_bytes
    )


@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), max_size=60))
def test_every_live_byte_belongs_to_its_own_page_and_no_range_comes_back(
    steps: list[tuple[int, bool]],
) -> None:
    table = make_table()
    live = []
    seen: list[tuple[int, int]] = []
    for nbytes, dies in steps:
        page = table.create(nbytes, object)
        va = table.address_of(page)
        assert va == table.address_of(page)
        assert all(va >= end for _, end in seen)
        seen.append((va, va + nbytes))
        live.append(page)
        if dies and len(live) > 1:
            dead = live.pop(0)
            table.free(dead)
            with pytest.raises(KeyError):
                table.translate(dead.va)
    for page in live:
        for offset in {0, page.nbytes // 2, page.nbytes - 1} if page.nbytes else ():
            found = table.translate(page.va + offset)
            assert (found.page_id, found.page_offset, found.tier) == (page.id, offset, Tier.DEVICE)
        with pytest.raises(KeyError):
            table.translate(page.va + page.nbytes)
    check_table(table)


def test_translate_finds_the_frame_below_the_device_also_across_extents() -> None:
    table = make_table(host_bytes=5 * 4096, segment_bytes=3 * 4096)
    holes = [table.allocate(Tier.HOST, 4096) for _ in range(5)]
    table.frames[Tier.HOST].free(holes[1])  # type: ignore[arg-type]
    table.frames[Tier.HOST].free(holes[3])  # type: ignore[arg-type]
    page = table.create(2 * 4096, object)
    (segment,) = table.segments_of(page)
    frame = table.allocate(Tier.HOST, segment.nbytes)
    assert frame is not None
    assert len(frame) == 2

    class Done:
        def done(self) -> bool:
            return True

    table.begin_write_back(page, [(segment, Tier.HOST, frame)], (Done(),))
    table.finish_write_back(page)
    table.evict(page)
    va = table.address_of(page)
    assert table.translate(va + 10) == (page.id, Tier.HOST, frame[0].offset + 10, 10)
    assert table.translate(va + 4100) == (page.id, Tier.HOST, frame[1].offset + 4, 4100)


def test_an_address_that_nobody_owns_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no live page owns"):
        make_table().translate(0)
