"""What a plan says is done at its moments, and nothing else is harmed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.model.programs import Op, Rig, training
from tests.model.tiny_planner import TinyPlanner, occupancy
from tvm_pager.errors import PolicyError
from tvm_pager.memory import PageState, Tier
from tvm_pager.planning import (
    Clean,
    CreateIn,
    Drop,
    Evict,
    Fetch,
    Keep,
    MovementPlan,
    Policy,
    RunOnHost,
    Trace,
)
from tvm_pager.transfer.protocol import Lane

TIGHT = 88 * 512  # less than the step takes
ROOMY = 200 * 512


class Fixed(Policy):
    """Gives the plan that a function makes of the trace."""

    name = "fixed"

    def __init__(self, make: Callable[[Trace], Any] | None = None) -> None:
        self.make = make

    def plan(self, trace: Any, hardware: Any, limits: Any) -> Any:
        return self.make(trace) if self.make else None


def planned(policy: Policy, device: int = ROOMY, **options: Any) -> Rig:
    """A rig that has just begun its first planned iteration.

    In a roomy one only pages that nobody uses are off the device.
    """
    instances = iter([policy])
    rig = Rig(lambda: next(instances, None) or type(policy)(), device=device, **options)
    rig.weights(7)
    rig.iterate(training())
    rig.pager.evict_all()
    for _ in range(3):
        rig.iterate(training())
    assert rig.pager.iterations.follower is not None
    return rig


def plan_of(*actions: Any, absent: tuple[int, ...] = ()) -> MovementPlan:
    return MovementPlan(actions, frozenset(absent))


def weight(trace: Trace, layer: int) -> int:
    """The number of a layer's weight, which is named first in its forward operation."""
    return trace.ops[2 + layer].reads[0]


# --- whole plans ---


def test_a_planned_iteration_has_no_faults_where_all_is_foreseen() -> None:
    policy = TinyPlanner()
    rig = planned(policy, TIGHT, max_delay=0)
    for _ in range(6):
        rig.iterate(training())
    assert len(policy.reports) >= 6
    assert all(report.is_complete for report in policy.reports)
    assert not any(report.num_faults for report in policy.reports[2:])
    assert len(policy.plans) == 1
    trace = rig.pager.iterations.latest
    assert trace is not None
    assert max(occupancy(trace)) > TIGHT
    rig.end()


def test_a_plan_moves_less_than_demand() -> None:
    moved = []
    for rig in (planned(TinyPlanner(), 56 * 512), Rig(device=56 * 512)):
        if not moved:
            rig.iterate(training())
        else:
            rig.weights(7)
        for _ in range(3):
            rig.iterate(training())
        before = rig.backend.bytes_by_lane.copy()
        for _ in range(4):
            rig.iterate(training())
        moved.append(sum((rig.backend.bytes_by_lane - before).values()))
        rig.end()
    assert moved[0] < moved[1]


def test_a_plan_is_made_anew_when_the_budget_changes() -> None:
    policy = TinyPlanner()
    rig = planned(policy, TIGHT)
    rig.iterate(training())
    with rig.pager.lock:
        rig.pager.budgets.set_device(TIGHT - 6 * 512)
    for _ in range(3):
        rig.iterate(training())
    assert len(policy.plans) == 2
    assert rig.peak_bytes <= TIGHT
    rig.end()


def test_feedback_replaces_the_plan() -> None:
    class Changing(Fixed):
        def feedback(self, report: Any) -> Any:
            return plan_of(Evict(weight(report.trace, 1), 9, 9))

    rig = planned(Changing(lambda trace: plan_of(Evict(weight(trace, 0), 4, 4))))
    rig.iterate(training())
    for index, op in enumerate(training()):
        if index == 10:
            assert rig.pages["w0"].is_on_device
            assert not rig.pages["w1"].is_on_device
        rig.run(op)
    rig.boundary()
    rig.end()


# --- single actions ---


@pytest.mark.parametrize("moment", [0, 5])
def test_what_is_away_since_an_earlier_iteration_is_no_action_that_lapsed(moment: int) -> None:
    def leave(trace: Trace) -> MovementPlan:
        used = {number for op in trace.ops for number in (*op.reads, *op.creates)}
        unused = [n for n, page in enumerate(trace.pages) if n not in used and page.died is None]
        assert unused
        return plan_of(*(Evict(number, moment, moment) for number in unused))

    rig = planned(Fixed(leave))
    assert not rig.pages["w6"].is_on_device
    rig.iterate(training())
    assert bool(rig.pager.iterations.runner.reasons) == (moment > 0)
    rig.end()


