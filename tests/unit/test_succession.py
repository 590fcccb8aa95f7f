"""Another policy takes over in a pager that runs: what it is told, what is kept, what is left."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from tests.model.programs import FRAME, Recording, Rig, training
from tests.model.tiny_planner import TinyPlanner
from tvm_pager.errors import PagerError, PolicyError
from tvm_pager.events import EventKind
from tvm_pager.memory import PageKind, Tier
from tvm_pager.paging.succession import change_policy
from tvm_pager.planning import Eviction, Policy, load_policy

TIGHT = 88 * 512  # less than the step takes


class Telling(Policy):
    """Keeps what each instance is told."""

    name = "telling"
    made: ClassVar[list[Telling]] = []

    def __init__(self) -> None:
        self.told: list[int] = []
        self.made.append(self)

    def on_insert(self, page_id: int) -> None:
        self.told.append(page_id)

    def choose_victims(self, tier: Any, need_bytes: int, view: Any) -> Any:
        return load_policy("lru")().choose_victims(tier, need_bytes, view)


class Unmade(Policy):
    name = "unmade"

    def __init__(self) -> None:
        raise ValueError("no licence")


class Untellable(Policy):
    name = "untellable"

    def on_insert(self, page_id: int) -> None:
        raise ValueError("not that page")

    def choose_victims(self, tier: Any, need_bytes: int, view: Any) -> Any:
        return None


class OnlyParameters(Policy):
    """Keeps what it decides about, and lets go what is asked in the order of numbers."""

    name = "only_parameters"
    kinds = frozenset({PageKind.PARAM})
    made: ClassVar[list[OnlyParameters]] = []

    def __init__(self) -> None:
        self.residents: set[int] = set()
        self.made.append(self)

    def on_insert(self, page_id: int) -> None:
        self.residents.add(page_id)

    def on_remove(self, page_id: int) -> None:
        self.residents.remove(page_id)

    def choose_victims(self, tier: Any, need_bytes: int, view: Any) -> Any:
        victims, freed = [], 0
        for page_id in sorted(self.residents):
            if freed < need_bytes and view.evictable(page_id):
                victims.append(Eviction(page_id))
                freed += view.frame_bytes(page_id)
        return victims if freed >= need_bytes else None


class Illegal(TinyPlanner):
    name = "illegal"

    def plan(self, trace: Any, hardware: Any, limits: Any) -> Any:
        raise ValueError("no plan today")


def trained(make_policy: Any = None, num: int = 4, ops: Any = None, **options: Any) -> Rig:
    rig = Rig(make_policy, device=TIGHT, **options)
    rig.weights()
    for _ in range(num):
        rig.iterate(ops or training())
    return rig


def change(rig: Rig, make_policy: Any) -> None:
    change_policy(rig.pager, make_policy, hardware=lambda: "a profile")


def counts(rig: Rig) -> Any:
    return rig.pager.iterations.outcomes.counts


def instance(tier: Tier, kind: Any) -> Any:
    """The one of the tier: they are made from the device down."""
    return kind.made[-2:][tier is Tier.HOST]


# --- what the new policy is told -----------------------------------------------------------------


def test_residents_are_told_in_the_order_of_their_last_use() -> None:
    rig = trained(num=2)
    change(rig, Telling)
    table = rig.pager.table
    told = instance(Tier.DEVICE, Telling).told
    assert set(told) == {page.id for page in table.pages.values() if page.is_on_device}
    uses = [table.pages[page_id].last_use for page_id in told]
    assert uses == sorted(uses)
    assert len(set(uses)) > 3
    below = {p.id for p in table.pages.values() if any(s.host is not None for s in p.segments)}
    assert below
    assert set(instance(Tier.HOST, Telling).told) == below
    rig.pager.check_invariants()
    change(rig, load_policy("lru"))
    rig.end()


def test_lru_evicts_first_what_was_used_longest_ago() -> None:
    rig = trained(load_policy("clock"), num=2)
    change(rig, load_policy("lru"))
    policy, table = rig.pager.device_policy, rig.pager.table
    victims = policy.victims(3 * 3072, rig.pager.view)
    assert victims is not None
    movable = [p for p in table.pages.values() if p.is_on_device and not p.pins and not p.tickets]
    oldest = sorted(page.last_use for page in movable)[:3]
    assert sorted(table.pages[v.page_id].last_use for v in victims)[:3] == oldest
    rig.end()


def test_a_policy_of_some_kinds_is_told_of_these_only() -> None:
    rig = trained(num=2)
    change(rig, OnlyParameters)
    pages = rig.pager.table.pages
    residents = instance(Tier.DEVICE, OnlyParameters).residents
    assert residents
    assert {pages[page_id].kind for page_id in residents} == {PageKind.PARAM}
    for _ in range(2):
        rig.iterate(training())
    rig.pager.check_invariants()
    change(rig, load_policy("lru"))
    rig.end()


# --- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [Unmade, Untellable])
def test_a_policy_that_raises_changes_nothing(broken: Any) -> None:
    rig = trained(TinyPlanner, num=5)
    before = rig.pager.device_policy.policy, rig.pager.iterations.planner
    assert rig.pager.iterations.is_planned
    with pytest.raises(PolicyError, match=rf"policy {broken.name} .*raised ValueError"):
        change(rig, broken)
    assert (rig.pager.device_policy.policy, rig.pager.iterations.planner) == before
    assert rig.pager.iterations.is_planned
    rig.iterate(training())
    assert not rig.pager.num_policy_errors
    rig.end()


def test_a_plan_that_raises_is_answered_as_ever() -> None:
    rig = trained(TinyPlanner, num=5, strict=False)
    change(rig, Illegal)
    for _ in range(2):
        rig.iterate(training())
    assert rig.pager.num_policy_errors == 1
    change(rig, load_policy("lru"))
    assert rig.pager.num_policy_errors == 1, "errors are counted over all policies"
    assert "policy illegal raised ValueError('no plan today')" in "".join(rig.notices)
    rig.end()


def test_inside_an_operation_it_is_refused() -> None:
    rig = trained(num=2)
    pages = [rig.pages["w0"]]
    before = rig.pager.device_policy.policy
    refused: list[str] = []

    def emit(event: Any) -> None:
        if event.kind is EventKind.EVICT:
            with pytest.raises(PagerError) as caught:
                change(rig, load_policy("clock"))
            refused.append(str(caught.value))

    rig.pager.sink.emit = emit  # type: ignore[union-attr]  # a mock
    with rig.pager.lock:
        rig.pager.evictor.evict_some(FRAME)
    assert refused
    assert "between operations" in refused[0]
    with rig.pager.lock:
        rig.pager.admit(pages, 0, "test")
        rig.pager.pin(pages)
    with pytest.raises(PagerError, match="between operations"):
        change(rig, load_policy("clock"))
    rig.pager.unpin(pages)
    assert rig.pager.device_policy.policy is before
    change(rig, load_policy("clock"))
    rig.end()


# --- traces and plans ----------------------------------------------------------------------------


def test_a_known_trace_is_planned_at_the_next_boundary_without_a_recording() -> None:
    rig = trained(TinyPlanner, num=5)
    num_recorded = counts(rig)["recorded"]
    policies: list[TinyPlanner] = []
    change(rig, lambda: policies.append(TinyPlanner()) or policies[-1])
    assert not rig.pager.iterations.is_planned, "the plan of the old policy is left at once"
    rig.iterate(training())
    assert rig.pager.iterations.is_planned
    assert len(policies[0].plans) == 1
    for _ in range(3):
        rig.iterate(training())
    assert len(policies[0].reports) == 3
    assert all(report.is_complete for report in policies[0].reports)
    assert counts(rig)["recorded"] == num_recorded
    rig.end()


@pytest.mark.parametrize("is_announced", [False, True], ids=["begun", "announced"])
def test_traces_outlive_a_policy_that_needs_none(is_announced: bool) -> None:
    ops = [dataclasses.replace(op, name=f"aten::{op.name}") for op in training()]
    rig = trained(TinyPlanner, ops=ops, num=5)

    def iterate(num: int) -> None:
        for op in ops * num:
            rig.run(op)
            if op is ops[-1]:
                with rig.pager.lock:
                    if is_announced:
                        rig.pager.iterations.end_when(lambda: True)
                    else:
                        rig.pager.iterations.pass_boundary()

    num_recorded = counts(rig)["recorded"]
    for num in (2, 2, 2, 4):  # nothing may count as a trace after which nobody knows what comes
        change(rig, load_policy("lru"))
        iterate(1)
        assert rig.pager.watch is None
        iterate(3)
        assert rig.pager.iterations.follower is None
        change(rig, TinyPlanner)
        iterate(num)
        assert rig.pager.iterations.is_planned
    assert counts(rig)["recorded"] == num_recorded
    rig.end()


def test_no_plan_is_left_over() -> None:
    rig = trained(TinyPlanner, num=6)
    iterations, runner = rig.pager.iterations, rig.pager.iterations.runner
    ops = iter(training())
    while not (runner.unused and runner.waiting):
        rig.run(next(ops))
    fetched = [runner._pages[number] for number in runner.unused]
    change(rig, load_policy("lru"))
    assert iterations.victims(512) is None
    assert [*runner.leaving, *runner.waiting, *runner.unused] == []
    assert all(page.is_on_device for page in fetched if page is not None)
    assert all(known.book is None and known.limits is None for known in iterations._known)
    for op in ops:
        rig.run(op)
    rig.boundary()
    assert rig.pager.watch is None
    rig.iterate(training())
    rig.pager.check_invariants()
    rig.end()


def test_what_was_chosen_to_leave_next_is_chosen_anew() -> None:
    rig = trained(num=3)
    rig.pager.evictor.ahead_bytes = 8 * 512
    rig.iterate(training())
    assert rig.pager.evictor._chosen
    change(rig, load_policy("clock"))
    assert not rig.pager.evictor._chosen
    rig.iterate(training())
    rig.end()


def test_a_recording_that_has_begun_goes_on() -> None:
    rig = trained(Recording, num=1)  # the second iteration is the first that is recorded
    for op in training()[:9]:
        rig.run(op)
    assert rig.pager.recorder is not None
    change(rig, TinyPlanner)
    for op in training()[9:]:
        rig.run(op)
    rig.boundary()
    rig.iterate(training())
    assert rig.pager.iterations.is_planned
    assert counts(rig)["recorded"] == 2
    rig.end()


def test_what_is_recorded_or_followed_ends_where_the_iteration_does() -> None:
    """Also if the new policy has no use for it: half of an iteration would be kept as a trace."""
    rig = trained(Recording, num=1)
    ops = [dataclasses.replace(op, name=f"aten::{op.name}") for op in training()]
    for op in ops[:-2]:
        rig.run(op)
    change(rig, load_policy("lru"))
    with rig.pager.lock:
        rig.pager.iterations.end_when(lambda: is_over)
    is_over = False
    for op in ops[-2:]:
        rig.run(op)
    is_over = True
    assert not counts(rig)["recorded"]
    rig.run(ops[0])
    assert counts(rig)["recorded"] == 1
    latest = rig.pager.iterations.latest
    assert latest is not None
    assert len(latest.ops) == len(ops)
    rig.boundary()
    rig.end()


def test_an_iteration_whose_end_is_near_is_brought_to_it() -> None:
    """The boundary was announced, and the next operation makes it: the iteration is complete."""
    ops = [dataclasses.replace(op, name=f"aten::{op.name}") for op in training()]
    rig = trained(TinyPlanner, ops=ops, num=6)
    complete = counts(rig)["complete"]
    for op in ops:
        rig.run(op)
    with rig.pager.lock:
        rig.pager.iterations.end_when(lambda: True)
    change(rig, TinyPlanner)
    assert counts(rig)["complete"] == complete + 1
    assert not rig.pager.iterations.is_planned, "nothing is planned before the next iteration"
    rig.run(ops[0])
    assert rig.pager.iterations.is_planned
    for op in ops[1:]:
        rig.run(op)
    rig.boundary()
    assert counts(rig)["complete"] == complete + 2
    rig.end()


def test_demand_that_looks_at_next_uses_follows_what_is_known() -> None:
    rig = trained(TinyPlanner, num=5)
    num_recorded = counts(rig)["recorded"]
    change(rig, load_policy("belady"))
    for _ in range(3):
        rig.iterate(training())
    assert rig.pager.iterations.follower is not None
    assert counts(rig)["recorded"] == num_recorded
    change(rig, load_policy("lru"))
    for _ in range(2):
        rig.iterate(training())
    assert rig.pager.iterations.follower is None, "nobody asks for next uses any more"
    rig.end()


def test_another_program_after_a_pause_is_recorded_as_ever() -> None:
    rig = trained(TinyPlanner, num=5)
    change(rig, load_policy("lru"))
    rig.iterate(training())
    change(rig, TinyPlanner)
    for _ in range(4 + 3):  # it is nearly what is known: so four times that is followed
        rig.iterate(training(num_layers=5))
    assert rig.pager.iterations.is_planned
    assert len(rig.pager.iterations.follower.known.names) == len(training(num_layers=5))  # type: ignore[union-attr]
    rig.end()
