"""ZeRO-Infinity by hand: order of need, the prefetch bucket, what stays, where states lie."""

from __future__ import annotations

from tests.unit.small_traces import ENDLESS, Program, training
from tvm_pager.planning import Evict, Fetch, Limits, MovementPlan, PageKind, RunOnHost, Tier, Trace
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.policies.zero_infinity import ZeroInfinity
from tvm_pager.testing.machines import example_profile

MIB = 2048  # units of 512 bytes
LAYERS = 6


def planned(trace: Trace, nvme_bytes: int = 0) -> MovementPlan:
    device_bytes = TraceIndex(trace).peak_bytes * 3 // 4
    limits = Limits(device_bytes, ENDLESS, nvme_bytes)
    return ZeroInfinity().plan(trace, example_profile(), limits)


def model(weight_mib: int = 40) -> tuple[Program, Trace]:
    program = training(LAYERS, weight=weight_mib * MIB, activation=1, ns=10_000_000)
    return program, program.build()


def test_weights_come_in_the_order_of_need_with_a_bucket_of_them_ahead() -> None:
    program, trace = model()
    weights = {program.numbers[f"w{i}"]: i for i in range(LAYERS)}
    forward_end = 1 + 2 * LAYERS
    coming = [
        action
        for action in planned(trace).actions
        if isinstance(action, Fetch) and action.page in weights and action.deadline < forward_end
    ]
    assert [weights[action.page] for action in coming] == list(range(LAYERS))
    needs = [1 + 2 * i for i in range(LAYERS)]
    assert [action.deadline for action in coming] == needs
    # Two weights of 40 MiB fit in 100 MB: one waits while the one before it is used.
    for i, action in enumerate(coming[2:], start=2):
        assert needs[i - 2] < action.earliest <= needs[i - 1]


def test_only_weights_gradients_and_states_move() -> None:
    _, trace = model()
    kinds = {trace.pages[a.page].kind for a in planned(trace).actions if isinstance(a, Evict)}
    assert kinds == {PageKind.PARAM, PageKind.GRAD, PageKind.OPT_STATE}


def test_small_weights_stay() -> None:
    large, small = (training(2, weight=w, activation=1000 * MIB, ns=1000) for w in (400, 300))
    assert planned(large.build()).actions != ()
    assert planned(small.build()).actions == ()  # below 200 KB


def test_states_lie_on_nvme_and_every_update_runs_on_the_host() -> None:
    program, trace = model()
    plan = planned(trace, nvme_bytes=ENDLESS)
    tiers = {
        (trace.pages[action.page].kind, action.to)
        for action in plan.actions
        if isinstance(action, Evict)
    }
    assert (PageKind.OPT_STATE, Tier.NVME) in tiers
    assert {to for kind, to in tiers if kind is not PageKind.OPT_STATE} == {Tier.HOST}
    updates = {action.op for action in plan.actions if isinstance(action, RunOnHost)}
    assert updates == set(range(len(trace.ops) - LAYERS, len(trace.ops)))
    assert plan.prediction is not None
    num_params = LAYERS * 40 * MIB * 512 / 4
    assert plan.prediction.host_ns == int(num_params / 4e9 * 1e9)
    assert {program.numbers[f"m{i}"] for i in range(LAYERS)} <= plan.absent
