"""BELADY against the policies that do not know the future, on pages of one size."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.blind_view import BlindView
from tvm_pager.planning import PageKind, PageView, Policy, Tier, load_policy


class Future(BlindView):
    """Pages of 10 bytes, used as `uses` says; the next use is number `operation_index`."""

    def __init__(self, uses: list[int], clean: frozenset[int] = frozenset()) -> None:
        self.operation_index = 0
        self.clean = clean
        self._uses = uses

    def page(self, page_id: int) -> PageView:
        before = [i for i in range(self.operation_index) if self._uses[i] == page_id]
        last_use = max(before, default=0)
        is_clean = page_id in self.clean
        return PageView(page_id, PageKind.OTHER, 10, Tier.DEVICE, is_clean, 0, last_use)

    def evictable(self, page_id: int) -> bool:
        return True

    def frame_bytes(self, page_id: int) -> int:
        return 10

    def next_use(self, page_id: int) -> float | None:
        ahead = self._uses[self.operation_index :]
        return ahead.index(page_id) if page_id in ahead else math.inf


def num_fetches(policy: Policy, uses: list[int], capacity: int) -> int:
    view, resident, fetched = Future(uses), set[int](), 0
    for index, page in enumerate(uses):
        view.operation_index = index
        if page in resident:
            policy.on_access(page)
            continue
        fetched += 1
        if len(resident) == capacity:
            victims = policy.choose_victims(Tier.DEVICE, 10, view)
            assert victims is not None
            assert len(victims) == 1
            resident.remove(victims[0].page_id)
            policy.on_remove(victims[0].page_id)
        resident.add(page)
        policy.on_insert(page)
    return fetched


@pytest.mark.parametrize("other", ["lru", "clock"])
@given(uses=st.lists(st.integers(0, 5), max_size=40), capacity=st.integers(1, 4))
@example(uses=[0, 1, 2, 0, 1, 2], capacity=2)
def test_nobody_fetches_less_than_belady(other: str, uses: list[int], capacity: int) -> None:
    least = num_fetches(load_policy("belady")(), uses, capacity)
    assert least <= num_fetches(load_policy(other)(), uses, capacity)


def test_the_loop_that_defeats_lru() -> None:
    loop = [0, 1, 2] * 4
    assert num_fetches(load_policy("lru")(), loop, 2) == 12
    assert num_fetches(load_policy("belady")(), loop, 2) == 7


def chosen(view: Future, *resident: int) -> list[int]:
    policy = load_policy("belady")()
    for page in resident:
        policy.on_insert(page)
    victims = policy.choose_victims(Tier.DEVICE, 10, view)
    assert victims is not None
    return [victim.page_id for victim in victims]


def test_of_pages_that_are_not_used_again_clean_ones_go_first() -> None:
    assert chosen(Future([3]), 1, 2, 3) == [1]
    assert chosen(Future([3], frozenset({2})), 1, 2, 3) == [2]


def test_without_a_trace_the_oldest_goes() -> None:
    class Blind(Future):
        def next_use(self, page_id: int) -> float | None:
            return None

    view = Blind([1, 2, 1])
    view.operation_index = 3
    assert chosen(view, 1, 2) == [2]


def test_none_where_too_little_can_go() -> None:
    policy = load_policy("belady")()
    policy.on_insert(1)
    assert policy.choose_victims(Tier.DEVICE, 11, Future([1])) is None
