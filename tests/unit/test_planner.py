"""LOOKAHEAD on traces made by hand, whose best plans are known."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.small_traces import ENDLESS, Program, training
from tvm_pager.planning import (
    Clean,
    Evict,
    Fetch,
    IterationReport,
    Limits,
    MovementPlan,
    PageKind,
    Phase,
    Tier,
    Trace,
    TraceOp,
    TracePage,
)
from tvm_pager.planning.cost.cost_model import evaluate
from tvm_pager.planning.hardware.lanes import lane_rates
from tvm_pager.planning.search.choice import choose_gaps
from tvm_pager.planning.search.movement import movement_plan
from tvm_pager.planning.search.planner import Planner
from tvm_pager.planning.search.schedule import make_timetable
from tvm_pager.planning.validate import check
from tvm_pager.policies.lookahead import Lookahead
from tvm_pager.testing.machines import example_profile

MIB = 1 << 20
BIG = 64 * MIB // 512  # units of a page of 64 MiB, which takes about 1.4 ms each way
LONG = 10_000_000  # ns; several such pages move meanwhile
HARDWARE = example_profile()


def planned(trace: Trace, device_bytes: int, host_bytes: int = ENDLESS) -> MovementPlan:
    limits = Limits(device_bytes, host_bytes, ENDLESS)
    plan = Planner(trace, HARDWARE).plan(limits)
    assert plan is not None
    assert check(plan, trace, limits) == []
    return plan


def moved(plan: MovementPlan, unit: int = 512) -> tuple[float, float]:
    assert plan.prediction is not None
    lanes = plan.prediction.lane_bytes
    return lanes["h2d"] / unit, lanes["d2h"] / unit


def test_what_fits_is_left_alone() -> None:
    plan = planned(training().build(), 1 << 40)
    assert plan.actions == ()
    assert moved(plan) == (0, 0)


def test_a_loop_over_weights_moves_what_is_missing_and_not_all_of_it() -> None:
    # LRU would fetch all three. Each gap spans two of the three operations, so two gaps do.
    program = Program()
    for name in "abc":
        program.page(name, 8)
    for name in "abc":
        program.op(name)
    assert moved(planned(program.build(), 16 * 512)) == (16, 0)


def test_what_dies_unused_is_not_written_while_something_clean_can_go() -> None:
    program = Program()
    program.page("w", 8)
    program.op("w", {"dead": (8, PageKind.ACTIVATION)})
    program.op(creates={"x": (8, PageKind.ACTIVATION)})
    program.free("dead")
    program.op("x")
    program.free("x")
    assert moved(planned(program.build(), 16 * 512)) == (8, 0)


def test_a_page_that_nothing_uses_is_away_for_good_and_costs_nothing() -> None:
    program = Program()
    program.page("idle", 8)
    program.page("used", 8)
    program.op("used")
    plan = planned(program.build(), 8 * 512)
    assert moved(plan) == (0, 0)
    assert plan.absent == {0}


def test_a_gradient_that_was_brought_back_is_not_written_twice() -> None:
    # Both gaps of a version: written back in the first, given up for nothing in the second.
    program = Program()
    program.op(creates={"g": (8, PageKind.GRAD)})
    program.op(creates={"x": (8, PageKind.TEMPORARY)})
    program.free("x")
    program.op("g")
    program.op(creates={"y": (8, PageKind.TEMPORARY)})
    program.free("y")
    program.op("g")
    program.free("g")
    plan = planned(program.build(), 8 * 512)
    assert moved(plan) == (16, 8)
    assert [type(action) for action in plan.actions] == [Evict, Fetch, Evict, Fetch]


def swapped(num_hidden: int) -> Program:
    """A page is made, rests during `num_hidden` long operations, and is used again."""
    program = Program()
    program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    for _ in range(num_hidden):
        program.op(ns=LONG)
    program.op(creates={"b": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.free("b")
    for _ in range(num_hidden):
        program.op(ns=LONG)
    program.op("a", ns=LONG)
    program.free("a")
    return program


def test_copies_hide_behind_operations() -> None:
    trace = swapped(2).build()
    plan = planned(trace, BIG * 512)
    assert moved(plan) == (BIG, BIG)
    assert plan.prediction is not None
    assert plan.prediction.stall_ns == 0
    assert plan.prediction.step_ns == trace.compute_ns


def test_what_is_in_use_is_written_back_before_it_must_leave() -> None:
    # `a` is read until the moment at which its memory is wanted.
    program = Program()
    program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.op("a", ns=LONG)
    program.op(creates={"b": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.free("b")
    program.op(ns=LONG)
    program.op("a", ns=LONG)
    program.free("a")
    plan = planned(program.build(), BIG * 512)
    (clean,) = (action for action in plan.actions if isinstance(action, Clean))
    (evict,) = (action for action in plan.actions if isinstance(action, Evict))
    assert clean.earliest == 1
    assert (evict.earliest, evict.deadline) == (2, 2)
    assert plan.prediction is not None
    assert plan.prediction.stall_ns == 0


def test_fetches_wait_for_the_last_peak_before_their_need() -> None:
    plan = planned(swapped(2).build(), BIG * 512)
    (fetch,) = (action for action in plan.actions if isinstance(action, Fetch))
    assert fetch.earliest >= 4  # `b` is dead from there on
    assert fetch.deadline == 6


def test_what_a_copy_has_freed_is_fetched_into_at_once() -> None:
    program = Program()
    program.page("w", BIG)
    program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.op(ns=LONG)
    program.op(ns=LONG)
    program.op("w", ns=LONG)
    program.op(ns=LONG)
    program.op("a", ns=LONG)
    program.free("a")
    plan = planned(program.build(), BIG * 512)
    assert moved(plan) == (2 * BIG, BIG)
    assert plan.prediction is not None
    assert plan.prediction.stall_ns == 0


def test_states_stay_away_across_the_boundary() -> None:
    program = Program()
    program.page("m", BIG, PageKind.OPT_STATE)
    program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.op("a", ns=LONG)
    program.free("a")
    program.op(ns=LONG)
    program.op(writes="m", ns=LONG, phase=Phase.UPDATE)
    trace = program.build()
    plan = planned(trace, BIG * 512)
    assert moved(plan) == (BIG, BIG)
    assert plan.prediction is not None
    # It is written at the very end, so its copy has to be waited for; its fetch is hidden.
    away = next(action for action in plan.actions if isinstance(action, Evict))
    assert away.deadline == 0
    assert 0 < plan.prediction.stall_ns < 1.1 * BIG * 512 / 50


@pytest.mark.parametrize("fits", [0.8, 0.5, 0.3])
def test_a_training_step_is_planned_within_its_budget_and_hidden_if_it_can_be(fits: float) -> None:
    trace = training(6, weight=BIG // 8, activation=BIG // 4, ns=LONG).build()
    planner = Planner(trace, HARDWARE)
    plan = planned(trace, int(planner.index.peak_bytes * fits))
    assert plan.prediction is not None
    assert plan.prediction.step_ns < 1.05 * trace.compute_ns


def test_longest_absences_go_to_nvme_where_the_host_is_short() -> None:
    trace = training(4, weight=BIG, activation=BIG, ns=LONG).build()
    peak = Planner(trace, HARDWARE).index.peak_bytes
    plan = planned(trace, peak // 2, host_bytes=peak * 2 // 5)
    assert plan.prediction is not None
    assert plan.prediction.lane_bytes["d2n"] > 0
    below = {action.page for action in plan.actions if getattr(action, "to", None) is Tier.NVME}
    kinds = {trace.pages[page].kind for page in below}
    assert PageKind.ACTIVATION not in kinds, "their absences are the shortest"


def test_what_is_written_before_the_end_is_copied_before_the_end() -> None:
    # `m` leaves for the first operation of the next iteration; the last one does not use it.
    program = Program()
    program.page("m", BIG, PageKind.OPT_STATE)
    program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.free("a")
    program.op(ns=LONG)
    program.op(writes="m", ns=LONG, phase=Phase.UPDATE)
    program.op(ns=LONG)
    plan = planned(program.build(), BIG * 512)
    assert plan.prediction is not None
    assert plan.prediction.stall_ns == 0
    assert [type(action) for action in plan.actions] == [Evict, Fetch, Clean]
    assert plan.absent == frozenset()


@pytest.mark.parametrize(("released", "fetched"), [(5, 6), (1, 2), (4, 5)])
def test_a_timetable_that_does_not_fit_is_made_to(released: int, fetched: int) -> None:
    trace = swapped(2).build()
    planner = Planner(trace, HARDWARE)
    limits = Limits(BIG * 512, ENDLESS)
    gaps = planner.candidates(limits).gaps
    gaps = gaps.take(gaps.page == 0)
    grid = planner.grid_of(gaps)
    on_disk = np.zeros(len(gaps.out_bytes), np.bool_)
    timetable = make_timetable(grid, on_disk, limits.device_bytes, lane_rates(HARDWARE, limits))
    moments = [np.searchsorted(grid.first_op, [op]) for op in (released, fetched)]
    timetable = replace(timetable, released=moments[0], fetched=moments[1])
    plan = movement_plan(planner.index, grid, timetable, on_disk, limits.device_bytes)
    assert check(plan, trace, limits) == []


def test_what_turns_out_not_to_be_needed_is_given_back() -> None:
    # Taken by worth: the long gap of `w` first, then `a`, which alone would have been enough.
    program = Program()
    program.page("w", 8)
    program.op("w", {"a": (24, PageKind.ACTIVATION)})
    program.op(creates={"b": (8, PageKind.ACTIVATION)})
    program.free("b")
    program.op(creates={"c": (24, PageKind.ACTIVATION)})
    program.free("c")
    program.op("a")
    program.free("a")
    program.op("w")
    planner = Planner(program.build(), HARDWARE)
    gaps = planner.candidates(Limits(ENDLESS, 0)).gaps
    excess = planner.index.resident_bytes - 32 * 512
    choice = choose_gaps(gaps, excess)
    assert choice is not None
    assert gaps.page[choice.chosen].tolist() == [1]


def test_budgets_that_nothing_can_keep_get_no_plan() -> None:
    trace = training().build()
    assert Planner(trace, HARDWARE).plan(Limits(512, ENDLESS)) is None
    assert Planner(trace, HARDWARE).plan(Limits(60 * 512, host_bytes=0)) is None
    assert Planner(Trace((), ()), HARDWARE).plan(Limits(0, 0)) is None


def long_trace(num_layers: int, num_small: int) -> Trace:
    """A training step in which each operation is followed by small ones, as in real traces."""
    short = training(num_layers, weight=4096, activation=8192, ns=100_000).build()
    stretch = num_small + 1
    ops: list[TraceOp] = []
    for op in short.ops:
        ops.append(op)
        ops += [TraceOp("small", op.reads[:1], compute_ns=2000, phase=op.phase)] * num_small
    pages = [
        TracePage(
            page.nbytes,
            page.kind,
            born=None if page.born is None else page.born * stretch,
            died=None if page.died is None else page.died * stretch,
            becomes=page.becomes,
        )
        for page in short.pages
    ]
    return Trace(tuple(ops), tuple(pages))


@pytest.mark.bench
def test_thirty_thousand_operations_are_planned_in_seconds() -> None:
    trace = long_trace(400, 14)
    assert len(trace.ops) > 30_000
    planner = Planner(trace, HARDWARE)
    begun = time.process_time()
    plan = planner.plan(Limits(planner.index.peak_bytes // 2, ENDLESS))
    took = time.process_time() - begun
    assert plan is not None
    assert took < 8, "2 s on an idle core; four times that on a busy one"


# --- feedback ------------------------------------------------------------------------------------


class Runner:
    """Runs plans on a machine whose copies take longer than the profile says."""

    def __init__(self, slowness: float) -> None:
        self.trace = training(6, weight=BIG // 4, activation=BIG // 4, ns=LONG // 8).build()
        self.policy = Lookahead()
        self.real = example_profile(
            link_gb_per_s=50 / slowness, duplex_gb_per_s=45 / slowness, disk_gb_per_s=3 / slowness
        )
        self.limits = Limits(Planner(self.trace, HARDWARE).index.peak_bytes * 2 // 5, ENDLESS)
        self.plan = self.policy.plan(self.trace, HARDWARE, self.limits)
        self.steps: list[int] = []
        self.num_plans = 1

    def iterate(self, times: int) -> None:
        for _ in range(times):
            assert self.plan is not None
            actual = evaluate(self.trace, self.plan, self.real, self.limits).prediction
            self.steps.append(actual.step_ns)
            report = IterationReport(
                self.trace, self.limits, True, actual.step_ns, actual.stall_ns, 0
            )
            plan = self.policy.feedback(report)
            if plan is not None:
                self.plan = plan
                self.num_plans += 1


def test_plans_are_made_again_for_slow_lanes_and_the_fastest_one_stays() -> None:
    runner = Runner(slowness=2.5)
    runner.iterate(20)
    assert 2 <= runner.num_plans <= 5
    assert runner.steps[-1] == min(runner.steps)
    settled = runner.num_plans
    runner.iterate(5)
    assert runner.num_plans == settled


def test_a_plan_that_turns_out_slower_is_given_up_again() -> None:
    runner = Runner(slowness=2.5)
    first = runner.plan
    planner = runner.policy._planner
    assert first is not None
    assert first.prediction is not None
    assert planner is not None
    demand = replace(MovementPlan(()), prediction=first.prediction)
    planner.plan = lambda limits, slowness=1.0: demand  # type: ignore[method-assign]
    runner.iterate(20)
    assert runner.plan is first


def test_a_plan_that_keeps_its_promise_stays() -> None:
    runner = Runner(slowness=1)
    runner.iterate(6)
    assert runner.num_plans == 1


def test_reports_about_something_else_are_passed_over() -> None:
    runner = Runner(slowness=1)
    late = 1 << 40
    other = training(2).build()
    for trace, limits, is_complete in (
        (other, runner.limits, True),
        (runner.trace, Limits(1, 1), True),
        (runner.trace, runner.limits, False),
    ):
        report = IterationReport(trace, limits, is_complete, late, late, 9)
        assert [runner.policy.feedback(report) for _ in range(4)] == [None] * 4
