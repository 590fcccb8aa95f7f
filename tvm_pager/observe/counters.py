"""The counters of one pager: an event sink, and the frozen `Stats` that `Pager.stats()` gives."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm_pager.events import EventKind
from tvm_pager.observe.fetches import FetchCounts, Thrashing
from tvm_pager.observe.table import format_stats

if TYPE_CHECKING:
    from tvm_pager.events import Event

__all__ = ["Counters", "Stats"]

_log = logging.getLogger("tvm_pager")


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one pager's counters since it was opened. Sizes in bytes, times in seconds.

    `str(stats)` is the table that `tvm-pager run` prints at exit.
    """

    device_budget_bytes: int
    device_peak_bytes: int  # pages on the device, in the allocator's granularity
    host_budget_bytes: int
    host_peak_bytes: int  # slab memory, staging included
    nvme_budget_bytes: int
    nvme_peak_bytes: int
    bytes_by_lane: dict[str, int]
    num_faults: int
    num_evictions: int
    num_write_backs: int
    num_clean_evictions: int
    num_failures: int
    stall_s: float  # time that operations waited for faults
    num_pages: int  # alive now
    num_operations: int
    num_exposed: int  # pages held by escaped pointers now
    num_policy_errors: int
    notices: list[str]
    engine: str
    plans: str = ""  # what became of iterations that were recorded; "" where none was
    thrashing: Thrashing | None = None  # None where pages do not come back over and over

    def to_dict(self) -> dict[str, Any]:
        """The counters by name, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return format_stats(self)


class Counters:
    """Counts events. Called under the pager's lock."""

    def __init__(self) -> None:
        self.bytes_by_lane: Counter[str] = Counter(
            dict.fromkeys(("d2h", "h2d", "h2n", "n2h", "d2n", "n2d"), 0)
        )
        self.count: Counter[EventKind] = Counter()
        self.num_clean_evictions = 0
        self.stall_ns = 0
        self.notices: list[str] = []
        self.fetches = FetchCounts()

    def num(self, kind: str) -> int:
        """Events of one kind so far."""
        return self.count[EventKind(kind)]

    def emit(self, event: Event) -> None:
        self.count[event.kind] += 1
        if event.lane is not None:
            self.bytes_by_lane[event.lane] += event.nbytes
        if event.kind is EventKind.EVICT and event.detail == "clean":
            self.num_clean_evictions += 1
        elif event.kind is EventKind.FAULT:
            self.stall_ns += event.end_ns - event.start_ns
            self.fetches.waited(event)
        elif event.kind is EventKind.FETCH:
            self.fetches.fetched(event)
        elif event.kind is EventKind.NOTICE:
            self.notices.append(event.detail)
            _log.warning("%s", event.detail)
