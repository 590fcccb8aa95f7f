"""Policies that look ahead on demand, and those that decide about some kinds of pages only."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.programs import Rig, training
from tvm_pager.memory import PageKind, Tier
from tvm_pager.planning import Eviction, MovementPlan, Policy, load_policy


def test_who_asks_for_the_next_use_has_iterations_followed() -> None:
    rig = Rig(load_policy("belady"), device=56 * 512)
    rig.weights()
    for _ in range(8):
        rig.iterate(training())
    assert rig.pager.iterations.outcomes.counts["complete"] >= 4
    rig.end()


def test_a_policy_that_chooses_no_victims_has_lru_from_the_start() -> None:
    class Planning(Policy):
        def plan(self, trace: Any, hardware: Any, limits: Any) -> None:
            return None

    rig = Rig(Planning)
    rig.weights()
    for _ in range(5):
        rig.iterate(training())
    assert rig.pager.device_policy.policy.name == "lru"
    assert not rig.pager.num_policy_errors
    assert not rig.notices
    rig.end()


def test_a_policy_decides_about_its_kinds_and_lru_about_the_others() -> None:
    asked: list[PageKind] = []

    class OfParams(load_policy("lru")):  # type: ignore[misc]
        kinds = frozenset({PageKind.PARAM})

        def choose_victims(self, tier: Tier, need_bytes: int, view: Any) -> Any:
            victims: list[Eviction] | None = super().choose_victims(tier, need_bytes, view)
            asked.extend(view.page(victim.page_id).kind for victim in victims or ())
            return victims

    rig = Rig(OfParams)
    rig.weights()
    for _ in range(5):
        rig.iterate(training())
    left = [page.kind for page in rig.pages.values() if not page.is_on_device]
    assert set(asked) == {PageKind.PARAM}
    assert PageKind.PARAM in left
    # More than its pages can give: those of other kinds go as well.
    with rig.pager.lock:
        rig.pager.make_room(rig.pager.budget_bytes, "test")
    assert rig.pager.table.device_used_bytes == 0
    assert set(asked) == {PageKind.PARAM}
    rig.end()


@pytest.mark.parametrize("kinds", [None, frozenset({PageKind.PARAM})])
def test_who_plans_for_some_kinds_only_is_asked_where_its_plan_foresaw_nothing(
    kinds: frozenset[PageKind] | None,
) -> None:
    asked: list[int] = []
    own = kinds

    class Planning(load_policy("lru")):  # type: ignore[misc]
        kinds = own

        def plan(self, trace: Any, hardware: Any, limits: Any) -> MovementPlan:
            asked.clear()
            return MovementPlan(())

        def choose_victims(self, tier: Tier, need_bytes: int, view: Any) -> Any:
            asked.append(need_bytes)
            return super().choose_victims(tier, need_bytes, view)

    rig = Rig(Planning, device=56 * 512)
    rig.weights()
    for _ in range(8):
        rig.iterate(training())
    assert rig.pager.iterations.outcomes.counts["complete"] >= 4
    # Else the trace knows better than LRU what is not needed for long.
    assert bool(asked) == (kinds is not None)
    rig.end()


def test_a_page_changes_hands_when_it_is_known_what_it_holds() -> None:
    class OfGrads(load_policy("lru")):  # type: ignore[misc]
        kinds = frozenset({PageKind.GRAD})

    rig = Rig(OfGrads, device=1 << 20)
    rig.weights(1)
    with rig.pager.lock:
        rig.pager.device_policy.replay()
        page = rig.pages["w0"]
        page.kind = PageKind.GRAD
        rig.pager.device_policy.used(page)
        rig.pager.device_policy.replay()
        split: Any = rig.pager.device_policy.policy
        assert list(split._policy._order) == [page.id]
        assert page.id not in split._others._order
    rig.end()


def test_a_policy_that_finds_no_victims_where_there_are_some_is_replaced() -> None:
    class Idle(Policy):
        name = "idle"

        def choose_victims(self, tier: Tier, need_bytes: int, view: Any) -> None:
            return None

    rig = Rig(Idle, strict=False)
    rig.weights()
    rig.iterate(training())
    assert any("chose nothing" in text for text in rig.notices)
    rig.end()
