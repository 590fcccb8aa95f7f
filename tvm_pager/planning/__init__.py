"""Pure decisions: what a policy is, what it sees, and where policies come from."""

from __future__ import annotations

from tvm_pager.memory import PageKind, Tier
from tvm_pager.planning.hardware import HardwareProfile
from tvm_pager.planning.policy import Eviction, PageView, Policy, View
from tvm_pager.planning.registry import available_policies, load_policy

__all__ = [
    "Eviction",
    "HardwareProfile",
    "PageKind",
    "PageView",
    "Policy",
    "Tier",
    "View",
    "available_policies",
    "load_policy",
]