@pytest.mark.parametrize("in_order", [False, True])
def test_an_eviction_writes_back_from_its_moment_and_is_over_at_its_deadline(
    in_order: bool,
) -> None:
    policy = Fixed(lambda trace: plan_of(Evict(weight(trace, 0), 4, 7)))
    rig = planned(policy, in_order=in_order, max_delay=500)
    page = rig.pages["w0"]
    for index, op in enumerate(training()):
        rig.run(op)
        if index in (4, 5, 6):
            assert page.state is PageState.WRITING_BACK
        assert page.is_on_device == (index < 7 or index >= 14), index
    rig.end()


def test_a_clean_page_goes_at_the_earliest_moment() -> None:
    policy = Fixed(
        lambda trace: plan_of(Clean(weight(trace, 0), 3, 5), Evict(weight(trace, 0), 9, 12))
    )
    rig = planned(policy, max_delay=0)
    for index, op in enumerate(training()):
        rig.run(op)
        if 3 <= index < 9:
            assert rig.pages["w0"].is_clean
            assert rig.pages["w0"].is_on_device
        if index == 9:
            assert not rig.pages["w0"].is_on_device
    rig.end()


def test_memory_is_given_up_before_the_deadline_when_the_copy_is_over() -> None:
    policy = Fixed(lambda trace: plan_of(Evict(weight(trace, 0), 3, 12)))
    rig = planned(policy, max_delay=0)
    for index, op in enumerate(training()):
        rig.run(op)
        if index == 8:
            assert not rig.pages["w0"].is_on_device
    rig.end()


def test_a_fetch_begins_at_its_moment_and_its_operation_finds_the_page() -> None:
    def plan(trace: Trace) -> MovementPlan:
        w0 = weight(trace, 0)
        need = [i for i, op in enumerate(trace.ops) if w0 in op.reads][1]
        return plan_of(Evict(w0, 4, 5), Fetch(w0, need - 3, need))

    policy = Fixed(plan)
    rig = planned(policy, max_delay=0)
    states = []
    for op in training():
        states.append(rig.pages["w0"].is_on_device)
        rig.run(op)
    assert states == [True] * 6 + [False] * 6 + [True] * (len(states) - 12)
    rig.boundary()
    assert rig.pager.iterations.outcomes.num_faults == 0
    rig.end()


def test_a_fetch_never_takes_what_an_operation_before_its_deadline_creates() -> None:
    # The step's peak is before the fetch's deadline: at its moment its bytes are free all the same.
    program = [
        Op("small", ("w0",), (), {"a": 512}),
        Op("next", ("a",)),
        *[Op(f"wait{i}", ("a",)) for i in range(3)],
        Op("large", ("a",), (), {"b": 20 * 512}),
        Op("last", ("b",), (), {}, ("b",)),
        Op("need", ("w5", "a"), (), {}, ("a",)),
    ]
    policy = Fixed(lambda trace: plan_of(Fetch(trace.ops[7].reads[0], 1, 7), absent=absent(trace)))

    def absent(trace: Trace) -> tuple[int, ...]:
        return (trace.ops[7].reads[0],)

    instances = iter([policy])
    rig = Rig(lambda: next(instances, None) or Fixed(), device=29 * 512, max_delay=0)
    rig.weights(2)
    for name in ("w5",):
        with rig.pager.lock:
            rig.pager.admit([], 6 * 512, "create")
        rig.create(name, 3000)
    for _ in range(4):
        rig.iterate(program)
    before = rig.pager.mover.num_evicted
    assert rig.pager.iterations.is_planned
    for index, op in enumerate(program):
        rig.run(op)
        if index < 6:
            assert not rig.pages["w5"].is_on_device
    assert rig.pager.mover.num_evicted - before <= 1
    rig.end()


def test_a_page_may_be_brought_from_nvme_to_the_slab_only() -> None:
    def plan(trace: Trace) -> MovementPlan:
        w0 = weight(trace, 0)
        return plan_of(Evict(w0, 4, 5, Tier.NVME), Fetch(w0, 8, 14, Tier.HOST))

    rig = planned(Fixed(plan), max_delay=0)
    tiers = []
    for op in training():
        rig.run(op)
        tiers.append(rig.pager.table.tier_of(rig.pages["w0"]))
    assert tiers[5:8] == [Tier.NVME] * 3
    assert Tier.HOST in tiers[8:13]
    assert rig.backend.num_submitted[Lane.N2H] == 1
    rig.end()


def test_what_is_kept_leaves_last() -> None:
    def plan(trace: Trace) -> MovementPlan:
        return plan_of(
            *[Keep(weight(trace, i), 0, len(trace.ops)) for i in range(3)],
            Evict(weight(trace, 5), 3, 3),
        )

    rig = planned(Fixed(plan), max_delay=0)
    for op in training()[:10]:
        rig.run(op)
    with rig.pager.lock:
        rig.pager.drain()  # else the dead give some of the room
        rig.pager.make_room(rig.pager.free_bytes + 10 * 6 * 512, "test")
    assert all(rig.pages[f"w{i}"].is_on_device for i in range(3))
    rig.end()


