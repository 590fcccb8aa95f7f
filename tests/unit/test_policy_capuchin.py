"""Capuchin by hand: hidden swaps first, else the cheaper of two evils, and feedback."""

from __future__ import annotations

import pytest

from tests.unit.small_traces import Program, training
from tvm_pager.planning import Drop, Evict, Fetch, IterationReport, Limits, MovementPlan, Trace
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.policies.capuchin import Capuchin
from tvm_pager.testing.machines import example_profile

HARDWARE = example_profile()


def limits(trace: Trace, fewer_units: int) -> Limits:
    return Limits(TraceIndex(trace).peak_bytes - fewer_units * 512, 1 << 40)


def pages(program: Program, plan: MovementPlan, kind: type[Evict | Drop]) -> set[str]:
    names = {number: name for name, number in program.numbers.items()}
    return {names[action.page] for action in plan.actions if isinstance(action, kind)}


def fetches(plan: MovementPlan) -> dict[int, int]:
    return {action.page: action.earliest for action in plan.actions if isinstance(action, Fetch)}


def report(trace: Trace, device: Limits, late: tuple[int, ...]) -> IterationReport:
    return IterationReport(trace, device, True, 1, 1, len(late), late_fetches=late)


def test_swaps_that_are_hidden_go_by_free_time() -> None:
    program = training(4, activation=16, ns=10_000_000)
    trace = program.build()
    plan = Capuchin().plan(trace, HARDWARE, limits(trace, 32))
    # The first layer's are used again last, so they have the most free time.
    assert pages(program, plan, Evict) == {"a0", "b0"}
    assert not pages(program, plan, Drop)


@pytest.mark.parametrize(("ns", "is_dropped"), [(10_000, True), (100_000, False)])
def test_what_cannot_be_hidden_is_recomputed_if_that_costs_less(ns: int, is_dropped: bool) -> None:
    # A page takes 0.2 ms each way, and `ns` to be computed again.
    program = training(4, activation=20_000, ns=ns)
    trace = program.build()
    plan = Capuchin().plan(trace, HARDWARE, limits(trace, 40_000))
    dropped = pages(program, plan, Drop)
    assert bool(dropped) is is_dropped
    assert plan.prediction is not None
    # What is computed again comes of what is kept, or of what is computed again as well.
    assert plan.prediction.replay_ns == (3 * ns if is_dropped else 0)


def test_a_late_prefetch_begins_earlier_from_then_on_and_others_do_not() -> None:
    program = training(6, activation=20_000, ns=300_000)
    trace = program.build()
    device = limits(trace, 100_000)
    policy = Capuchin()
    first = fetches(policy.plan(trace, HARDWARE, device))
    late = program.numbers["b0"]
    again = policy.feedback(report(trace, device, (late,)))
    assert again is not None
    second = fetches(again)
    assert second[late] < first[late]
    assert {page for page in first if first[page] != second[page]} == {late}
    assert policy.feedback(report(trace, device, ())) is None
    plans = [policy.feedback(report(trace, device, (late,))) for _ in range(60)]
    begins = [fetches(plan)[late] for plan in plans if plan is not None]
    assert begins == sorted(set(begins), reverse=True)  # no plan that changes nothing


def test_a_prefetch_that_is_late_for_want_of_room_makes_no_new_plan_for_ever() -> None:
    program = training(6, activation=20_000, ns=10_000)
    trace = program.build()
    device = limits(trace, 100_000)
    policy = Capuchin()
    late = tuple(fetches(policy.plan(trace, HARDWARE, device)))
    plans = [policy.feedback(report(trace, device, late)) for _ in range(60)]
    begins = [fetches(plan) for plan in plans if plan is not None]
    assert any(begins[-1][page] < begins[0][page] for page in late)  # again and again, until then
    assert plans[20:] == [None] * 40  # 20 times 5 % are a whole swap time


def test_reports_about_other_traces_change_nothing() -> None:
    program = training(6, activation=20_000, ns=300_000)
    trace, other = program.build(), training(5).build()
    device = limits(trace, 100_000)
    policy = Capuchin()
    assert policy.feedback(report(trace, device, (0,))) is None
    policy.plan(trace, HARDWARE, device)
    assert policy.feedback(report(other, device, (program.numbers["b0"],))) is None
