"""Bounds from below: hand-made traces with known optima, MIN against an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import make_hardware, make_trace
from tvm_pager.planning import Limits, PageKind, Trace, TraceOp, TracePage
from tvm_pager.planning.search.gaps import all_gaps
from tvm_pager.planning.search.planner import Planner
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.planning.validate import check
from tvm_pager.simulation.bounds import (
    excess_bytes,
    least_below_bytes,
    least_device_bytes,
    least_traffic,
    min_fetched_bytes,
    roofline,
)
from tvm_pager.simulation.simulator import SimulationOptions, simulate

P = 512 * 1000
NEAR = 0.005  # how far the climb may stay below the optimum
ENOUGH = 1 << 40


def traffic(trace: Trace, device: int) -> tuple[int, int, int]:
    index = TraceIndex(trace)
    gaps, excess = all_gaps(index), excess_bytes(index, device)
    costs = (1, 0), (0, 1), (1, 1)
    into, out, both = (least_traffic(gaps, excess, *cost) for cost in costs)
    return into, out, both


def assert_near(found: tuple[int, ...], optima: tuple[int, ...]) -> None:
    for value, optimum in zip(found, optima, strict=True):
        assert optimum * (1 - NEAR) <= value <= optimum


def test_nothing_must_move_where_everything_fits() -> None:
    trace = make_trace({"A": P, "B": P}, [("A!", "", 1), ("B!", "", 1)])
    assert traffic(trace, 2 * P) == (0, 0, 0)


def test_two_pages_in_the_room_of_one_come_and_go() -> None:
    """A is written in each iteration, B never: A goes out once, both come back."""
    trace = make_trace({"A": P, "B": P}, [("A!", "", 1), ("B", "", 1)])
    assert_near(traffic(trace, P), (2 * P, P, 3 * P))


def test_a_page_that_leaves_twice_is_written_down_once() -> None:
    """A leaves twice between its writes, for B and for C; with room for one they all come."""
    trace = make_trace(
        {"A": P, "B": P, "C": P},
        [("A!", "", 1), ("B", "", 1), ("A", "", 1), ("C", "", 1)],
    )
    assert_near(traffic(trace, P), (4 * P, P, 5 * P))


def test_what_dies_costs_a_way_out_at_most() -> None:
    """x and y fill the device beside W; x is used again, y dies: y leaves and never comes back."""
    trace = make_trace(
        {"W": P, "x": P, "y": P},
        [("", "x", 1), ("", "y", 1), ("x", "", 1), ("y", "", 1), ("W", "", 1)],
    )
    # At y's birth x, y and W are alive; W is clean and used last.
    assert_near(traffic(trace, 2 * P), (P, 0, P))


def test_a_fraction_of_a_page_may_leave() -> None:
    """A page of three parts makes room for a page of one: the bound asks for one part."""
    trace = make_trace({"A": 3 * P, "B": P}, [("A", "", 1), ("B", "", 1)])
    assert_near(traffic(trace, 3 * P), (2 * P, 0, 2 * P))


@pytest.mark.parametrize(
    ("device", "excess"), [(5, [-1, 1]), (4, [0, 2]), (3, [1, 3]), (2, [1, 3]), (1, [1, 3])]
)
def test_a_workspace_takes_what_its_operands_leave_it(device: int, excess: list[int]) -> None:
    """The second operation's workspace can do with less, its operands cannot."""
    ops = (TraceOp("a", (0, 1, 2)), TraceOp("b", (0,), workspace_bytes=2 * P))
    pages = (*(TracePage(P, becomes=i) for i in range(3)), TracePage(P, becomes=3))
    found = excess_bytes(TraceIndex(Trace(ops, pages)), device * P)
    assert (found // P).tolist() == excess


def test_an_unused_page_is_away_for_good() -> None:
    trace = make_trace({"A": P, "B": P}, [("A", "", 1)] * 3)
    assert traffic(trace, P) == (0, 0, 0)


def test_two_pages_that_change_numbers_and_are_never_used_are_away_for_good() -> None:
    ops = (TraceOp("use", (2,), compute_ns=1),)
    pages = tuple(TracePage(P, becomes=number) for number in (1, 0, 2))
    trace = Trace(ops, pages)
    assert traffic(trace, P) == (0, 0, 0)
    limits = Limits(P, ENOUGH)
    plan = Planner(trace, make_hardware()).plan(limits)
    assert plan is not None
    assert plan.absent == {0, 1}
    assert check(plan, trace, limits) == []


def test_a_page_is_followed_through_its_numbers_into_the_next_iteration() -> None:
    """A gradient is born late, lives into the next iteration and dies there under another number.

    While W is used there is no room for it: it goes out and comes back in each iteration.
    """
    ops = (
        TraceOp("first", (0,), compute_ns=1),
        TraceOp("apply", (1,), compute_ns=1),
        TraceOp("make", (), creates=(2,), compute_ns=1),
    )
    pages = (
        TracePage(P, PageKind.PARAM, becomes=0),
        TracePage(P, PageKind.GRAD, died=2),
        TracePage(P, PageKind.GRAD, born=2, becomes=1),
    )
    assert_near(traffic(Trace(ops, pages), P), (2 * P, P, 3 * P))


def test_a_gap_of_more_than_one_iteration_lies_over_each_moment_as_often() -> None:
    """A page that is born in each iteration and dies three iterations later, never used."""
    ops = (TraceOp("make", (), creates=(0,), compute_ns=1), TraceOp("use", (4,), compute_ns=1))
    pages = (
        TracePage(P, PageKind.GRAD, born=0, becomes=1),
        TracePage(P, PageKind.GRAD, becomes=2),
        TracePage(P, PageKind.GRAD, becomes=3),
        TracePage(P, PageKind.GRAD, died=1),
        TracePage(P, PageKind.PARAM, becomes=4),
    )
    assert all_gaps(TraceIndex(Trace(ops, pages))).length.max() == 2 * 3
    hardware, limits = make_hardware(), Limits(2 * P, ENOUGH)
    bounds = roofline(Trace(ops, pages), hardware, limits)
    assert (bounds.in_bytes, bounds.out_bytes) == traffic(Trace(ops, pages), 2 * P)[:2]
    # At each birth four of them and W are alive, so three are away; while W is used, two of three.
    # A third of each page may stay if W leaves at each birth, which costs its way back only.
    assert_near(traffic(Trace(ops, pages), 2 * P), (0, 2 * P // 3, P))


def test_the_roofline_names_what_limits() -> None:
    trace = make_trace({"A": P, "B": P}, [("A!", "", 100), ("B", "", 100)])
    hardware = make_hardware(link_slowdown=1.5)
    alone = roofline(trace, hardware, Limits(2 * P, ENOUGH))
    assert (alone.step_ns, alone.limit) == (200, "compute")
    moved = roofline(trace, hardware, Limits(P, ENOUGH))
    assert moved.limit == "link"  # 3 pages at 4/3 bytes a nanosecond, more than 2 pages at 1
    assert 3 * P * 0.75 * (1 - NEAR) <= moved.step_ns <= 3 * P * 0.75
    beside = roofline(trace, hardware, Limits(P, P, ENOUGH))
    assert (beside.disk_in_bytes, beside.disk_out_bytes) == (0, 0)
    disk = roofline(trace, hardware, Limits(P, 0, ENOUGH))
    assert disk.limit == "disk"
    assert_near((disk.disk_in_bytes, disk.disk_out_bytes), (2 * P, P))


def test_what_must_fit_is_known_before_anything_runs() -> None:
    trace = make_trace({"A": P, "B": P, "x": P}, [("A B", "", 1), ("A", "x", 1), ("x", "", 1)])
    assert least_device_bytes(trace) == 2 * P
    options = SimulationOptions(num_iterations=2, num_measured=1)
    for device in (2 * P, 2 * P + P // 2):
        below = least_below_bytes(trace, Limits(device, 0))
        simulate(trace, make_hardware(), Limits(device, below), options)
        with pytest.raises(Exception, match="can back"):
            simulate(trace, make_hardware(), Limits(device, below - 4096), options)
    assert least_below_bytes(trace, Limits(3 * P + 4096, 0)) == 0


def test_min_is_for_pages_of_one_size() -> None:
    trace = make_trace({"A": P, "B": 2 * P}, [("A", "", 1), ("B", "", 1)])
    assert min_fetched_bytes(TraceIndex(trace), 2 * P) is None
    same = make_trace({"A": P, "B": P}, [("A", "", 1), ("B", "", 1)])
    assert (
        min_fetched_bytes(TraceIndex(same), P) == 2 * P - P // 8
    )  # the first of 8 iterations begins with A
    assert roofline(same, make_hardware(), Limits(P, ENOUGH)).name == "Belady"


@st.composite
def unit_programs(draw: st.DrawFn) -> list[str]:
    names = st.sampled_from("ABCDE")
    sets = draw(st.lists(st.lists(names, min_size=1, max_size=2), min_size=1, max_size=8))
    return [" ".join(dict.fromkeys(operands)) for operands in sets]


@given(program=unit_programs(), num_frames=st.integers(2, 4))
def test_min_fetches_as_little_as_the_best_of_all_schedules(
    program: list[str], num_frames: int
) -> None:
    trace = make_trace(dict.fromkeys("ABCDE", P), [(reads, "", 1) for reads in program])
    index = TraceIndex(trace)
    found = min_fetched_bytes(index, num_frames * P)
    assert found is not None
    needs = [frozenset(operands.split()) for operands in program] * 8
    least = dict.fromkeys(map(frozenset, itertools.combinations("ABCDE", num_frames)), 0)
    for need in needs:
        following: dict[frozenset[str], int] = {}
        for here, fetches in least.items():
            cost = fetches + len(need - here)
            for kept in itertools.combinations(sorted(here | need), num_frames):
                if need <= set(kept):
                    key = frozenset(kept)
                    following[key] = min(following.get(key, 1 << 30), cost)
        least = following
    assert found == min(least.values()) * P // 8
    excess = excess_bytes(index, num_frames * P)
    assert least_traffic(all_gaps(index), excess, 1, 0) <= found + 4 * P * 5 // 8
