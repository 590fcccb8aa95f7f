"""Plans by LOOKAHEAD on random traces: legal, within budgets, reproducible, above the bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.unit.small_traces import Program
from tvm_pager.planning import Limits, PageKind, Tier, Trace
from tvm_pager.planning.cost.cost_model import evaluate
from tvm_pager.planning.hardware.lanes import D2H, H2D, lane_rates
from tvm_pager.planning.search.choice import choose_gaps
from tvm_pager.planning.search.gaps import Gaps, find_gaps
from tvm_pager.planning.search.least_step import least_step_s
from tvm_pager.planning.search.planner import Planner
from tvm_pager.planning.traces.occupancy import Occupancy
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.planning.validate import check
from tvm_pager.testing.machines import example_profile
from tvm_pager.testing.strategies import device_budgets, traces

HARDWARE = example_profile()
MANY = {"max_ops": 40, "max_lasting": 8, "max_handed_on": 4, "max_passing": 16}


def dies_where_it_is_born() -> Trace:
    """A page that is handed on and dies in the next iteration's first operation."""
    program = Program()
    program.op(creates={"new": (1, PageKind.GRAD)})
    program.page("old", 1)
    program.free("old")
    trace = program.build()
    new, old = (page._replace(becomes=None) for page in trace.pages)
    return Trace(trace.ops, (new._replace(becomes=1), old))


@given(data=st.data())
@example(data=None)
def test_plans_are_legal_and_keep_to_the_budget(data: st.DataObject | None) -> None:
    if data is None:
        trace, device_bytes = dies_where_it_is_born(), 512
    else:
        trace = data.draw(traces(**MANY) | traces(min_ops=0, is_steady=False))
        device_bytes = data.draw(device_budgets(trace))
    limits = Limits(device_bytes, 1 << 30)
    planner = Planner(trace, HARDWARE)
    plan = planner.plan(limits)
    if plan is None:
        needed = planner.candidates(limits).grid.least_bytes if trace.ops else np.array([1 << 30])
        assert int(needed.max()) > device_bytes
        return
    assert check(plan, trace, limits) == []
    assert plan == Planner(trace, HARDWARE).plan(limits)
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes[Tier.DEVICE] <= device_bytes
    result = evaluate(trace, plan, HARDWARE, limits)
    assert result.prediction == plan.prediction
    assert result.num_faults == 0
    least = least_step_s(planner.index, device_bytes, lane_rates(HARDWARE, limits))
    assert plan.prediction.step_ns >= least * 1e9 - 1


@given(data=st.data())
def test_what_the_host_cannot_hold_goes_to_nvme(data: st.DataObject) -> None:
    trace = data.draw(traces(**MANY))
    limits = Limits(data.draw(device_budgets(trace)), data.draw(st.integers(0, 1 << 15)), 1 << 30)
    plan = Planner(trace, HARDWARE).plan(limits)
    assume(plan is not None)
    assert plan is not None
    assert check(plan, trace, limits) == []
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes[Tier.HOST] <= limits.host_bytes


@given(data=st.data())
def test_the_choice_lies_between_its_bound_and_enough(data: st.DataObject) -> None:
    trace = data.draw(traces(max_lasting=3, max_handed_on=1, max_passing=4))
    index = TraceIndex(trace)
    gaps = find_gaps(index)
    excess = index.resident_bytes - data.draw(device_budgets(trace))
    assume(0 < len(gaps) <= 9)
    fewest = fewest_bytes(gaps, excess)
    choice = choose_gaps(gaps, excess)
    if fewest is None:
        assert choice is None
        return
    assert choice is not None
    assert (gaps.covered(choice.chosen) >= excess).all()
    assert sum(gaps.moved(choice.chosen)) == choice.cost
    assert choice.bound <= fewest + 1e-6
    assert fewest <= choice.cost


def fewest_bytes(gaps: Gaps, excess: np.ndarray) -> int | None:
    """By trying all choices."""
    costs = []
    for bits in product((False, True), repeat=len(gaps)):
        chosen = np.array(bits) | gaps.is_endless
        if (gaps.covered(chosen) >= excess).all():
            costs.append(sum(gaps.moved(chosen)))
    return min(costs, default=None)


@given(
    nbytes=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    budget=st.integers(-1, 5),
    more=st.integers(0, 3),
    data=st.data(),
)
def test_ranges_of_an_occupancy(
    nbytes: list[int], budget: int, more: int, data: st.DataObject
) -> None:
    num = len(nbytes)
    curve = Occupancy(np.array(nbytes))
    start, length = data.draw(st.tuples(st.integers(0, num - 1), st.integers(1, num)))
    curve.add((start, length), more)
    plain = list(nbytes)
    for moment in range(start, start + length):
        plain[moment % num] += more
    assert curve.nbytes.tolist() == plain
    start, length = data.draw(st.tuples(st.integers(0, num - 1), st.integers(1, num)))
    span = [plain[moment % num] for moment in range(start, start + length)]
    assert curve.peak((start, length)) == max(span)
    assert curve.peaks(np.array([start]), np.array([length])).tolist() == [max(span)]
    fits = [value + more <= budget for value in span]
    first = max((i + 1 for i, fit in enumerate(fits) if not fit), default=0)
    assert curve.first_fit(more, budget, start, start + length) == start + first
    last = fits.index(False) if False in fits else length
    assert curve.last_fit(more, budget, start, start + length) == start + last


@pytest.mark.parametrize("lane", [H2D, D2H])
@given(sizes=st.tuples(st.integers(0, 1 << 32), st.integers(0, 1 << 32)))
def test_more_bytes_take_longer_and_none_beat_what_was_measured(
    lane: int, sizes: tuple[int, int]
) -> None:
    links = (replace(link, bytes_per_s=80e9) for link in (HARDWARE.h2d, HARDWARE.d2h))
    hopeful = replace(HARDWARE, **dict(zip(("h2d", "d2h"), links, strict=True)))
    rates = lane_rates(hopeful, Limits(0, 0))
    small, large = sorted(sizes)
    assert 0 <= rates.seconds(lane, small) <= rates.seconds(lane, large)
    assert rates.seconds(lane, large) >= large / 50e9
