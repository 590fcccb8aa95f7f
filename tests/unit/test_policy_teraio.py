"""TERAIO by hand: benefit over cost, lanes that are taken already, NVMe first, what is urgent."""

from __future__ import annotations

from tests.unit.small_traces import ENDLESS, Program
from tvm_pager.planning import Evict, Fetch, Limits, MovementPlan, PageKind, Tier, Trace
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.policies.teraio import TeraIO
from tvm_pager.testing.machines import example_profile

ACT = PageKind.ACTIVATION
MIB = 2048  # units of 512 bytes
MS = 1_000_000


def waiting(*sizes: int, num_ops: int = 10, ns: int = 10 * MS) -> tuple[Program, Trace]:
    """Pages of so many MiB each, made one by one, that wait during operations with a large page.

    They are read in the same order at the end.
    """
    program = Program()
    program.page("w", 1)
    for i, size in enumerate(sizes):
        program.op("w", {f"p{i}": (size * MIB, ACT)}, ns=ns)
    program.op("w", {"large": (1000 * MIB, ACT)}, ns=ns)
    for _ in range(num_ops):
        program.op("large", ns=ns)
    program.free("large")
    for i in range(len(sizes)):
        program.op(f"p{i}", ns=ns)
        program.free(f"p{i}")
    return program, program.build()


def planned(trace: Trace, fewer_mib: int, limits: Limits | None = None) -> MovementPlan:
    device_bytes = TraceIndex(trace).peak_bytes - fewer_mib * MIB * 512
    limits = limits or Limits(0, ENDLESS)
    limits = Limits(device_bytes, limits.host_bytes, limits.nvme_bytes)
    return TeraIO().plan(trace, example_profile(), limits)


def evicted(program: Program, plan: MovementPlan) -> dict[str, Tier | None]:
    names = {number: name for name, number in program.numbers.items()}
    return {names[action.page]: action.to for action in plan.actions if isinstance(action, Evict)}


def test_one_that_spares_all_of_the_excess_for_little_is_taken() -> None:
    # 10 MiB are too much: the page of 10 MiB spares as much as one of 100 and costs a tenth.
    program, trace = waiting(100, 10, 100)
    assert evicted(program, planned(trace, 10)) == {"p1": Tier.HOST}


def test_nvme_is_taken_until_its_lane_has_no_time_left() -> None:
    # The disk moves 100 MiB in 70 ms while both directions are busy; a page waits 200 ms.
    program, trace = waiting(100, 100, 100, num_ops=15)
    everywhere = evicted(program, planned(trace, 300, Limits(0, ENDLESS, ENDLESS)))
    assert set(everywhere.values()) == {Tier.NVME, Tier.HOST}
    program, trace = waiting(100, 100, 100, num_ops=100)
    roomy = evicted(program, planned(trace, 300, Limits(0, ENDLESS, ENDLESS)))
    assert set(roomy.values()) == {Tier.NVME}


def test_nothing_goes_where_there_is_no_room() -> None:
    program, trace = waiting(100, 100, 100, num_ops=100)
    limits = Limits(0, 250 * MIB * 512, 0)
    tiers = list(evicted(program, planned(trace, 300, limits)).values())
    assert tiers.count(Tier.HOST) == 2


def test_what_the_next_operation_needs_goes_before_other_fetches() -> None:
    _, trace = waiting(100, 100, 100)
    plan = planned(trace, 300)
    fetches = [action for action in plan.actions if isinstance(action, Fetch)]
    assert len(fetches) == 3
    urgent = {fetch.priority for fetch in fetches if fetch.earliest == fetch.deadline}
    others = {fetch.priority for fetch in fetches if fetch.earliest < fetch.deadline}
    # The large page leaves only before the first of the three is read.
    assert urgent == {0}
    assert others == {1}
