"""Pure decisions: what a policy is, what it sees, what it plans with, where policies come from."""

from __future__ import annotations

from tvm_pager.memory import PageKind, Tier
from tvm_pager.planning.hardware.profile import HardwareProfile
from tvm_pager.planning.limits import Limits
from tvm_pager.planning.plan import (
    Action,
    Clean,
    CreateIn,
    Drop,
    Evict,
    Fetch,
    Keep,
    MovementPlan,
    Prediction,
    RunOnHost,
)
from tvm_pager.planning.policy import (
    Eviction,
    IterationReport,
    Lineage,
    PageView,
    Policy,
    View,
)
from tvm_pager.planning.registry import available_policies, load_policy
from tvm_pager.planning.traces.trace import Phase, Trace, TraceOp, TracePage

__all__ = [
    "Action",
    "Clean",
    "CreateIn",
    "Drop",
    "Evict",
    "Eviction",
    "Fetch",
    "HardwareProfile",
    "IterationReport",
    "Keep",
    "Limits",
    "Lineage",
    "MovementPlan",
    "PageKind",
    "PageView",
    "Phase",
    "Policy",
    "Prediction",
    "RunOnHost",
    "Tier",
    "Trace",
    "TraceOp",
    "TracePage",
    "View",
    "available_policies",
    "load_policy",
]
