"""BELADY: what is used again last leaves first. A bound for policies that move pages on demand.

Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966
(MIN). With pages of one size no demand policy fetches less; with other sizes it is a good rule and
no bound. It needs a trace: what the view cannot tell is ranked by how long ago it was used.

Pages are taken by falling distance of their next use. Among equals, and pages that die before it
are all equal, clean ones go first, because nothing has to be written back, and then large ones.
"""

from __future__ import annotations

import math

from tvm_pager.planning import Eviction, Policy, Tier, View

__all__ = ["Belady"]


class Belady(Policy):
    """Furthest next use. O(1) per event, O(n log n) per decision for n resident pages."""

    name = "belady"

    def __init__(self) -> None:
        self._resident: dict[int, None] = {}  # in the order of arrival

    def on_insert(self, page_id: int) -> None:
        self._resident[page_id] = None

    def on_remove(self, page_id: int) -> None:
        del self._resident[page_id]

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        ranked = []
        for page_id in self._resident:
            if view.evictable(page_id):
                nbytes = view.frame_bytes(page_id)
                ranked.append((*_rank(page_id, view), -nbytes, page_id, nbytes))
        ranked.sort()
        victims: list[Eviction] = []
        freed = 0
        for *_, page_id, nbytes in ranked:
            if freed >= need_bytes:
                break
            victims.append(Eviction(page_id))
            freed += nbytes
        return victims if freed >= need_bytes else None


def _rank(page_id: int, view: View) -> tuple[float, bool]:
    """Sorts before pages that should stay rather."""
    page = view.page(page_id)
    distance = view.next_use(page_id)
    if distance is None:
        distance = view.operation_index - page.last_use
    return -distance if distance < math.inf else -math.inf, not page.is_clean
