"""LRU and CLOCK by hand, and the fallback."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import tvm_pager
from tests.model.programs import Rig
from tests.unit.blind_view import BlindView
from tvm_pager.errors import PolicyError
from tvm_pager.planning import (
    Eviction,
    PageKind,
    PageView,
    Policy,
    Tier,
    View,
    load_policy,
)


class FakeView(BlindView):
    """Pages of 10 bytes each; `held` ones cannot leave."""

    operation_index = 0

    def __init__(self, held: set[int] | None = None) -> None:
        self.held = held or set()

    def page(self, page_id: int) -> PageView:
        return PageView(page_id, PageKind.OTHER, 10, Tier.DEVICE, False, 0, 0)

    def evictable(self, page_id: int) -> bool:
        return page_id not in self.held

    def frame_bytes(self, page_id: int) -> int:
        return 10


def fed(name: str, *inserted: int, used: tuple[int, ...] = ()) -> Policy:
    policy = load_policy(name)()
    for page_id in inserted:
        policy.on_insert(page_id)
    for page_id in used:
        policy.on_access(page_id)
    return policy


def victims(policy: Policy, need_bytes: int, view: View | None = None) -> list[int] | None:
    chosen = policy.choose_victims(Tier.DEVICE, need_bytes, view or FakeView())
    return None if chosen is None else [eviction.page_id for eviction in chosen]


def test_lru_takes_the_page_that_was_not_used_for_longest() -> None:
    assert victims(fed("lru", 1, 2, 3, used=(1,)), 15) == [2, 3]


def test_clock_gives_used_pages_a_second_chance() -> None:
    policy = fed("clock", 1, 2, 3, used=(1, 3))
    assert victims(policy, 10) == [2]
    policy.on_remove(2)
    # The hand went on to 3; both have lost their bit since, or lose it in this sweep.
    assert victims(policy, 20) is not None


@pytest.mark.parametrize("name", ["lru", "clock"])
def test_held_pages_are_passed_over(name: str) -> None:
    assert victims(fed(name, 1, 2, 3), 20, FakeView({2})) == [1, 3]


@pytest.mark.parametrize("name", ["lru", "clock"])
def test_none_leaves_a_policy_unchanged(name: str) -> None:
    policy = fed(name, 1, 2, 3, used=(2,))
    before = copy.deepcopy(vars(policy))
    assert victims(policy, 20, FakeView({1, 2})) is None
    assert vars(policy) == before


def eight_pages() -> list[torch.Tensor]:
    """Twice as many bytes as the device of these tests has."""
    return [torch.full((1024,), float(i)) for i in range(8)]


class Hostile(Policy):
    """Chooses pages that are not there."""

    name = "hostile"

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        return [Eviction(10**9)]


class Raising(Policy):
    name = "raising"

    def on_access(self, page_id: int) -> None:
        raise ValueError("no")

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        raise KeyError("never")


@pytest.mark.parametrize("policy", [Hostile, Raising])
def test_a_policy_that_misbehaves_is_replaced_once_and_the_numbers_are_right(
    policy: type[Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_pager.assembly.load_policy", lambda name: policy)
    with tvm_pager.Pager(device="16KiB", host="1MiB", torch_device="cpu") as pager:
        kept = eight_pages()
        assert [t[5].item() for t in kept] == [float(i) for i in range(8)]
        stats = pager.stats()
        assert 1 <= stats.num_policy_errors <= 2, "once per tier"
        assert any("LRU has taken over" in notice for notice in stats.notices)
        del kept


def test_strict_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_pager.assembly.load_policy", lambda name: Hostile)
    with tvm_pager.Pager(device="16KiB", host="1MiB", torch_device="cpu", strict=True) as pager:
        with pytest.raises(PolicyError, match="hostile"):
            eight_pages()
        pager.check_invariants()


class Choosing(Policy):
    """Chooses what a test says."""

    name = "choosing"

    def __init__(self) -> None:
        self.choice: list[Eviction] = []

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        return self.choice


@pytest.mark.parametrize(
    ("victims", "problem"),
    [
        pytest.param([("w0", None)], "not evictable now", id="held"),
        pytest.param([("w3", None)], "not evictable now", id="in use"),
        pytest.param([("w1", None)] * 2, "not evictable now", id="twice"),
        pytest.param([("w1", None)], r"freed 3072 B where \d+ B were asked", id="too little"),
        pytest.param([("w1", Tier.DEVICE), ("w2", None)], "not below DEVICE", id="upwards"),
    ],
)
def test_an_illegal_choice_is_refused_by_name(
    victims: list[tuple[str, Tier | None]], problem: str
) -> None:
    """Room for two pages of 3 KiB is asked for; the first of all is pinned, the last in use."""
    policy = Choosing()
    first = iter([policy])
    rig = Rig(lambda: next(first, None) or Choosing(), device=64 * 512)
    rig.weights(4)
    rig.pager.running.append([rig.pages["w3"]])
    rig.pager.pin([rig.pages["w0"]])
    policy.choice = [Eviction(rig.pages[name].id, to) for name, to in victims]
    with rig.pager.lock, pytest.raises(PolicyError, match=problem):
        rig.pager.make_room(rig.pager.free_bytes + 2 * 3072, "test")
    assert all(page.is_on_device for page in rig.pages.values())
    rig.pager.unpin([rig.pages["w0"]])
    rig.pager.running.clear()
    rig.end()
