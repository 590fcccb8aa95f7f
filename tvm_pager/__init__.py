"""A tensor virtual memory manager for PyTorch.

Public names are imported at first use, so that `import tvm_pager` and the torch-free rooms stay
cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "BudgetError": "errors",
    "CommitError": "errors",
    "ConfigError": "errors",
    "PagedTensor": "runtime.paged_tensor",
    "Pager": "api",
    "PagerClosedError": "errors",
    "PagerConfig": "config",
    "PagerError": "errors",
    "PolicyError": "errors",
    "Stats": "observe.counters",
    "Tier": "memory",
    "TransferError": "errors",
    "UnpageableError": "errors",
    "page": "api",
    "unpage": "api",
}

__all__ = [
    "BudgetError",
    "CommitError",
    "ConfigError",
    "PagedTensor",
    "Pager",
    "PagerClosedError",
    "PagerConfig",
    "PagerError",
    "PolicyError",
    "Stats",
    "Tier",
    "TransferError",
    "UnpageableError",
    "page",
    "unpage",
]

if TYPE_CHECKING:
    from tvm_pager.api import Pager, page, unpage
    from tvm_pager.config import PagerConfig
    from tvm_pager.errors import (
        BudgetError,
        CommitError,
        ConfigError,
        PagerClosedError,
        PagerError,
        PolicyError,
        TransferError,
        UnpageableError,
    )
    from tvm_pager.memory import Tier
    from tvm_pager.observe.counters import Stats
    from tvm_pager.runtime.paged_tensor import PagedTensor


def __getattr__(name: str) -> Any:
    room = _PUBLIC.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
