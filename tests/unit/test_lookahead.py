"""LOOKAHEAD learns what its plans come to, and plans again where that is worth it."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.small_traces import ENDLESS, training
from tvm_pager.planning import IterationReport, Limits, MovementPlan
from tvm_pager.planning.cost.cost_model import evaluate
from tvm_pager.planning.search.planner import Planner
from tvm_pager.policies.lookahead import Lookahead
from tvm_pager.testing.machines import example_profile

BIG = (64 << 20) // 512  # units of a page of 64 MiB, which takes about 1.4 ms each way
LONG = 10_000_000  # ns; several such pages move meanwhile
HARDWARE = example_profile()


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
    assert runner.steps[-1] == min(runner.steps) < runner.steps[0]
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
