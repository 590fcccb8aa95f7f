"""Who leaves the device, where a plan is followed and did not foresee it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm_pager.planning import Eviction

if TYPE_CHECKING:
    from tvm_pager.paging.follower import Follower
    from tvm_pager.paging.pager import DemandPager
    from tvm_pager.paging.plan_runner import PlanRunner

__all__ = ["choose_by_plan"]

_SOON = 200  # operations
_DYING = 64  # operations: what dies by then gives its memory up without a copy


def choose_by_plan(
    pager: DemandPager, follower: Follower, runner: PlanRunner, need_bytes: int
) -> list[Eviction] | None:
    """Names pages that free `need_bytes` of the device; None: those of the trace do not.

    First what the plan lets go soon, then what is used furthest in the future; what it keeps, and
    what is about to die, comes last. O(pages).
    """
    order: list[tuple[int, float, int, int]] = []
    view, pages = pager.view, pager.table.pages
    for page_id, page in pages.items():
        number = follower.number_of(page_id)
        if number is None or not view.evictable(page_id):
            continue
        next_use = follower.next_use(page_id)
        distance = math.inf if next_use is None else next_use
        order.append(
            (_rank(follower, runner, number, distance), -distance, page_id, page.frame_bytes)
        )
    order.sort()
    victims: list[Eviction] = []
    freed = 0
    for _, _, page_id, frame_bytes in order:
        if freed >= need_bytes:
            break
        victims.append(Eviction(page_id))
        freed += frame_bytes
    return victims if freed >= need_bytes else None


def _rank(follower: Follower, runner: PlanRunner, number: int, distance: float) -> int:
    """Groups in which pages leave: 0 goes first."""
    known, now = follower.known, follower.index
    book = known.book
    if number in runner.leaving:
        return 0
    if book is not None:
        if book.is_kept(number, now):
            return 4
        leaves = book.next_eviction(number, now)
        if leaves is not None and leaves < now + min(_SOON, distance):
            return 1
    died = known.trace.pages[number].died
    if distance == math.inf and died is not None and died < now + _DYING:
        return 3
    return 2
