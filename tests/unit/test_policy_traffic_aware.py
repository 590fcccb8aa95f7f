"""Ratel and Fuyou by hand: how much is swapped as links, disk and host memory get scarcer."""

from __future__ import annotations

from collections import Counter

from tests.unit.small_traces import ENDLESS, training
from tvm_pager.planning import Drop, Evict, Limits, MovementPlan, PageKind, Tier, Trace
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.policies.traffic_aware import TrafficAware
from tvm_pager.testing.machines import example_profile

MIB = 2048  # units of 512 bytes
LAYERS = 8


def model(ns: int = 1_000_000) -> Trace:
    """Activations of 16 MiB, two per layer; an operation takes 1 ms forward and 2 ms backward."""
    return training(LAYERS, weight=MIB, activation=16 * MIB, ns=ns).build()


def planned(
    trace: Trace, *, link_gb_per_s: float = 50.0, host_bytes: int = ENDLESS, nvme_bytes: int = 0
) -> MovementPlan:
    hardware = example_profile(link_gb_per_s=link_gb_per_s, duplex_gb_per_s=link_gb_per_s)
    device_bytes = TraceIndex(trace).peak_bytes // 3
    return TrafficAware().plan(trace, hardware, Limits(device_bytes, host_bytes, nvme_bytes))


def num_dropped(plan: MovementPlan) -> int:
    return sum(isinstance(action, Drop) for action in plan.actions)


def test_the_slower_the_link_the_more_is_computed_again() -> None:
    trace = model()
    dropped = [num_dropped(planned(trace, link_gb_per_s=rate)) for rate in (50.0, 8.0, 1.0)]
    assert dropped[0] == 0
    assert dropped == sorted(set(dropped))


def test_swapped_activations_go_to_nvme_once_host_memory_is_full() -> None:
    trace = model(ns=100_000_000)  # there is time for everything
    states_bytes = (
        sum(
            page.nbytes for page in trace.pages if page.kind in (PageKind.PARAM, PageKind.OPT_STATE)
        )
        + LAYERS * MIB * 512
    )
    plan = planned(trace, host_bytes=states_bytes + 5 * 16 * MIB * 512, nvme_bytes=ENDLESS)
    tiers = Counter(
        action.to
        for action in plan.actions
        if isinstance(action, Evict) and trace.pages[action.page].kind is PageKind.ACTIVATION
    )
    assert tiers[Tier.HOST] == 5
    assert tiers[Tier.NVME] > 5
    assert num_dropped(plan) == 0


def test_the_prediction_is_that_of_the_iteration_model() -> None:
    trace = model(ns=100_000_000)
    prediction = planned(trace).prediction
    assert prediction is not None
    forward_s, backward_s = (1 + 2 * LAYERS) * 0.1, (1 + 4 * LAYERS) * 0.1
    # All is hidden but the last of the eight updates: 1 MiB in fp32 each.
    update_s = MIB * 512 / 4 / 4e9
    assert prediction.step_ns == int((forward_s + backward_s - 0.1 + 0.1 + update_s) * 1e9)
    assert prediction.lane_bytes["h2d"] > prediction.lane_bytes["d2h"]
