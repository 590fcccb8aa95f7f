"""The model's clock and lanes by hand, and what the checks of a plan find."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.unit.small_traces import ENDLESS, Program, training
from tvm_pager.planning import (
    Action,
    Clean,
    CreateIn,
    Drop,
    Evict,
    Fetch,
    Limits,
    MovementPlan,
    PageKind,
    RunOnHost,
    Tier,
    Trace,
)
from tvm_pager.planning.cost.cost_model import Evaluation, evaluate
from tvm_pager.planning.hardware.lanes import D2H, D2N, H2D, LaneRates, Lanes
from tvm_pager.planning.search.planner import Planner
from tvm_pager.planning.validate import check
from tvm_pager.testing.machines import example_profile

MIB = 1 << 20
BIG = 64 * MIB // 512
COPY_NS = 1_382_000  # of such a page, alone, within 1 %
LONG = 10_000_000
HARDWARE = example_profile()
PLENTY = Limits(1 << 50, ENDLESS, ENDLESS)


def act(size: int = BIG) -> dict[str, tuple[int, PageKind]]:
    return {"a": (size, PageKind.ACTIVATION)}


def run(trace: Trace, *actions: Action, limits: Limits = PLENTY, absent: int = -1) -> Evaluation:
    plan = MovementPlan(actions, frozenset({absent} if absent >= 0 else ()))
    return evaluate(trace, plan, HARDWARE, limits)


# --- lanes ---------------------------------------------------------------------------------------


def test_a_lane_serves_in_order_and_both_directions_slow_each_other_down() -> None:
    rates = LaneRates(HARDWARE)
    alone = rates.seconds(H2D, 64 * MIB)
    lanes = Lanes(rates)
    first, second = (lanes.submit(H2D, page, 64 * MIB) for page in range(2))
    assert lanes.wait(second, H2D) == pytest.approx(2 * alone)
    assert first.ended == second.begun == pytest.approx(alone)

    lanes = Lanes(rates)
    there = lanes.submit(H2D, 0, 64 * MIB)
    lanes.advance(alone / 2)  # half of it alone, the other half not
    back = lanes.submit(D2H, 1, 64 * MIB)
    slow = rates.slowdowns[H2D]
    assert lanes.wait(there, H2D) == pytest.approx(alone / 2 * (1 + slow))
    assert lanes.wait(back, D2H) == pytest.approx(alone / 2 * (1 + slow) + alone / 2)
    assert lanes.backlog[D2H] == 0


def test_the_disk_is_a_pair_of_its_own() -> None:
    rates = LaneRates(HARDWARE, "raw")
    lanes = Lanes(rates)
    job = lanes.submit(D2N, 0, 64 * MIB)
    lanes.submit(D2H, 1, 64 * MIB)
    assert lanes.wait(job, D2N) == pytest.approx(rates.seconds(D2N, 64 * MIB))


# --- one iteration -------------------------------------------------------------------------------


def weight_and_room(ns: int = LONG) -> Trace:
    """A weight that is used in operation 1 of 3, which is never written."""
    program = Program()
    program.page("w", BIG)
    program.op(ns=ns)
    program.op("w", ns=ns)
    program.op(ns=ns)
    return program.build()


def test_without_movement_a_step_is_its_kernels_or_its_launches() -> None:
    trace = training(2).build()
    assert run(trace).prediction.step_ns == trace.compute_ns
    slow = Trace(trace.ops, trace.pages, trace.modules, launch_ns=50_000)
    assert run(slow).prediction.step_ns == 50_000 * len(trace.ops)


def test_an_absent_operand_is_fetched_when_its_operation_comes() -> None:
    result = run(weight_and_room(), Evict(0, 2, 2), absent=0)
    assert result.num_faults == 1
    assert result.prediction.stall_ns == pytest.approx(COPY_NS, rel=0.01)
    assert result.prediction.step_ns == 3 * LONG + result.prediction.stall_ns
    assert result.prediction.lane_bytes["h2d"] == 64 * MIB
    assert result.prediction.lane_bytes["d2h"] == 0, "nothing writes it"
    assert result.prediction.peak_bytes[Tier.HOST] == 64 * MIB


def test_a_fetch_ahead_of_need_waits_for_nobody() -> None:
    result = run(weight_and_room(), Fetch(0, 0, 1), Evict(0, 2, 2), absent=0)
    assert result.num_faults == 0
    assert result.prediction.stall_ns == 0
    (fetch,) = (span for span in result.timeline if span.lane == "h2d")
    assert (fetch.begin_ns, fetch.number) == (0, 0)
    assert fetch.end_ns == pytest.approx(COPY_NS, rel=0.01)


def test_memory_that_is_given_up_at_a_deadline_is_waited_for() -> None:
    program = Program()
    program.op(creates=act(), ns=1000)
    program.op(ns=1000)
    program.op(ns=1000)
    program.free("a")
    trace = program.build()
    late = run(trace, Evict(0, 1, 2)).prediction.stall_ns
    assert late == pytest.approx(COPY_NS - 1000, rel=0.01)
    assert run(trace, Evict(0, 1, 3)).prediction.stall_ns == 0, "it dies first"


def test_a_fetch_without_room_waits_for_it() -> None:
    program = Program()
    program.page("w", BIG)
    program.op(creates=act(), ns=LONG)
    program.op("a", ns=LONG)
    program.free("a")
    program.op(ns=LONG)
    program.op("w", ns=LONG)
    limits = Limits(BIG * 512, ENDLESS)
    result = run(program.build(), Fetch(0, 1, 3), Evict(0, 4, 4), limits=limits, absent=0)
    (fetch,) = (span for span in result.timeline if span.lane == "h2d")
    assert fetch.begin_ns == 2 * LONG
    assert result.prediction.stall_ns == 0


def test_a_fetch_that_comes_too_early_is_pushed_out_again() -> None:
    program = Program()
    program.page("w", BIG)
    program.op(creates=act(), ns=LONG)
    program.free("a")
    program.op("w", ns=LONG)
    limits = Limits(BIG * 512, ENDLESS)
    result = run(program.build(), Fetch(0, 0, 1), Evict(0, 2, 2), limits=limits, absent=0)
    assert result.prediction.peak_bytes[Tier.DEVICE] == BIG * 512
    assert result.prediction.lane_bytes["h2d"] == 2 * BIG * 512
    assert result.num_faults == 1


def test_what_does_not_fit_pushes_out_what_is_needed_last() -> None:
    program = Program()
    program.page("soon", 8)
    program.page("late", 8)
    program.op(creates=act(8))
    program.free("a")
    program.op("soon")
    program.op("late")
    result = run(program.build(), limits=Limits(16 * 512, ENDLESS))
    assert result.num_faults == 1
    assert [span.number for span in result.timeline if span.lane == "h2d"] == [1]
    assert result.prediction.lane_bytes["h2d"] == 8 * 512
    assert result.prediction.peak_bytes[Tier.DEVICE] == 16 * 512


def test_copies_of_pages_on_the_device_make_room_on_the_host_and_then_there_is_nvme() -> None:
    program = Program()
    for name in "xyz":
        program.page(name, 8)
    program.op(writes="x y z", ns=LONG)
    program.op(ns=LONG)
    program.op(ns=LONG)
    program.op("x y z", ns=LONG)
    fetches = [Fetch(page, 3, 3) for page in range(3)]
    evictions = [Evict(page, 2, 3) for page in range(3)]
    limits = Limits(ENDLESS, 16 * 512, ENDLESS)
    lanes = run(program.build(), *evictions, *fetches, limits=limits).prediction.lane_bytes
    assert lanes == {"h2d": 16 * 512, "d2h": 16 * 512, "n2d": 8 * 512, "d2n": 8 * 512}
    result = run(program.build(), Clean(0, 1, 2), *evictions[1:], *fetches[1:], limits=limits)
    assert result.prediction.lane_bytes["d2n"] == 0


def test_what_was_written_is_written_back_again() -> None:
    program = Program()
    program.page("w", BIG)
    program.op(writes="w", ns=LONG)
    program.op("w", ns=LONG)
    program.op("w", ns=LONG)
    moves = Evict(0, 1, 1), Fetch(0, 1, 1), Evict(0, 2, 2), Fetch(0, 2, 2)
    # Copied after its write; still current when it leaves for the second time.
    assert run(program.build(), *moves).prediction.lane_bytes["d2h"] == 64 * MIB
    program.op(writes="w", ns=LONG)
    again = run(program.build(), *moves, Evict(0, 4, 4), absent=0)
    assert again.prediction.lane_bytes["d2h"] == 2 * 64 * MIB


def test_dropped_pages_are_computed_again_and_host_work_overlaps() -> None:
    program = Program()
    program.page("w", BIG)
    program.op("w", act(), ns=LONG)
    program.op(ns=LONG)
    program.op("a", ns=LONG)
    program.free("a")
    dropped = run(program.build(), Drop(1, 1, 1))
    assert dropped.prediction.replay_ns == LONG
    assert dropped.prediction.step_ns == 4 * LONG
    assert not any(dropped.prediction.lane_bytes.values())

    program.op(writes="w", ns=LONG)
    hosted = run(program.build(), RunOnHost(3, 3, 3), Fetch(0, 2, 3))
    assert hosted.prediction.host_ns > 0
    assert hosted.num_faults == 1, "the weight comes back from the host when it is used"
    assert {span.lane for span in hosted.timeline} == {"compute", "host", "h2d"}


def test_pages_are_born_below() -> None:
    program = Program()
    program.op(creates=act(), ns=LONG)
    program.op(ns=LONG)
    program.op("a", ns=LONG)
    program.free("a")
    result = run(program.build(), CreateIn(0, Tier.HOST, 0, 0))
    assert result.prediction.lane_bytes["d2h"] == 64 * MIB
    assert result.num_faults == 1


def test_a_lane_does_one_thing_at_a_time() -> None:
    trace = training(6, weight=BIG, activation=BIG, ns=LONG // 10).build()
    planner = Planner(trace, HARDWARE)
    limits = Limits(planner.index.peak_bytes // 3, ENDLESS)
    plan = planner.plan(limits)
    assert plan is not None
    timeline = evaluate(trace, plan, HARDWARE, limits).timeline
    for lane in ("compute", "h2d", "d2h"):
        spans = [span for span in timeline if span.lane == lane]
        assert len(spans) > 3
        assert all(one.end_ns <= two.begin_ns + 1 for one, two in pairwise(spans))
        assert sum(span.end_ns - max(0, span.begin_ns) for span in spans) > 0


# --- checks --------------------------------------------------------------------------------------


def use_and_rest() -> Trace:
    """Page 0 lives on and is used at 0 and 3; page 1 is born at 1 and dies at 3."""
    program = Program()
    program.page("w", 8)
    program.op("w", is_replayable=False)
    program.op(creates=act(8), is_replayable=False)
    program.op("a")
    program.free("a")
    program.op("w")
    return program.build()


FINE = Evict(0, 1, 1), Fetch(0, 3, 3)


@pytest.mark.parametrize(
    ("actions", "absent", "problem"),
    [
        (FINE, (), None),
        ((Clean(0, 1, 2), Evict(0, 2, 2), Fetch(0, 3, 3)), (), None),
        ((Evict(0, 1, 2), Fetch(0, 2, 3)), (), None),
        ((Evict(0, 1, 1),), (), "uses page 0, which is absent"),
        ((Evict(0, 1, 4),), (), "uses page 0, which is leaving"),
        ((Fetch(0, 1, 3),), (), "but the page is there"),
        ((Evict(0, 1, 1), Evict(0, 2, 2), Fetch(0, 3, 3)), (), "not on the device"),
        ((Evict(1, 1, 1),), (), "not alive at 1"),
        ((Evict(1, 3, 3),), (), "not alive at 3"),
        ((Evict(2, 1, 1),), (), "one of 2 pages"),
        ((Evict(0, 2, 1),), (), "outside of the moments"),
        ((Evict(0, 1, 5),), (), "outside of the moments"),
        ((RunOnHost(4, 0, 0),), (), "one of 4 operations"),
        ((Evict(0, 4, 4),), (), "absent at the end and there at the start"),
        ((Fetch(0, 0, 0),), (0,), "there at the end and absent at the start"),
        ((Fetch(0, 0, 0), Evict(0, 4, 4)), (0,), None),
        ((), (1,), "page 1 is absent at the beginning"),
        ((Drop(1, 2, 2), Fetch(1, 2, 2)), (), "nothing can make the page again"),
        ((Evict(0, 1, 1, Tier.NVME), Fetch(0, 3, 3)), (), "NVME, of 0 B"),
    ],
)
def test_problems_are_found(
    actions: tuple[Action, ...], absent: tuple[int, ...], problem: str | None
) -> None:
    plan = MovementPlan(actions, frozenset(absent))
    problems = check(plan, use_and_rest(), Limits(16 * 512, 16 * 512))
    assert not problems if problem is None else problem in problems[0]


def test_budgets_are_checked_at_every_moment() -> None:
    trace, plan = use_and_rest(), MovementPlan(FINE)
    assert check(plan, trace, Limits(8 * 512, 8 * 512)) == []
    (problem,) = check(plan, trace, Limits(8 * 512, 8 * 512 - 1))
    assert "moment 1: 4096 B have to lie in HOST" in problem
    early = MovementPlan((FINE[0], Fetch(0, 2, 3)))
    (problem,) = check(early, trace, Limits(8 * 512, 8 * 512))
    assert problem == "moment 2: op2 takes 8192 B of 4096 B"


def test_results_and_workspaces_are_checked_too() -> None:
    program = Program()
    program.page("w", 8)
    program.op("w", act(4))
    program.free("a")
    program.op("w", workspace=6)
    trace = program.build()
    assert check(MovementPlan(()), trace, Limits(14 * 512, 0)) == []
    (problem,) = check(MovementPlan(()), trace, Limits(13 * 512, 0))
    assert problem == f"moment 1: op1 takes {14 * 512} B of {13 * 512} B"
    problems = check(MovementPlan(()), trace, Limits(11 * 512, 0))
    assert problems[0] == f"moment 0: op0 takes {12 * 512} B of {11 * 512} B"


def test_a_page_that_was_written_may_go_to_another_tier() -> None:
    program = Program()
    program.page("w", 8)
    for kind in ("reads", "writes", "reads", "reads"):
        program.op(**{kind: "w"})
    trace = program.build()
    copied = Evict(0, 1, 1, Tier.NVME), Fetch(0, 1, 1)
    plan = MovementPlan((*copied, Evict(0, 2, 2), Fetch(0, 2, 2)))
    assert check(plan, trace, Limits(ENDLESS, 8 * 512, 8 * 512)) == []
    problems = check(plan, trace, Limits(ENDLESS, 0, 8 * 512))
    assert problems[-1] == f"moment 2: {8 * 512} B have to lie in HOST, of 0 B"
    # What was not written since lies where it lay.
    plan = MovementPlan((*copied, Evict(0, 3, 3, Tier.NVME), Fetch(0, 3, 3), Evict(0, 4, 4)))
    plan = replace(plan, absent=frozenset({0}), actions=(Fetch(0, 0, 0), *plan.actions))
    assert check(plan, trace, Limits(ENDLESS, 0, 8 * 512)) == []
