"""Copies that failed, in words: which page, on which way, what is free, and what is left of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.memory import PageState
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from tvm_pager.memory import Page, PageTable

__all__ = ["copy_failed", "room_below"]

_ATTEMPTS = {
    PageState.FETCHING: (
        "be fetched",
        "its copies below are kept: try the step again",
    ),
    PageState.WRITING_BACK: (
        "be written back",
        "it stays on the device, unharmed: try the step again",
    ),
    PageState.LEAVING: (
        "be written back",
        "it was lost with the device: start again from the last checkpoint",
    ),
    PageState.DEMOTING: ("be moved from DRAM to NVMe", "it stays in DRAM, unharmed"),
}


def copy_failed(page: Page, table: PageTable, failure: TransferError) -> TransferError:
    """The error for a page in flight whose copy has failed; `failure` is what the lane said."""
    what, left = _ATTEMPTS.get(page.state, ("be moved", "nobody needs it any more"))
    lanes = ", ".join(ticket.transfer.lane.value for ticket in page.tickets)
    error = TransferError(
        f"{page!r} could not {what} over {lanes} ({format_bytes(page.nbytes)} needed; "
        f"{room_below(table)}): {failure}; {left}",
        failure.errno,
    )
    error.__cause__ = failure
    return error


def room_below(table: PageTable) -> str:
    """What is free in each tier below the device."""
    return "; ".join(
        f"{tier.name} {format_bytes(space.free_bytes)} free of "
        f"{format_bytes(space.capacity_bytes)}"
        + (f", closed: {table.closed_tiers[tier]}" if tier in table.closed_tiers else "")
        for tier, space in table.frames.items()
    )
