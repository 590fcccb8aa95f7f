"""SlideFormer by hand: the window of layers, inputs to DRAM, the rest made again."""

from __future__ import annotations

from tests.unit.small_traces import ENDLESS, training
from tvm_pager.planning import Drop, Evict, Fetch, Limits, RunOnHost, Tier
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.policies.slideformer import SlideFormer
from tvm_pager.testing.machines import example_profile

MIB = 2048  # units of 512 bytes
LAYERS = 6
PROGRAM = training(LAYERS, weight=4 * MIB, activation=MIB, ns=1_000_000)
TRACE = PROGRAM.build()
INDEX = TraceIndex(TRACE)
PLAN = SlideFormer().plan(TRACE, example_profile(), Limits(INDEX.peak_bytes // 2, ENDLESS))
NUMBERS = PROGRAM.numbers
FORWARD = [1 + 2 * i for i in range(LAYERS)]  # where each layer is entered
BACKWARD = [2 * LAYERS + 2 + 2 * (LAYERS - 1 - i) for i in range(LAYERS)]


def fetches(name: str) -> list[Fetch]:
    page = NUMBERS[name]
    return [a for a in PLAN.actions if isinstance(a, Fetch) and a.page == page]


def test_a_layer_comes_when_the_one_before_it_is_entered() -> None:
    for i in range(1, LAYERS - 1):
        forward, backward, _ = sorted(fetches(f"w{i}"), key=lambda fetch: fetch.deadline)
        assert (forward.earliest, forward.deadline) == (FORWARD[i - 1], FORWARD[i])
        assert (backward.earliest, backward.deadline) == (BACKWARD[i + 1], BACKWARD[i])


def test_two_layers_are_on_the_device_at_a_time() -> None:
    weights = {NUMBERS[f"w{i}"] for i in range(LAYERS)}
    here = weights - PLAN.absent
    for op in range(len(TRACE.ops) - LAYERS):
        for action in PLAN.actions:
            if isinstance(action, Evict) and action.deadline == op:
                here.discard(action.page)
            elif isinstance(action, Fetch) and action.earliest == op:
                here.add(action.page)
        assert len(here & weights) <= 2, op


def test_inputs_go_to_host_memory_and_what_lies_inside_is_made_again() -> None:
    dropped = {action.page for action in PLAN.actions if isinstance(action, Drop)}
    evicted = {action.page: action.to for action in PLAN.actions if isinstance(action, Evict)}
    # The last layer's are used again at once.
    for i in range(LAYERS - 1):
        assert NUMBERS[f"b{i}"] in dropped
        assert NUMBERS[f"a{i}"] not in dropped
        assert evicted[NUMBERS[f"a{i}"]] is Tier.HOST


def test_gradients_leave_when_they_are_made_and_the_host_updates() -> None:
    leaves = {a.page: a.earliest for a in PLAN.actions if isinstance(a, Evict)}
    for i in range(1, LAYERS):  # the first layer's is used at once
        gradient = NUMBERS[f"g{i}"]
        assert leaves[gradient] == BACKWARD[i] + 2
    updates = [action for action in PLAN.actions if isinstance(action, RunOnHost)]
    assert len(updates) == LAYERS
    for action in updates:
        layer = action.op - (len(TRACE.ops) - LAYERS)
        assert action.earliest == BACKWARD[layer] + 2
