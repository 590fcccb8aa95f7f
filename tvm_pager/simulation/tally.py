"""Counts what happened in a simulation, from the pager's events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.events import EventKind

if TYPE_CHECKING:
    from tvm_pager.events import Event

__all__ = ["Tally"]


class Tally:
    """An event sink.

    Attributes:
        num_evictions: pages that left it.
        num_clean_evictions: of them, those whose bytes were below already.
        notices: what the pager had to say, a sentence each.
    """

    def __init__(self) -> None:
        self.num_evictions = 0
        self.num_clean_evictions = 0
        self.notices: list[str] = []

    def emit(self, event: Event) -> None:
        """Takes one event."""
        if event.kind is EventKind.EVICT:
            self.num_evictions += 1
            self.num_clean_evictions += event.detail == "clean"
        elif event.kind is EventKind.NOTICE:
            self.notices.append(event.detail)
