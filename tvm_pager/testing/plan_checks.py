"""What is asked of plans: that they are legal, keep to their budget, and are made in time."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import strategies as st

from tvm_pager.memory import Tier
from tvm_pager.planning import CreateIn, Drop, IterationReport, Limits, MovementPlan, RunOnHost
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.planning.validate import check
from tvm_pager.testing.demand import PolicyFaultError
from tvm_pager.testing.machines import example_profile
from tvm_pager.testing.strategies import device_budgets, traces
from tvm_pager.testing.training import training_trace

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from tvm_pager.planning import Policy, Trace

__all__ = ["PlanCase", "check_plan", "fed_back", "plan_cases", "planned", "reports", "timed_plan"]

HARDWARE = example_profile()
_MANY = 1 << 40  # bytes
_NUM_SHOWN = 5  # problems
_NUM_TRIES = 3  # of which the fastest counts: the machine is not ours alone


class PlanCase(NamedTuple):
    """What a policy plans for."""

    trace: Trace
    limits: Limits


@st.composite
def plan_cases(draw: DrawFn, *, is_roomy: bool = True) -> PlanCase:
    """Steady traces and budgets that they can run in.

    Args:
        draw: Hypothesis's.
        is_roomy: whether everything fits below the device. Otherwise nothing may fit anywhere, and
            traces need not be steady.
    """
    if is_roomy:
        trace = draw(traces(min_ops=2, max_ops=12))
        nvme_bytes = draw(st.sampled_from([0, _MANY]))
        return PlanCase(trace, Limits(draw(device_budgets(trace)), _MANY, nvme_bytes))
    trace = draw(traces(min_ops=0, max_ops=12, is_steady=draw(st.booleans())))
    device_bytes = draw(device_budgets(trace) | st.integers(0, 4096))
    below = draw(st.sampled_from([(_MANY, 0), (4096, _MANY), (4096, 0), (0, 0)]))
    return PlanCase(trace, Limits(device_bytes, *below))


@st.composite
def reports(draw: DrawFn) -> IterationReport:
    """What may have become of a plan."""
    case = draw(plan_cases(is_roomy=False))
    pages = st.lists(st.integers(0, max(0, len(case.trace.pages) - 1)), max_size=3)
    pages = pages if case.trace.pages else st.just([])
    step_ns = draw(st.integers(1, 10**9))
    return IterationReport(
        case.trace,
        case.limits,
        draw(st.booleans()),
        step_ns,
        draw(st.integers(0, step_ns)),
        draw(st.integers(0, 20)),
        tuple(draw(pages)),
        tuple(draw(pages)),
    )


def planned(policy: Policy, case: PlanCase) -> MovementPlan | None:
    """Asks for a plan.

    Raises:
        PolicyFaultError: the policy raised, or gave something else.
    """
    try:
        plan = policy.plan(case.trace, HARDWARE, case.limits)
    except Exception as error:
        raise PolicyFaultError(f"policy {_name(policy)}: plan raised {error!r}") from error
    return _plan_or_none(policy, "plan", plan)


def fed_back(policy: Policy, report: IterationReport) -> MovementPlan | None:
    """Tells what became of a plan, as `planned` asks for one."""
    try:
        plan = policy.feedback(report)
    except Exception as error:
        raise PolicyFaultError(f"policy {_name(policy)}: feedback raised {error!r}") from error
    return _plan_or_none(policy, "feedback", plan)


def _plan_or_none(policy: Policy, hook: str, plan: object) -> MovementPlan | None:
    if plan is not None and not isinstance(plan, MovementPlan):
        raise PolicyFaultError(
            f"policy {_name(policy)}: {hook} gave {plan!r}, not a MovementPlan, or None"
        )
    return plan


def check_plan(policy: Policy, case: PlanCase, plan: MovementPlan) -> None:
    """Checks a plan as it is executed today, against its own prediction if it makes one.

    A plan that says it needs more than the budget is held to what it says: the pager makes up for
    the rest. What runs on the host is not executed, so how the others would fit beside it is open.

    Raises:
        PolicyFaultError: the plan is not legal, or takes more than it may.
    """
    limits = case.limits
    if plan.prediction is not None:
        peak_bytes = plan.prediction.peak_bytes.get(Tier.DEVICE, 0)
        limits = replace(limits, device_bytes=max(limits.device_bytes, peak_bytes))
    moves = tuple(a for a in plan.actions if not isinstance(a, Drop | RunOnHost | CreateIn))
    has_host_work = any(isinstance(a, RunOnHost | CreateIn) for a in plan.actions)
    problems = [] if has_host_work else check(replace(plan, actions=moves), case.trace, limits)
    if not problems:
        return
    shown = "\n    ".join(problems[:_NUM_SHOWN])
    more = f"\n    and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
    actions = "\n    ".join(map(repr, plan.actions))
    raise PolicyFaultError(
        f"policy {_name(policy)}: its plan cannot be carried out as it stands:\n    {shown}{more}\n"
        f"the plan, absent {sorted(plan.absent)}, for {limits.device_bytes} B:\n    {actions}\n"
        "A plan keeps to the budget, or has a prediction that says how much it takes, or is None."
    )


def timed_plan(policy: type[Policy], num_layers: int, enough_s: float) -> tuple[float, int]:
    """CPU seconds of planning a training step in 40 % of its memory, and its operations.

    A try that takes no more than `enough_s` is the last one.
    """
    trace = training_trace(num_layers, num_small_ops=40, num_update_ops=160)
    limits = Limits(int(TraceIndex(trace).peak_bytes * 0.4), _MANY)
    best_s = math.inf
    for _ in range(_NUM_TRIES):
        started_s = time.thread_time()
        planned(policy(), PlanCase(trace, limits))
        best_s = min(best_s, time.thread_time() - started_s)
        if best_s <= enough_s:
            break
    return best_s, len(trace.ops)


def _name(policy: Policy) -> str:
    return policy.name or type(policy).__name__
