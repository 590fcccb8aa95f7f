"""Least recently used: the oldest evictable pages go first."""

from __future__ import annotations

from collections import OrderedDict

from tvm_pager.planning import Eviction, Policy, Tier, View

__all__ = ["LRU"]


class LRU(Policy):
    """Exact LRU over whole pages of different sizes.

    O(1) per event, O(pages scanned) per decision.
    """

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest first

    def on_insert(self, page_id: int) -> None:
        self._order[page_id] = None

    def on_access(self, page_id: int) -> None:
        self._order.move_to_end(page_id)

    def on_remove(self, page_id: int) -> None:
        del self._order[page_id]

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims: list[Eviction] = []
        freed = 0
        for page_id in self._order:
            if freed >= need_bytes:
                break
            if view.evictable(page_id):
                victims.append(Eviction(page_id))
                freed += view.frame_bytes(page_id)
        return victims if freed >= need_bytes else None
