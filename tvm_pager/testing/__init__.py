"""A kit for tests of policies: what every policy owes, and a pager that runs one under faults.

    from mine import Mine
    from tvm_pager.testing import pager_machine, policy_contract

    TestContract = policy_contract(Mine)
    TestMachine = pager_machine(Mine)

Needs Hypothesis; imports no torch.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_pager.testing.contract import policy_contract
    from tvm_pager.testing.program_machine import pager_machine

__all__ = ["pager_machine", "policy_contract"]

if find_spec("hypothesis") is None:
    raise ImportError(
        "tvm_pager.testing needs Hypothesis, which is not installed: pip install hypothesis"
    )

_HOMES = {"pager_machine": "program_machine", "policy_contract": "contract"}


def __getattr__(name: str) -> object:
    """Loads the tests when they are asked for: the rest of the kit needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
