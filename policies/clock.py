"""CLOCK: second chance.

A hand sweeps the pages in insertion order and spares those used since its last visit.

Source: F. J. Corbato, "A Paging Experiment with the Multics System", 1968. Simplified: pages differ
in size, so one decision may take several pages; a page that cannot be evicted now is passed over
and keeps its reference bit.
"""

from __future__ import annotations

from collections import OrderedDict

from tvm_pager.planning import Eviction, Policy, Tier, View

__all__ = ["Clock"]


class Clock(Policy):
    """Second-chance replacement. O(1) per event; a decision visits each page at most twice."""

    name = "clock"

    def __init__(self) -> None:
        # In hand order: the hand is at the front.
        self._referenced: OrderedDict[int, bool] = OrderedDict()

    def on_insert(self, page_id: int) -> None:
        self._referenced[page_id] = False

    def on_access(self, page_id: int) -> None:
        self._referenced[page_id] = True

    def on_remove(self, page_id: int) -> None:
        del self._referenced[page_id]

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        if not self._can_free(need_bytes, view):
            return None  # before the hand has moved: None must leave the policy unchanged
        victims: list[Eviction] = []
        freed = 0
        chosen: set[int] = set()
        while freed < need_bytes:
            page_id = next(iter(self._referenced))
            if page_id not in chosen and view.evictable(page_id):
                if self._referenced[page_id]:
                    self._referenced[page_id] = False
                else:
                    chosen.add(page_id)
                    victims.append(Eviction(page_id))
                    freed += view.frame_bytes(page_id)
            self._referenced.move_to_end(page_id)
        return victims

    def _can_free(self, need_bytes: int, view: View) -> bool:
        free = 0
        for page_id in self._referenced:
            if free >= need_bytes:
                return True
            if view.evictable(page_id):
                free += view.frame_bytes(page_id)
        return free >= need_bytes
