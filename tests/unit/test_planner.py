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
    Limits,
    MovementPlan,
    PageKind,
    Phase,
    Tier,
    Trace,
    TraceOp,
    TracePage,
)
from tvm_pager.planning.hardware.lanes import lane_rates
from tvm_pager.planning.search.choice import choose_gaps
from tvm_pager.planning.search.least_step import least_step_s
from tvm_pager.planning.search.movement import movement_plan
from tvm_pager.planning.search.planner import Planner
from tvm_pager.planning.search.schedule import make_timetable
from tvm_pager.planning.validate import check
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


def test_what_dies_unused_is_not_written_though_there_is_time_for_it() -> None:
    # One page of `w` is missing for `x`; the larger `dead` would have to be written.
    program = Program()
    program.page("w", BIG)
    program.op("w", {"dead": (2 * BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.op(ns=LONG)
    program.op(creates={"x": (BIG, PageKind.ACTIVATION)}, ns=LONG)
    program.free("dead", "x")
    program.op(ns=LONG)
    program.op("w", ns=LONG)
    plan = planned(program.build(), 3 * BIG * 512)
    assert moved(plan) == (BIG, 0)
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


@pytest.mark.parametrize("fits", [0.7, 0.5])
def test_a_step_that_movement_makes_long_is_near_the_least_there_is(fits: float) -> None:
    trace = training(8, weight=BIG, activation=BIG, ns=LONG // 100).build()
    planner = Planner(trace, HARDWARE)
    limits = Limits(int(planner.index.peak_bytes * fits), ENDLESS)
    plan = planner.plan(limits)
    assert plan is not None
    assert plan.prediction is not None
    least_s = least_step_s(planner.index, limits.device_bytes, lane_rates(HARDWARE, limits))
    assert least_s > 4 * trace.compute_ns / 1e9
    assert least_s <= plan.prediction.step_ns / 1e9 <= 1.1 * least_s


def test_longest_absences_go_to_nvme_where_the_host_is_short() -> None:
    trace = training(4, weight=BIG, activation=BIG, ns=LONG).build()
    peak = Planner(trace, HARDWARE).index.peak_bytes
    plan = planned(trace, peak // 2, host_bytes=peak * 2 // 5)
    assert plan.prediction is not None
    assert plan.prediction.lane_bytes["d2n"] > 0
    below = {action.page for action in plan.actions if getattr(action, "to", None) is Tier.NVME}
    kinds = {trace.pages[page].kind for page in below}
    assert PageKind.ACTIVATION not in kinds, "their absences are the shortest"


def test_two_of_the_largest_pages_are_left_free_in_host_memory() -> None:
    # `a` is absent alone: with room for three pages of its size one may be used.
    trace = swapped(2).build()
    page = BIG * 512
    for num_pages, lane in ((3, "d2h"), (2, "d2n")):
        plan = planned(trace, page, host_bytes=num_pages * page)
        assert plan.prediction is not None
        moved = {name: n for name, n in plan.prediction.lane_bytes.items() if n and name[0] == "d"}
        assert moved == {lane: page}


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


def test_small_pages_move_where_nothing_fits_without_them() -> None:
    program = Program()
    for name, size in (("small", 1), ("x", 2000), ("y", 2000)):
        program.page(name, size)
        program.op(name)
    trace = program.build()
    assert {evict.page for evict in planned(trace, 2000 * 512).actions} == {0, 1, 2}
    assert {evict.page for evict in planned(trace, 2001 * 512).actions} == {1, 2}


def test_what_comes_from_outside_may_leave_before_its_first_use() -> None:
    """A batch that is there when the iteration begins, and waits for the second operation."""
    ops = TraceOp("w", (0,), compute_ns=1000), TraceOp("batch", (1,), compute_ns=1000)
    pages = TracePage(4096, PageKind.PARAM, becomes=0), TracePage(4096, died=2)
    plan = planned(Trace(ops, pages), 4096)
    assert moved(plan, 4096) == (2, 1)


def test_memory_that_nobody_wants_is_given_up_late() -> None:
    # The copy ends in operation 3. Up to 2 ms later would delay nobody, and `b` comes after that.
    program = Program()
    program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=LONG // 20)
    for _ in range(8):
        program.op(ns=LONG // 20)
    program.op(creates={"b": (BIG, PageKind.ACTIVATION)}, ns=LONG // 20)
    program.free("b")
    program.op("a", ns=LONG // 20)
    program.free("a")
    plan = planned(program.build(), BIG * 512)
    evict = next(action for action in plan.actions if isinstance(action, Evict))
    assert evict.earliest == 1
    assert evict.deadline == 8


def test_budgets_that_nothing_can_keep_get_no_plan() -> None:
    trace = training().build()
    assert Planner(trace, HARDWARE).plan(Limits(512, ENDLESS)) is None
    for host_bytes, nvme_bytes, is_enough in (
        (ENDLESS, 0, True),
        (0, 0, False),
        (8 * 4096, 0, False),
        (0, ENDLESS, True),
        (0, 8 * 4096, False),
    ):
        plan = Planner(trace, HARDWARE).plan(Limits(64 * 512, host_bytes, nvme_bytes))
        assert (plan is not None) == is_enough, (host_bytes, nvme_bytes)
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
