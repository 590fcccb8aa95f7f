"""A policy under watch: what the pager tells it and what it answers are compared with the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.memory import Tier
from tvm_pager.planning import Policy

if TYPE_CHECKING:
    from tvm_pager.planning import Eviction, View

__all__ = ["checked_policy", "expect"]


def expect(is_right: bool, otherwise: str) -> None:
    """Raises AssertionError with the sentence, also under `python -O`."""
    if not is_right:
        raise AssertionError(otherwise)


def checked_policy(policy: type[Policy]) -> type[Policy]:
    """A subclass that checks, independently, what the pager promises and what the policy owes."""

    class Checked(policy):  # type: ignore[misc, valid-type]  # a base class that is a value
        def __init__(self) -> None:
            self.checked_residents: set[int] = set()
            super().__init__()

        def on_insert(self, page_id: int) -> None:
            expect(page_id not in self.checked_residents, f"page {page_id} was inserted twice")
            self.checked_residents.add(page_id)
            super().on_insert(page_id)

        def on_access(self, page_id: int) -> None:
            expect(page_id in self.checked_residents, f"page {page_id} is used, not inserted")
            super().on_access(page_id)

        def on_remove(self, page_id: int) -> None:
            self.checked_residents.remove(page_id)
            super().on_remove(page_id)

    if policy.choose_victims is not Policy.choose_victims:  # else the pager takes LRU

        def choose_victims(
            self: Policy, tier: Tier, need_bytes: int, view: View
        ) -> list[Eviction] | None:
            victims = policy.choose_victims(self, tier, need_bytes, view)
            for victim in victims or ():
                page = view.page(victim.page_id)
                expect(
                    view.evictable(page.page_id) and (tier is not Tier.DEVICE or not page.pins),
                    f"{policy.__name__} chose {page}, which cannot leave {tier.name}",
                )
            return victims

        Checked.choose_victims = choose_victims
    Checked.__name__ = policy.__name__
    return Checked