# --- what comes otherwise ---


def test_what_was_fetched_for_nothing_is_released() -> None:
    def plan(trace: Trace) -> MovementPlan:
        w4 = weight(trace, 4)
        return plan_of(Fetch(w4, 2, 6), absent=(w4,))

    rig = planned(Fixed(plan), max_delay=0)
    rig.iterate(training())  # from now on w4 is absent at the beginning
    rig.pager.mover.evict(rig.pages["w4"])
    for op in training()[:4]:
        rig.run(op)
    assert rig.pages["w4"].is_on_device
    rig.run(Op("end", (), (), {}, ("a0", "a1", "a2")))
    rig.boundary()
    assert not rig.pages["w4"].is_on_device
    rig.end()


def test_a_fetch_that_has_not_begun_is_called_off_when_the_trace_is_left() -> None:
    def plan(trace: Trace) -> MovementPlan:
        w4 = weight(trace, 4)
        return plan_of(Fetch(w4, 2, 6), absent=(w4,))

    rig = planned(Fixed(plan), max_delay=2000)
    rig.pager.mover.evict(rig.pages["w4"])
    for op in training()[:4]:
        rig.run(op)
    assert rig.pages["w4"].state is PageState.FETCHING
    for i in range(600):
        rig.run(Op(f"other{i}", ("w0",)))
    assert rig.pager.iterations.follower is None
    for ticket in rig.backend.pending:
        ticket.wait()
    rig.pager.flight.reap()
    with rig.pager.lock:
        rig.pager.make_room(rig.pager.free_bytes + 512, "test")
    assert not rig.pages["w4"].is_on_device
    rig.end()


def test_what_is_not_executed_yet_is_reported_once() -> None:
    rig = planned(
        Fixed(
            lambda trace: plan_of(
                Drop(weight(trace, 0), 3, 5),
                Drop(weight(trace, 1), 3, 5),
                RunOnHost(4, 3, 5),
                CreateIn(trace.ops[3].creates[0], Tier.HOST, 3, 5),
            )
        )
    )
    for _ in range(3):
        rig.iterate(training())
    told = [text for text in rig.notices if "not executed" in text]
    assert len(told) == 3
    rig.end()


@pytest.mark.parametrize(
    "action",
    [
        Evict(10**6, 1, 2),
        Evict(-1, 1, 2),
        Evict(0, 5, 2),
        Evict(0, 0, 10**6),
        Evict(0, 1, 2, Tier.DEVICE),
        Fetch(0, 1, 2, Tier.NVME),
        Evict("0", 1, 2),  # type: ignore[arg-type]
        Evict(0, 1.5, 2),  # type: ignore[arg-type]
        "evict everything",
        None,
    ],
)
def test_illegal_actions_raise_if_strict_and_are_left_out_if_not(action: Any) -> None:
    with pytest.raises(PolicyError, match="illegal"):
        planned(Fixed(lambda trace: MovementPlan((action,))))
    rig = planned(Fixed(lambda trace: MovementPlan((action,))), strict=False)
    for _ in range(3):
        rig.iterate(training())
    assert len([text for text in rig.notices if "illegal" in text]) == 1
    rig.end()


@pytest.mark.parametrize("plan", ["a plan", 3, MovementPlan(None), MovementPlan((), None)])  # type: ignore[arg-type]
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(PolicyError):
        planned(Fixed(lambda trace: plan))
    rig = planned(Fixed(lambda trace: plan), strict=False)
    rig.iterate(training())
    assert not rig.pager.iterations.is_planned
    assert rig.pager.iterations.planner.num_errors
    rig.end()


def test_a_page_that_has_died_unnoticed_is_not_fetched() -> None:
    """Scenario: the storage dies while a plan is being executed; nobody has drained since."""
    rig = planned(Fixed(lambda trace: plan_of(Fetch(weight(trace, 4), 2, 6))))
    page = rig.pages["w4"]
    rig.pager.mover.evict(page)
    rig.pager.flight.settle_all()
    rig.free("w4")
    assert page.memory() is None
    assert not rig.pager.prefetcher.begin(page)
    assert page.state is PageState.EVICTED
    rig.end()


def test_a_fetch_that_was_called_off_is_not_known_to_the_policy() -> None:
    """Scenario: the journal is replayed while the page is on its way, and it counts as there."""
    rig = planned(Fixed(), max_delay=500)
    page = rig.pages["w4"]
    rig.pager.mover.evict(page)
    rig.pager.flight.settle_all()
    rig.pager.device_policy.used(page)
    assert rig.pager.prefetcher.begin(page)
    rig.pager.device_policy.replay()
    assert rig.pager.flight.cancel(page)
    rig.pager.flight.settle(page)
    rig.pager.check_invariants()
    rig.end()
