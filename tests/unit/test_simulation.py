"""The simulator: hand-made traces with known times, and what holds for every trace and policy."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import make_hardware, make_trace
from tvm_pager.errors import BudgetError, CommitError
from tvm_pager.memory import Tier
from tvm_pager.paging import DemandPager
from tvm_pager.planning import (
    Evict,
    Eviction,
    Fetch,
    HardwareProfile,
    Limits,
    MovementPlan,
    PageKind,
    Policy,
    Trace,
    TraceOp,
    TracePage,
    View,
)
from tvm_pager.policies.lru import LRU
from tvm_pager.simulation.bounds import roofline
from tvm_pager.simulation.feeder import Feeder
from tvm_pager.simulation.program import Program
from tvm_pager.simulation.simulator import SimulationOptions, SimulationResult, simulate
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.virtual_backend import VirtualBackend

P = 512 * 1000  # a page: as many nanoseconds of the link
ENOUGH = 1 << 40
ALTERNATING = make_trace({"A": P, "B": P}, [("A", "", 100), ("B", "", 100)])


def run(trace: Trace, device: int, host: int = ENOUGH, nvme: int = 0) -> SimulationResult:
    """Copies cost the host nothing; an operation one nanosecond; LRU."""
    options = SimulationOptions(submit_ns=0)
    return simulate(trace, make_hardware(), Limits(device, host, nvme), options)


def test_where_everything_fits_a_step_takes_what_its_kernels_take() -> None:
    result = run(ALTERNATING, 2 * P)
    assert result.step_ns == 1 + 200  # the host waits for the device at the end of each iteration
    assert result.stall_ns == result.num_faults == sum(result.lane_bytes.values()) == 0
    assert result.peak_bytes[Tier.DEVICE] == 2 * P


def test_a_program_of_short_kernels_takes_what_its_launches_take() -> None:
    trace = make_trace({"A": P}, [("A", "", 10)] * 8, launch_ns=100)
    assert run(trace, P).step_ns == 8 * 100 + 10


@pytest.mark.parametrize("num_measured", [1, 3])
def test_who_does_not_wait_at_the_end_overlaps_one_iteration_with_the_next(
    num_measured: int,
) -> None:
    options = SimulationOptions(submit_ns=0, num_measured=num_measured, is_awaited=False)
    fits = simulate(ALTERNATING, make_hardware(), Limits(2 * P, ENOUGH), options)
    assert (fits.step_ns, fits.compute_ns) == (200, 200)
    short = make_trace({"A": P}, [("A", "", 10)] * 8, launch_ns=100)
    launched = simulate(short, make_hardware(), Limits(P, ENOUGH), options)
    assert (launched.step_ns, launched.compute_ns) == (8 * 100, 8 * 10)
    moving = simulate(ALTERNATING, make_hardware(), Limits(P, ENOUGH), options)
    assert moving.step_ns == 2 * (P + 100)
    assert moving.lane_bytes["h2d"] == 2 * P


def test_clean_pages_are_fetched_one_after_the_other() -> None:
    """Scenario: one page fits; each operation finds the other one there."""
    result = run(ALTERNATING, P)
    assert result.step_ns == 2 * (P + 100)
    assert result.stall_ns == 2 * P - 1  # while the first operation was not launched yet
    assert result.lane_bytes["h2d"] == 2 * P
    assert result.lane_bytes["d2h"] == 0
    assert (result.num_faults, result.num_evictions, result.num_clean_evictions) == (2, 2, 2)


def test_a_dirty_page_leaves_before_the_other_comes() -> None:
    trace = make_trace({"A": P, "B": P}, [("A!", "", 100), ("B", "", 100)])
    result = run(trace, P)
    assert result.step_ns == 3 * P + 200
    assert result.lane_bytes["d2h"] == P
    assert result.num_clean_evictions == 1


def test_both_directions_at_once_take_longer_and_less_than_one_after_the_other() -> None:
    """Scenario: two pages leave and two come, one at a time: the second leaves as the first comes.

    Out A; in C beside out B: half the speed; in D. Each operation has its own pages.
    """
    trace = make_trace(dict.fromkeys("ABCD", P), [("A! B!", "", 100), ("C! D!", "", 100)])
    result = run(trace, 2 * P)
    assert result.lane_bytes["d2h"] == result.lane_bytes["h2d"] == 4 * P
    assert 2 * (2 * P) < result.step_ns <= 2 * (4 * P + 100) + 1


def test_what_dies_is_never_written_down() -> None:
    trace = make_trace({"A": P, "x": P}, [("A", "x", 100), ("A x", "", 100)])
    assert sum(run(trace, 2 * P).lane_bytes.values()) == 0


def test_what_finds_no_room_in_dram_goes_to_the_disk_and_the_host_waits() -> None:
    """Scenario: the page space of the slab holds nothing, so a page takes its way to the disk."""
    trace = make_trace({"A": P, "B": P}, [("A!", "", 100), ("B", "", 100)])
    result = run(trace, P, host=0, nvme=1 << 30)
    assert result.lane_bytes["d2n"] == P
    assert result.lane_bytes["n2d"] == 2 * P
    disk = 3 * 4 * P  # a byte takes four nanoseconds, half of a staging buffer one more
    assert disk + 3 * P // 2 + 200 <= result.step_ns <= disk + 3 * P // 2 + 210
    assert 0 <= result.stall_ns - (disk + 3 * P // 2) <= 2  # launches that would have been hidden
    assert result.peak_bytes[Tier.NVME] >= 2 * P


def test_what_cannot_run_says_so_as_the_pager_does() -> None:
    with pytest.raises(BudgetError, match="test::op"):
        run(make_trace({"A": P, "B": P}, [("A B", "", 1)]), P)
    with pytest.raises(CommitError):
        run(ALTERNATING, P, host=0)


def test_policies_plan_with_what_they_are_told_not_with_what_it_takes() -> None:
    """Scenario: operations take twice as long as the trace says, copies half as long as planned."""
    told: list[tuple[int, float]] = []

    class Listening(Policy):
        name = "listening"

        def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> None:
            told.append((trace.compute_ns, hardware.h2d.bytes_per_s))

    slow = make_hardware(link_bytes_per_ns=0.5)
    options = SimulationOptions(Listening, submit_ns=0, compute_factor=2.0, planned_hardware=slow)
    result = simulate(ALTERNATING, make_hardware(), Limits(P, ENOUGH), options)
    assert result.step_ns == 2 * (P + 200)
    assert result.compute_ns == 400
    assert set(told) == {(200, slow.h2d.bytes_per_s)}


def test_pages_from_outside_come_anew_in_each_iteration() -> None:
    """Scenario: an input batch is there before the first operation, and dies in the second."""
    ops = (TraceOp("use", (0,), compute_ns=5), TraceOp("other", (1,), compute_ns=5))
    batch = TracePage(P, PageKind.OTHER, died=1)
    trace = Trace(ops, (batch, TracePage(P, PageKind.PARAM, becomes=1)), launch_ns=1)
    result = run(trace, 2 * P)
    assert result.step_ns == 11
    assert result.peak_bytes[Tier.DEVICE] == 2 * P


def test_workspace_is_room_that_no_page_may_have() -> None:
    ops = (TraceOp("big", (0,), compute_ns=5, workspace_bytes=P), TraceOp("b", (1,), compute_ns=5))
    pages = tuple(TracePage(P, PageKind.PARAM, becomes=number) for number in range(2))
    trace = Trace(ops, pages, launch_ns=1)
    assert run(trace, 3 * P).num_faults == 0
    short = run(trace, 2 * P)
    assert short.num_faults == 1  # b comes back after each time that the workspace needed its room
    assert short.peak_bytes[Tier.DEVICE] == 2 * P


class Turning(Policy):
    """Three pages in the room of two: the next one comes while the present one is used."""

    name = "turning"

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        actions: list[Evict | Fetch] = []
        for moment in range(3):
            before, after = (moment - 1) % 3, (moment + 1) % 3
            actions.append(Evict(before, moment, moment))
            actions.append(Fetch(after, moment, moment + 1))
        return MovementPlan(tuple(actions), frozenset({1}))


def test_a_plan_is_recorded_for_and_followed_as_by_the_runtime() -> None:
    """Scenario: operations of three times a page's copy; on demand each waits, by plan none."""
    trace = make_trace(dict.fromkeys("ABC", P), [(name, "", 3 * P) for name in "ABC"])
    limits = Limits(2 * P, ENOUGH)
    demand, planned = (
        simulate(trace, make_hardware(), limits, SimulationOptions(policy=policy, submit_ns=0))
        for policy in ("lru", Turning)
    )
    assert demand.step_ns == 3 * (P + 3 * P)
    assert planned.step_ns == pytest.approx(3 * 3 * P, rel=1e-5)
    assert planned.stall_ns == planned.num_faults == 0
    assert planned.lane_bytes == demand.lane_bytes
    assert planned.step_ns_each[0] > planned.step_ns_each[-1]  # the first ones go by demand


