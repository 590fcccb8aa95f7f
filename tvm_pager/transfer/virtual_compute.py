"""The compute stream of the virtual backend: when queued operations run, once their waits are over.

[Note: Runs]
    What is queued between two marks or waits is a run. An operation begins when the one before it
    has ended, and not before it was launched; so a run that begins at s ends at
    max(s + offset, floor), and two numbers stand for any number of operations. A run's times are
    known when the run before it and the copies that it waits for have ended. Nothing here depends
    on what the host queues later, so times that are known never change.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Awaited", "ComputeStream", "Mark", "Run"]


class Awaited(Protocol):
    """What the stream may wait for: a ticket."""

    end_ns: int | None


class Mark:
    """A place in the stream: everything that was queued before it.

    What is known of it may lie ahead of the host's clock.

    Attributes:
        ns: when it is reached; None until that is known.
        busy_ns: the stream's, up to there; as soon as that is known.
        stall_ns: the same.
    """

    __slots__ = ("busy_ns", "ns", "stall_ns")

    def __init__(self, ns: int | None = None) -> None:
        self.ns = ns
        self.busy_ns = self.stall_ns = 0


class Run:
    """Operations without a wait between them; see [Note: Runs]. Times in nanoseconds."""

    __slots__ = ("floor_ns", "mark", "offset_ns", "operations", "ready_ns", "waited_ns", "waits")

    def __init__(self) -> None:
        self.waits: list[Awaited] = []
        self.offset_ns = 0
        self.floor_ns = 0
        self.ready_ns = -1  # when its first operation was launched; -1: it has none yet
        self.waited_ns = 0  # before that, the host for bytes
        self.mark = Mark()
        self.operations: list[tuple[str, int, int]] = []  # name, launched, duration


class ComputeStream:
    """Operations in the order of launch.

    Args:
        on_kernel: takes name, begin and end of each operation once they are known; None costs
            nothing.

    Attributes:
        open: the run that operations are added to now; `launch` is that, for one operation.
        busy_ns: time in operations, as far as known.
        stall_ns: of the rest, waits for copies: its own, or of the host that launches.
    """

    def __init__(self, on_kernel: Callable[[str, int, int], None] | None = None) -> None:
        self.open = Run()
        self.busy_ns = 0
        self.stall_ns = 0
        self._on_kernel = on_kernel
        self._closed: deque[Run] = deque()  # without known times, oldest first
        self._end_ns = 0  # of the last run with known times
        self._idle_from_ns = 0  # the same, of the last that had operations
        self._last_mark = Mark(0)

    def launch(self, name: str, ready_ns: int, duration_ns: int) -> None:
        """Queues one operation."""
        run = self.open
        run.offset_ns += duration_ns
        run.floor_ns = max(run.floor_ns, ready_ns) + duration_ns
        if run.ready_ns < 0:
            run.ready_ns = ready_ns
        if self._on_kernel is not None:
            run.operations.append((name, ready_ns, duration_ns))

    def host_waited(self, nanoseconds: int) -> None:
        """The host has waited for bytes, and what it launches next comes so much later."""
        if self.open.ready_ns >= 0:
            self.mark()
        self.open.waited_ns += nanoseconds

    def wait_for(self, ticket: Awaited) -> None:
        """Lets what is launched from now on begin after the end of a ticket."""
        if self.open.ready_ns >= 0:
            self.mark()
        self.open.waits.append(ticket)

    def mark(self) -> Mark:
        """Marks the end of all that is queued now."""
        run = self.open
        if run.ready_ns >= 0 or run.waits:
            self._closed.append(run)
            self._last_mark = run.mark
            self.open = Run()
            if run.ready_ns < 0:
                self.open.waited_ns = run.waited_ns
            self.resolve()
        return self._last_mark

    def resolve(self) -> None:
        """Finds the times of the runs whose waits have become known."""
        closed = self._closed
        while closed:
            run = closed[0]
            begin_ns = self._end_ns
            for ticket in run.waits:
                if ticket.end_ns is None:
                    return
                begin_ns = max(begin_ns, ticket.end_ns)
            closed.popleft()
            self._end_ns = max(begin_ns + run.offset_ns, run.floor_ns)
            if run.ready_ns >= 0:
                could_begin_ns = max(self._idle_from_ns, run.ready_ns - run.waited_ns)
                self.stall_ns += max(0, max(begin_ns, run.ready_ns) - could_begin_ns)
                self.busy_ns += run.offset_ns
                self._idle_from_ns = self._end_ns
            mark = run.mark
            mark.ns, mark.busy_ns, mark.stall_ns = self._end_ns, self.busy_ns, self.stall_ns
            if self._on_kernel is not None:
                self._show(run, begin_ns, self._on_kernel)

    @staticmethod
    def _show(run: Run, begin_ns: int, on_kernel: Callable[[str, int, int], None]) -> None:
        for name, ready_ns, duration_ns in run.operations:
            begin_ns = max(begin_ns, ready_ns)
            on_kernel(name, begin_ns, begin_ns + duration_ns)
            begin_ns += duration_ns
