"""What people look at: counters as text. Reads numbers, changes nothing, imports no torch."""

from __future__ import annotations

from tvm_pager.observe.table import format_stats

__all__ = ["format_stats"]
