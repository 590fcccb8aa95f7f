"""The limits of a pager: what its tiers can back, and the refusals of what goes beyond them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.errors import BudgetError, CommitError
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from tvm_pager.memory import PageTable
    from tvm_pager.paging.pager import DemandPager

__all__ = ["commit_limit_bytes", "over_budget", "over_commit", "write_behind_bytes"]

_MAX_WRITE_BEHIND_BYTES = 512 << 20  # 10 ms of a fast link: what a fault may have to wait behind


def write_behind_bytes(budget_bytes: int) -> int:
    """How much is written back ahead of need where nobody says otherwise."""
    return min(_MAX_WRITE_BEHIND_BYTES, budget_bytes // 16)


def commit_limit_bytes(table: PageTable, budget_bytes: int) -> int:
    """Bytes that all tiers together can back.

    Whole pages leave the device, so an eviction frees up to a page too much, and the copy below of
    a page that is fetched back stays until the fetch is over: two of the largest pages are kept in
    reserve. While everything fits on the device nothing needs to leave it. A closed tier backs
    nothing: what is in it can be read once more, and may never return there.
    """
    below = sum(
        frames.capacity_bytes
        for tier, frames in table.frames.items()
        if tier not in table.closed_tiers
    )
    reserve = 2 * table.commit_of(table.largest_bytes)
    return budget_bytes + max(0, below - reserve)


def over_commit(table: PageTable, limit_bytes: int, new_bytes: int, operation: str) -> CommitError:
    """The error for bytes that no tier could take once the device is full."""
    closed = "".join(f"; {tier.name} is closed: {why}" for tier, why in table.closed_tiers.items())
    return CommitError(
        f"{operation} creates {format_bytes(new_bytes)}, but "
        f"{format_bytes(table.committed_bytes)} of the {format_bytes(limit_bytes)} that "
        f"device, host and nvme can back are taken{closed}. Give a larger nvme (or host) budget"
    )


def over_budget(pager: DemandPager, need_bytes: int, operation: str) -> BudgetError:
    """The error for an operation that does not fit on the device, with the budget that it needs."""
    operands = {page.id: page for pages in pager.running for page in pages if page.is_on_device}
    pinned = [page for page in pager.table.pages.values() if page.pins and page.is_on_device]
    held_bytes = sum(page.frame_bytes for page in operands.values())
    pinned_bytes = sum(page.frame_bytes for page in pinned if page.id not in operands)
    names = ", ".join(repr(page) for page in pinned[:3])
    return BudgetError(
        f"{operation} needs {format_bytes(need_bytes)} more on the device beside the "
        f"{format_bytes(held_bytes)} of its operands that are there; the budget is "
        f"{format_bytes(pager.budget_bytes)}, of which {format_bytes(pinned_bytes)} are pinned "
        f"by {len(pinned)} pages{f' ({names})' if names else ''} and "
        f"{format_bytes(pager.overhead_bytes)} are not pages. Give a device budget of at least "
        f"{format_bytes(need_bytes + held_bytes + pinned_bytes + pager.overhead_bytes)}, or "
        "make the operation smaller (batch, sequence, chunk)"
    )
