"""`check_table`: docs/states.md as code. Expensive; run by tests and at check level 2."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tvm_pager.memory.page import Backing, Page, PageState, Tier

if TYPE_CHECKING:
    from tvm_pager.memory.frames import Extent
    from tvm_pager.memory.page_table import PageTable

__all__ = ["check_table"]

_ARRIVING = frozenset({PageState.WRITING_BACK, PageState.LEAVING, PageState.DEMOTING})
_IN_FLIGHT = _ARRIVING | {PageState.FETCHING}
_OFF_DEVICE = frozenset(
    {PageState.EVICTED, PageState.DEMOTING, PageState.FETCHING, PageState.FAILED}
)


def check_table(table: PageTable) -> None:
    """Raises AssertionError with page and rule if the books contradict docs/states.md."""
    frames: dict[Tier, list[tuple[Extent, ...]]] = {Tier.HOST: [], Tier.NVME: []}
    device_bytes = committed_bytes = 0
    ranges: list[tuple[int, int]] = []
    for page_id, page in table.pages.items():
        _require(page.id == page_id, page, "is filed under its own id")
        _check_page(table, page)
        _collect_frames(table, page, frames)
        committed_bytes += table.committed_of(page)
        device_bytes += page.frame_bytes if page.is_on_device else 0
        if page.va:
            ranges.append((page.va, page.va + page.nbytes))
    for page in table.zombies:
        _require(
            page.state is PageState.DEAD and page.id not in table.pages, page, "zombie is dead"
        )
        _collect_frames(table, page, frames)
    frames[Tier.NVME].extend(table.bad_frames)
    for _, tier, frame in table.limbo:
        frames[tier].append(frame)
    for tier, taken in frames.items():
        table.frames[tier].check_invariants(taken)
    if device_bytes != table.device_used_bytes or committed_bytes != table.committed_bytes:
        raise AssertionError(
            f"books say {table.device_used_bytes} B on the device and {table.committed_bytes} B "
            f"committed, the pages {device_bytes} and {committed_bytes}"
        )
    ranges.sort()
    for (_, end), (start, _) in itertools.pairwise(ranges):
        if start < end:
            raise AssertionError(f"virtual ranges overlap at {start:#x}")


def _check_page(table: PageTable, page: Page) -> None:
    _require(page.state is not PageState.DEAD, page, "dead pages are not in the table")
    _require(page.pins >= 0, page, "pins never negative")
    if page.pins and page.state is not PageState.FAILED:
        # A fetch that several threads wait for has failed: all but one have yet to notice.
        _require(page.is_on_device, page, "a pinned page is on the device")
    has_arrivals = bool(table.arrivals_of(page.id))
    _require(
        has_arrivals == (page.state in _ARRIVING),
        page,
        "frames are arriving exactly while writing back, leaving or demoting",
    )
    if page.state in _IN_FLIGHT:
        _require(bool(page.tickets), page, "an in-flight state has a ticket")
    else:
        _require(not page.tickets, page, "only in-flight states have tickets")
    if page.state is PageState.LEAVING:
        arriving = {id(segment) for segment, _, _ in table.arrivals_of(page.id)}
        covered_below = all(id(part) in arriving or not part.is_dirty for part in page.segments)
        _require(covered_below, page, "what leaves is arriving below")
    if page.state in _OFF_DEVICE and page.nbytes and not page.is_lost:
        _require(page.is_clean, page, "every byte that is not on the device has a copy below")
    _require(
        page.has_copies
        == (page.has_source or any(not segment.is_dirty for segment in page.segments)),
        page,
        "has_copies tells whether a segment has a frame or the page a source",
    )
    _require(page.has_source == (page.source is not None), page, "FILE and RECIPE have a source")
    if page.has_source:
        _require(
            all(segment.is_dirty for segment in page.segments), page, "a source needs no frames"
        )
    if page.backing is Backing.NONE:
        _require(page.is_on_device, page, "what nothing backs is on the device")
    if page.segments:
        covered = 0
        for segment in page.segments:
            _require(segment.page_offset == covered, page, "segments tile the page")
            covered += segment.nbytes
        _require(covered == page.nbytes, page, "segments cover the page")


def _collect_frames(
    table: PageTable, page: Page, frames: dict[Tier, list[tuple[Extent, ...]]]
) -> None:
    for segment in page.segments:
        for tier, frame in ((Tier.HOST, segment.host), (Tier.NVME, segment.nvme)):
            if frame is not None:
                size = sum(extent.nbytes for extent in frame)
                _require(size >= segment.nbytes, page, "a frame holds its segment")
                frames[tier].append(frame)
    frames_arriving = table.arrivals_of(page.id)
    for _, tier, frame in frames_arriving:
        frames[tier].append(frame)


def _require(holds: bool, page: Page, rule: str) -> None:
    if not holds:
        raise AssertionError(f"{page!r} breaks the rule: {rule}")