class Curious(LRU):
    """Demand paging that keeps what it was told to plan for."""

    name = "curious"
    asked: ClassVar[list[Trace]] = []

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> None:
        self.asked.append(trace)


def test_a_policy_plans_for_the_trace_that_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs beside the launching thread, also while the iteration is recorded."""
    monkeypatch.setattr(Curious, "asked", [])
    program = [("A", "", 700), ("B", "", 3 * P), ("A", "x", 900), ("x", "", 10), ("B", "", 10)]
    trace = make_trace({"A": P, "B": P, "x": P}, program, launch_ns=100)
    simulate(trace, make_hardware(), Limits(2 * P, ENOUGH), SimulationOptions(policy=Curious))
    assert [asked.launch_ns for asked in Curious.asked] == [100]
    assert Curious.asked[0].ops == trace.ops


def test_what_dies_after_its_iteration_is_not_recorded_to_die_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Curious, "asked", [])
    trace = make_trace({"A": P, "x": P, "B": P}, [("A", "x", 10), ("x", "", 10), ("B", "", 10)])
    a, x, b = trace.pages
    trace = dataclasses.replace(trace, pages=(a, x._replace(kind=PageKind.GRAD, died=None), b))
    simulate(trace, make_hardware(), Limits(2 * P, ENOUGH), SimulationOptions(policy=Curious))
    found = Curious.asked[0].pages[1]
    assert (found.kind, found.born, found.died, found.becomes) == (PageKind.GRAD, 0, None, None)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_copy_down_keeps_a_dead_page_until_it_has_ended(is_recorded: bool) -> None:
    """Its ticket holds the memory: a run of the pager has no earlier news of the death.

    What is recorded here has the deaths of the trace, which has been recorded before.
    """
    trace = make_trace({"x": P, "y": P}, [("", "x", 10), ("x", "", 10), ("", "y", 10)])
    backend = VirtualBackend(make_hardware(), ENOUGH)
    pager = DemandPager(backend, 2 * P, LRU, strict=True, clock=backend.clock)
    feeder = Feeder(pager, backend, Program(trace), launch_ns=1)
    used: list[int] = []
    run = backend.run

    def watch(name: str, launch_ns: int, compute_ns: int) -> None:
        run(name, launch_ns, compute_ns)
        used.append(pager.table.device_used_bytes)
        if len(used) == 1:
            page = feeder.pages[0]
            assert page is not None
            pager.mover.start_write_back(page, None, Priority.WRITE_BACK)
        if len(used) == 3:
            backend.host_ns += 2 * P  # time enough for the copy

    if is_recorded:
        pager.iterations.record()
        pager.iterations.pass_boundary()
    with mock.patch.object(backend, "run", watch):
        feeder.run_iteration()
        feeder.run_iteration()
    assert used[:3] == [P, P, P if is_recorded else 2 * P]  # x is dead when y is born
    assert used[3:] == [P, P, P]  # y has died, x was let go, and was copied no second time
    pager.close()


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to a dozen operations on weights, states and what lives from one to a later one."""
    sizes = {f"W{i}": draw(st.integers(1, 8)) * 512 for i in range(draw(st.integers(1, 4)))}
    program, alive = [], []
    for index in range(draw(st.integers(2, 12))):
        operands = draw(st.lists(st.sampled_from([*sizes]), max_size=3, unique=True))
        operands = [name + "!" * draw(st.booleans()) for name in operands]
        creates = ""
        if draw(st.booleans()):
            creates = f"x{index}"
            alive.append((creates, draw(st.integers(1, 8)) * 512))
        program.append((" ".join(operands), creates, draw(st.integers(1, 2000))))
        sizes.update(alive)
    return make_trace(sizes, program)


