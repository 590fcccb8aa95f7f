"""A small policy by plan: the longest gaps between two uses are spent off the device."""

from __future__ import annotations

from typing import Any

from tvm_pager.planning import (
    Action,
    Evict,
    Fetch,
    IterationReport,
    Limits,
    MovementPlan,
    Policy,
    Tier,
    Trace,
)

__all__ = ["TinyPlanner", "TinyStager", "occupancy"]

LEAD = 3  # operations between a fetch and its need


class TinyPlanner(Policy):
    """Evicts after a use, and fetches `LEAD` operations before the next, until everything fits."""

    name = "tiny"
    to: Tier | None = None

    def __init__(self) -> None:
        self.reports: list[IterationReport] = []
        self.plans: list[MovementPlan] = []

    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        busy = occupancy(trace)
        actions: list[Action] = []
        absent: set[int] = set()
        for length, number, begin, end in sorted(_gaps(trace), reverse=True):
            away = [i % len(trace.ops) for i in range(begin, end)]
            if length < LEAD + 2 or all(busy[i] <= limits.device_bytes for i in away):
                continue
            page = trace.pages[number]
            if page.becomes is not None and end >= len(trace.ops):
                absent.add(page.becomes)
            for i in away[: length - LEAD]:
                busy[i] -= page.frame_bytes
            actions += _moves(trace, number, begin, end, self.to)
        plan = MovementPlan(tuple(actions), frozenset(absent))
        self.plans.append(plan)
        return plan

    def feedback(self, report: IterationReport) -> MovementPlan | None:
        self.reports.append(report)
        return None


class TinyStager(TinyPlanner):
    """The same by way of NVMe: pages come to host memory first."""

    name = "tiny_stager"
    to = Tier.NVME

    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        plan = super().plan(trace, hardware, limits)
        assert plan is not None
        staged = [
            action._replace(earliest=max(0, action.earliest - LEAD), to=Tier.HOST)
            for action in plan.actions
            if isinstance(action, Fetch)
        ]
        return MovementPlan((*plan.actions, *staged), plan.absent)


def occupancy(trace: Trace) -> list[int]:
    """Device bytes during each operation, if nothing moves."""
    busy = []
    alive = sum(page.frame_bytes for page in trace.pages if page.born is None)
    for index, op in enumerate(trace.ops):
        alive -= sum(page.frame_bytes for page in trace.pages if page.died == index)
        alive += sum(trace.pages[number].frame_bytes for number in op.creates)
        busy.append(alive + op.workspace_bytes)
    return busy


def _gaps(trace: Trace) -> list[tuple[int, int, int, int]]:
    """(length, page, first moment without it, the operation that needs it) of all gaps."""
    uses: dict[int, list[int]] = {}
    for index, op in enumerate(trace.ops):
        for number in (*op.reads, *op.creates):
            uses.setdefault(number, []).append(index)
    gaps = []
    for number, indices in uses.items():
        page = trace.pages[number]
        following = indices[1:]
        if page.died is None and page.becomes in uses:
            following = [*following, len(trace.ops) + uses[page.becomes][0]]
        for use, need in zip(indices, following, strict=False):
            gaps.append((need - use - 1, number, use + 1, need))
    return gaps


def _moves(trace: Trace, number: int, begin: int, end: int, to: Tier | None) -> list[Action]:
    num_ops, page = len(trace.ops), trace.pages[number]
    actions: list[Action] = [Evict(number, begin, min(begin + 1, num_ops), to)]
    if end < num_ops:
        actions.append(Fetch(number, end - LEAD, end))
    elif page.becomes is not None:
        need = end - num_ops
        actions.append(Fetch(page.becomes, max(0, need - LEAD), need))
    return actions
