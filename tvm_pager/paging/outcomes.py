"""What became of iterations: counts for people, reports for policies. The pager's lock is held."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tvm_pager.planning import IterationReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.paging.follower import Follower
    from tvm_pager.paging.plan_runner import PlanRunner
    from tvm_pager.planning import Limits

__all__ = ["Outcomes"]


class Outcomes:
    """Counts of one pager's iterations, and the figures of the present one.

    Args:
        clock: nanoseconds.

    Attributes:
        counts: by what happened.
        num_faults: operands that were absent in the present iteration.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.counts: Counter[str] = Counter()
        self.num_faults = 0
        self._clock = clock
        self._first_departure = ""
        self._began_ns = self._stall_ns = self._created_bytes = 0

    def begin(self, created_bytes: int) -> None:
        """An iteration begins; the table has created so much before."""
        self._began_ns = self._clock()
        self._stall_ns = self.num_faults = 0
        self._created_bytes = created_bytes

    def waited(self, num_absent: int, nanoseconds: int) -> None:
        """An operation had to wait for bytes or room."""
        self.num_faults += num_absent
        self._stall_ns += nanoseconds

    def created(self, created_bytes: int) -> int:
        """Device bytes created in the present iteration."""
        return created_bytes - self._created_bytes

    def departed(self, follower: Follower) -> None:
        """The program has left the trace that was followed, for good."""
        self.counts["left"] += 1
        names, index = follower.known.names, follower.index
        following = names[index] if index < len(names) else "the end"
        self._first_departure = (
            self._first_departure
            or f"first before operation {index:,} of {len(names):,}, {following}"
        )

    def report(
        self, follower: Follower, runner: PlanRunner, limits: Limits, *, is_complete: bool
    ) -> IterationReport:
        """The present iteration, as far as it was followed."""
        return IterationReport(
            follower.known.trace,
            limits,
            is_complete,
            self._clock() - self._began_ns,
            self._stall_ns,
            self.num_faults,
            tuple(runner.late),
            tuple(sorted(runner.dropped)),
        )

    def summary(self, num_traces: int, reasons: Counter[str]) -> str:
        """One line for people; "" where nothing was recorded."""
        counts = self.counts
        if not counts["recorded"]:
            return ""
        parts = [
            f"plans: {counts['complete']:,} of {counts['iterations']:,} iterations followed to the "
            f"end, {num_traces:,} traces, {counts['recorded']:,} recordings"
        ]
        if counts["resyncs"]:
            parts.append(f"{counts['resyncs']:,} places found again")
        if counts["left"]:
            parts.append(f"{counts['left']:,} left ({self._first_departure})")
        parts += [f"{num:,} actions lapsed: {reason}" for reason, num in reasons.most_common(3)]
        return "; ".join(parts)
