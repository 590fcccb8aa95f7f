"""Copies that failed, in words and in the log: which page, on which way, and what is left of it."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.memory import PageState
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from tvm_pager.memory import Page, PageTable

__all__ = ["FailureLog", "copy_failed", "room_below"]

_log = logging.getLogger("tvm_pager")

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


class FailureLog:
    """Logs the first failure of each kind whole and counts the others; the pager's lock is held.

    A kind is the lanes of a page's copies and the errno: a disk that refuses a thousand writes says
    the same a thousand times.
    """

    def __init__(self) -> None:
        self._num_more: Counter[tuple[str, str]] = Counter()

    def add(self, page: Page, failure: TransferError) -> None:
        """Logs or counts what the lane said of a page in flight."""
        lanes = ", ".join(ticket.transfer.lane.value for ticket in page.tickets)
        kind = lanes, errno.errorcode.get(failure.errno or 0, "no errno")
        if kind in self._num_more:
            self._num_more[kind] += 1
            return
        self._num_more[kind] = 0
        # As text: a handler that keeps the record would keep the error, and what that holds.
        _log.warning("page %s: %s", page.id, str(failure))

    def tell_rest(self) -> None:
        """Logs what was only counted since the last time, in one line; nothing if there is none."""
        counted = [
            f"{lanes}, {code}: ... and {num:,} more like it"
            for (lanes, code), num in self._num_more.items()
            if num
        ]
        if counted:
            _log.warning("copies that failed: %s", "; ".join(counted))
        self._num_more = Counter(dict.fromkeys(self._num_more, 0))
