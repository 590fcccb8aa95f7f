"""FlashNeuron by hand: creation order, until the rest fits; NVMe first; nothing but activations."""

from __future__ import annotations

from tests.unit.small_traces import Program, training
from tvm_pager.planning import Evict, Fetch, Limits, MovementPlan, Tier
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.policies.flashneuron import FlashNeuron
from tvm_pager.testing.machines import example_profile

HARDWARE = example_profile()


def planned(program: Program, fewer_units: int, nvme_bytes: int = 0) -> MovementPlan:
    """With a budget of so many units of 512 bytes below what the whole iteration takes."""
    trace = program.build()
    device_bytes = TraceIndex(trace).peak_bytes - fewer_units * 512
    return FlashNeuron().plan(trace, HARDWARE, Limits(device_bytes, 1 << 40, nvme_bytes))


def names_of(program: Program, plan: MovementPlan) -> list[str]:
    names = {number: name for name, number in program.numbers.items()}
    moved = {action.page for action in plan.actions if isinstance(action, Evict)}
    return sorted(names[page] for page in moved)


def test_activations_leave_in_the_order_of_creation_until_the_rest_fits() -> None:
    program = training(4, activation=16, ns=10_000_000)
    assert names_of(program, planned(program, 0)) == []
    assert names_of(program, planned(program, 16)) == ["a0"]
    assert names_of(program, planned(program, 33)) == ["a0", "a1", "b0"]


def test_each_comes_back_in_backward_after_it_left_in_forward() -> None:
    program = training(4, activation=16, ns=10_000_000)
    plan = planned(program, 48)
    first_backward = 9
    for action in plan.actions:
        if isinstance(action, Fetch):
            assert first_backward <= action.earliest <= action.deadline
        else:
            assert isinstance(action, Evict)
            assert action.earliest < first_backward
    assert not plan.absent


def test_nvme_is_taken_where_there_is_one_and_host_memory_where_not() -> None:
    program = training(4, ns=10_000_000)
    for nvme_bytes, tier in ((0, Tier.HOST), (1 << 40, Tier.NVME)):
        plan = planned(program, 40, nvme_bytes)
        assert {action.to for action in plan.actions if isinstance(action, Evict)} == {tier}
