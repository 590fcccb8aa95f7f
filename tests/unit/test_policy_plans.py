"""What every planning policy owes, on random traces: it never raises, is deterministic, adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.small_traces import training
from tvm_pager.planning import (
    Drop,
    Evict,
    Limits,
    MovementPlan,
    RunOnHost,
    Tier,
    Trace,
    load_policy,
)
from tvm_pager.planning.cost.cost_model import evaluate
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.planning.validate import check
from tvm_pager.testing.machines import example_profile
from tvm_pager.testing.strategies import device_budgets, page_bytes, traces

POLICIES = [
    "capuchin",
    "dtr",
    "flashneuron",
    "slideformer",
    "teraio",
    "traffic_aware",
    "zero_infinity",
]
HARDWARE = example_profile()
SIZES = page_bytes() | st.sampled_from([1 << 20, 200 << 20])


def planned(name: str, trace: Trace, limits: Limits) -> MovementPlan:
    plan = load_policy(name)().plan(trace, HARDWARE, limits)
    assert plan is not None
    return plan


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_plans_of_any_trace_are_legal_and_repeat(name: str, data: st.DataObject) -> None:
    trace = data.draw(traces(max_ops=12, sizes=SIZES, is_steady=data.draw(st.booleans())))
    device_bytes = data.draw(device_budgets(trace) | st.integers(0, 4096))
    host_bytes, nvme_bytes = data.draw(st.sampled_from([(1 << 30, 0), (2048, 1 << 30), (0, 0)]))
    limits = Limits(device_bytes, host_bytes, nvme_bytes)
    plan = planned(name, trace, limits)
    assert plan == planned(name, trace, limits)
    assert misdeeds(plan, trace, limits) == []


TRAININGS = st.builds(
    lambda layers, weight, activation, ns: training(
        layers, weight=weight, activation=activation, ns=ns
    ).build(),
    st.integers(1, 6),
    st.sampled_from((1, 8, 400_000)),
    st.sampled_from((1, 16, 400_000)),
    st.sampled_from((0, 1000, 10_000_000)),
)


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_plans_of_trainings_keep_to_the_budget_or_say_that_they_do_not(
    name: str, data: st.DataObject
) -> None:
    trace = data.draw(TRAININGS)
    index = TraceIndex(trace)
    device_bytes = data.draw(st.integers(int(index.named_bytes.max()), index.peak_bytes))
    limits = Limits(device_bytes, 1 << 40, data.draw(st.sampled_from([0, 1 << 40])))
    plan = planned(name, trace, limits)
    assert misdeeds(plan, trace, limits) == []
    assert plan.prediction is not None
    expected = plan.prediction.peak_bytes[Tier.DEVICE]
    moved = {action.page for action in plan.actions if isinstance(action, Evict)}
    assert moved or expected == index.peak_bytes
    if expected <= device_bytes:
        movement = without(plan, RunOnHost, Drop)
        assert check(plan, trace, limits) == check(movement, trace, limits) == []
        assert evaluate(trace, movement, HARDWARE, limits, index).num_faults == 0


def without(plan: MovementPlan, *kinds: type) -> MovementPlan:
    """What a pager does that carries out movement only."""
    return replace(plan, actions=tuple(a for a in plan.actions if not isinstance(a, kinds)))


def misdeeds(plan: MovementPlan, trace: Trace, limits: Limits) -> list[str]:
    """What is wrong with a plan, budgets apart, whatever of it a pager carries out."""
    found = [*check(plan, trace, limits), *check(without(plan, RunOnHost, Drop), trace, limits)]
    return [problem for problem in found if not problem.endswith(" B")]


@pytest.mark.parametrize("name", POLICIES)
def test_what_fits_is_left_alone(name: str) -> None:
    plan = planned(name, training().build(), Limits(1 << 40, 1 << 40))
    assert plan.actions == ()
    assert not plan.absent


@pytest.mark.parametrize("name", ["slideformer", "teraio", "traffic_aware"])
def test_a_budget_of_two_layers_is_kept(name: str) -> None:
    trace = training(8).build()
    device_bytes = 160 * 512
    prediction = planned(name, trace, Limits(device_bytes, 1 << 40)).prediction
    assert prediction is not None
    assert prediction.peak_bytes[Tier.DEVICE] <= device_bytes


@pytest.mark.parametrize("name", ["capuchin", "dtr", "flashneuron", "zero_infinity"])
def test_a_plan_that_cannot_fit_says_so(name: str) -> None:
    trace = training(8).build()
    device_bytes = 100 * 512
    prediction = planned(name, trace, Limits(device_bytes, 1 << 40)).prediction
    assert prediction is not None
    assert prediction.peak_bytes[Tier.DEVICE] > device_bytes