class Wild(Policy):
    """Any victims, in any order, to any tier."""

    name = "wild"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._known: list[int] = []

    def on_insert(self, page_id: int) -> None:
        self._known.append(page_id)

    def on_access(self, page_id: int) -> None:
        pass

    def on_remove(self, page_id: int) -> None:
        self._known.remove(page_id)

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        order = [page_id for page_id in self._known if view.evictable(page_id)]
        self._random.shuffle(order)
        freed, victims = 0, []
        while order and freed < need_bytes:
            below = [None, *(t for t in Tier if t > tier)]
            victims.append(Eviction(order.pop(), self._random.choice(below)))
            freed += view.frame_bytes(victims[-1].page_id)
        return victims if freed >= need_bytes else None


@given(
    trace=traces(),
    policy=st.sampled_from(["lru", "clock", "wild"]),
    seed=st.integers(0, 1 << 16),
    num_frames=st.integers(8, 60),
    host=st.sampled_from([0, 1 << 16, 1 << 30]),
    nvme=st.sampled_from([0, 1 << 20, 1 << 30]),
)
def test_no_policy_breaks_it_or_beats_the_bounds(
    trace: Trace, policy: str, seed: int, num_frames: int, host: int, nvme: int
) -> None:
    limits = Limits(num_frames * 512, host, nvme)
    num = 6
    options = SimulationOptions(
        policy=(lambda: Wild(seed)) if policy == "wild" else policy,
        num_iterations=num + 2,
        num_measured=num,
        submit_ns=0,
    )
    try:
        result = simulate(trace, make_hardware(), limits, options)
    except (BudgetError, CommitError):
        return
    bounds = roofline(trace, make_hardware(), limits)
    assert result.step_ns >= result.compute_ns
    assert result.peak_bytes[Tier.DEVICE] <= limits.device_bytes
    assert result.peak_bytes[Tier.HOST] <= limits.host_bytes
    moved = result.lane_bytes
    # The bounds are of a steady iteration: the first and the last one may profit from their ends.
    slack = 2 * limits.device_bytes
    assert num * (moved["h2d"] + moved["n2d"]) + slack >= num * bounds.in_bytes
    assert num * (moved["d2h"] + moved["d2n"]) + slack >= num * bounds.out_bytes
    assert num * result.step_ns >= num * bounds.step_ns - 8 * slack


@pytest.mark.bench
def test_a_core_simulates_a_hundred_thousand_operations_a_second() -> None:
    """With a factor of five of slack, for machines that do something else meanwhile."""
    sizes = {f"W{i}": 4096 for i in range(500)} | {f"x{i}": 4096 for i in range(2500)}
    program = [(f"W{i % 500} x{i - 1}" if i else "W0", f"x{i}", 100) for i in range(2500)]
    trace = make_trace(sizes, program)
    best = 0.0
    for _ in range(3):
        started_s = time.process_time()
        result = simulate(trace, make_hardware(), Limits(1 << 30, ENOUGH))
        best = max(best, result.num_operations / (time.process_time() - started_s))
    assert result.num_faults == 0
    assert best > 100_000 / 5
