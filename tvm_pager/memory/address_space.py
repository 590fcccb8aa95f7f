"""The 64-bit virtual space: every page owns a range that is never reused within a run.

A range is reserved when somebody first asks for the page's address: most pages live for
microseconds, and nobody does.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.memory.page import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tvm_pager.memory.page import Page

__all__ = ["FIRST_ADDRESS", "AddressSpace", "Translation"]

# Not 0, so that no page looks like a null pointer, and above 47 bits, so that no user-space pointer
# looks like a page.
FIRST_ADDRESS = 1 << 48
_ALIGNMENT = 4096


class Translation(NamedTuple):
    """Where the byte at a virtual address is now."""

    page_id: int
    tier: Tier
    frame_offset: int | None  # None on the device, where the page's own memory is the frame
    page_offset: int


class AddressSpace:
    """Hands out ranges and finds the page of an address."""

    def __init__(self) -> None:
        self._next = FIRST_ADDRESS
        # Addresses, page ids; rebuilt on demand.
        self._sorted: tuple[list[int], list[int]] = ([], [])
        self._is_stale = True

    def reserve(self, nbytes: int) -> int:
        """Returns the address of a new range; an empty page still gets an address of its own."""
        va = self._next
        self._next = va + (nbytes + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
        self._is_stale = True
        return va

    def translate(self, va: int, pages: Mapping[int, Page]) -> Translation:
        """Finds the current place of the byte at `va`.

        O(log pages), after an O(pages) rebuild if pages were created since.

        Raises:
            KeyError: if no live page owns the address.
        """
        if self._is_stale:
            live = sorted((page.va, page.id) for page in pages.values() if page.va)
            self._sorted = ([va for va, _ in live], [page_id for _, page_id in live])
            self._is_stale = False
        addresses, ids = self._sorted
        position = bisect_right(addresses, va) - 1
        page = pages.get(ids[position]) if position >= 0 else None
        if page is None or va - page.va >= page.nbytes:
            raise KeyError(f"no live page owns the virtual address {va:#x}")
        offset = va - page.va
        if page.is_on_device:
            return Translation(page.id, Tier.DEVICE, None, offset)
        for segment in page.segments:
            inside = offset - segment.page_offset
            if 0 <= inside < segment.nbytes:
                tier, frame = (
                    (Tier.HOST, segment.host)
                    if segment.host is not None
                    else (Tier.NVME, segment.nvme)
                )
                for extent in frame or ():
                    if inside < extent.nbytes:
                        return Translation(page.id, tier, extent.offset + inside, offset)
                    inside -= extent.nbytes
        raise AssertionError(f"{page!r} has no current copy of its byte {offset}")
