"""Questions about programs that need neither their memory nor their device.

`trace` is imported at first use, because torch comes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_pager.estimate.recording import trace

__all__ = ["trace"]


def __getattr__(name: str) -> Any:
    if name != "trace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tvm_pager.estimate.recording import trace

    globals()["trace"] = trace
    return trace
