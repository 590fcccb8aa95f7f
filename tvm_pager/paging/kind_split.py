"""A policy for some kinds of pages, and another one for the rest, as one policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.planning import Eviction, Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import PageKind, Tier
    from tvm_pager.planning import View

__all__ = ["KindSplit"]


class KindSplit(Policy):
    """Asks `policy` for pages of its kinds, and `others` for what these do not free.

    What a page holds may be learned late: it changes hands at its next use.

    Args:
        policy: has `kinds`.
        others: decides about all other kinds.
        kind_of: a page's kind, by id.
    """

    def __init__(self, policy: Policy, others: Policy, kind_of: Callable[[int], PageKind]) -> None:
        self.name = policy.name  # type: ignore[misc]  # it speaks for that one
        self._policy = policy
        self._others = others
        self._kind_of = kind_of
        self._owners: dict[int, Policy] = {}

    def on_insert(self, page_id: int) -> None:
        owner = self._owners[page_id] = self._owner_of(page_id)
        owner.on_insert(page_id)

    def on_access(self, page_id: int) -> None:
        before, owner = self._owners[page_id], self._owner_of(page_id)
        if owner is before:
            owner.on_access(page_id)
        else:
            before.on_remove(page_id)
            self.on_insert(page_id)

    def on_remove(self, page_id: int) -> None:
        self._owners.pop(page_id).on_remove(page_id)

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        own_bytes = sum(
            view.frame_bytes(page_id)
            for page_id, owner in self._owners.items()
            if owner is self._policy and view.evictable(page_id)
        )
        wanted = min(need_bytes, own_bytes)
        victims = list(self._policy.choose_victims(tier, wanted, view) or ()) if wanted else []
        rest = need_bytes - sum(view.frame_bytes(victim.page_id) for victim in victims)
        if rest <= 0:
            return victims
        more = self._others.choose_victims(tier, rest, view)
        return None if more is None else victims + more

    def _owner_of(self, page_id: int) -> Policy:
        kinds = self._policy.kinds
        return self._policy if kinds is None or self._kind_of(page_id) in kinds else self._others
