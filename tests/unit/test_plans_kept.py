"""How long a plan holds: budgets that change, tiers that close, policies that fail afterwards."""

from __future__ import annotations

import gc
from typing import Any

from tests.model.programs import Op, Rig, training
from tests.model.tiny_planner import TinyPlanner
from tvm_pager.memory import Page, Tier
from tvm_pager.planning import IterationReport, MovementPlan

TIGHT = 100 * 512  # less than the step takes


def planned(policy: TinyPlanner, **options: Any) -> Rig:
    """A rig that has begun its first planned iteration."""
    first = iter([policy])
    rig = Rig(lambda: next(first, None) or TinyPlanner(), device=TIGHT, **options)
    rig.weights(7)
    for _ in range(4):
        rig.iterate(training())
    assert rig.pager.iterations.is_planned
    assert len(policy.plans) == 1
    return rig


def test_a_plan_stays_where_the_budget_changes_by_little() -> None:
    policy = TinyPlanner()
    rig = planned(policy)
    for percent, num_plans in ((99, 1), (105, 1), (98, 2), (99, 2), (104, 3)):
        with rig.pager.lock:
            rig.pager.budgets.set_device(TIGHT * percent // 100)
        for _ in range(2):
            rig.iterate(training())
        assert len(policy.plans) == num_plans, percent
    rig.end()


def test_a_plan_is_made_anew_when_nvme_is_closed() -> None:
    policy = TinyPlanner()
    rig = planned(policy)
    with rig.pager.lock:
        rig.pager.table.close_tier(Tier.NVME, "test")
    for _ in range(2):
        rig.iterate(training())
    assert len(policy.plans) == 2
    assert policy.reports[-1].limits.nvme_bytes == 0
    rig.end()


def test_a_policy_that_raises_in_feedback_keeps_its_plan() -> None:
    class Raising(TinyPlanner):
        def feedback(self, report: IterationReport) -> MovementPlan | None:
            raise ValueError("no answer today")

    policy = Raising()
    rig = planned(policy, strict=False)
    before = rig.pager.iterations.planner.num_errors
    for _ in range(3):
        rig.iterate(training())
    assert rig.pager.iterations.is_planned
    assert len(policy.plans) == 1
    assert rig.pager.iterations.planner.num_errors == before + 3
    assert len([text for text in rig.notices if "no answer today" in text]) == 1
    rig.end()


def test_what_is_about_to_die_leaves_after_what_must_only_come_back() -> None:
    """Both would have to be written back, and only one of them for nothing."""

    class Idle(TinyPlanner):
        def plan(self, trace: Any, hardware: Any, limits: Any) -> MovementPlan:
            self.plans.append(MovementPlan(()))
            return self.plans[-1]

    policy = Idle()
    first = iter([policy])
    rig = Rig(lambda: next(first, None) or Idle(), device=TIGHT)
    rig.weights(2)
    program = [
        Op("make", ("w0",), (), {"dying": 3000}),
        Op("change", ("w1", "dying"), ("w1",)),
        *[Op(f"wait{i}", ("w0",)) for i in range(3)],
        Op("last", ("w0",), (), {}, ("dying",)),
        Op("again", ("w1",)),
    ]
    rig.iterate(program)
    rig.pager.evict_all()
    for _ in range(3):
        rig.iterate(program)
    for op in program[:3]:
        rig.run(op)
    assert policy.plans
    with rig.pager.lock:
        rig.pager.make_room(rig.pager.budget_bytes - 2 * 3072, "test")
    assert not rig.pages["w1"].is_on_device
    assert rig.pages["dying"].is_on_device
    for op in program[3:]:
        rig.run(op)
    rig.end()


def test_pages_that_a_plan_has_fetched_are_not_kept_for_ever() -> None:
    rig = planned(TinyPlanner())

    def num_pages() -> int:
        gc.collect()
        return sum(type(each) is Page for each in gc.get_objects())

    counts = []
    for _ in range(4):
        for _ in range(40):
            rig.iterate(training())
        counts.append(num_pages())
    assert rig.pager.mover.num_evicted > 160  # so as many were fetched
    assert max(counts) < len(rig.pager.table.pages) + 200, counts
    rig.end()
