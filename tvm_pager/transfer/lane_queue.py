"""The transfers that wait for one lane: the most urgent first, each carried out in steps.

Standard library only; not thread-safe: the lane's lock covers it.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
from typing import TYPE_CHECKING, Protocol

from tvm_pager.transfer.protocol import Priority

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from threading import Lock

    from tvm_pager.errors import TransferError
    from tvm_pager.transfer.protocol import Transfer

__all__ = ["Job", "LaneQueue", "LaneTicket", "Launcher"]


class Launcher(Protocol):
    """The lane, as its tickets see it."""

    def promote(self, ticket: LaneTicket, priority: Priority) -> None: ...

    def join(self, ticket: LaneTicket) -> None:
        """Blocks until the ticket is over."""

    def look(self, ticket: LaneTicket) -> bool:
        """Whether the ticket is over. Never blocks."""


class LaneTicket:
    """The `Ticket` of all lanes. The lane alone writes it."""

    __slots__ = ("_lane", "error", "event", "gates", "is_over", "job", "transfer")

    def __init__(self, transfer: Transfer, lane: Launcher) -> None:
        self.transfer = transfer
        self.error: TransferError | None = None
        self.event: object | None = None  # on the device, after the last copy; None where unknown
        self.is_over = False
        self.job: Job | None = None  # while it is queued
        self.gates: list[Lock] = []  # locked; `end` opens them
        self._lane = lane

    @property
    def is_certain(self) -> bool:
        return self.error is None and (self.is_over or self.event is not None)

    def done(self) -> bool:
        return self.is_over or self._lane.look(self)

    def wait(self) -> None:
        if not self.is_over:
            self._lane.promote(self, Priority.FAULT)
            self._lane.join(self)
        if self.error is not None:
            raise self.error.with_traceback(None)

    def end(self, error: TransferError | None = None) -> None:
        """It has ended; source and destination are let go."""
        self.error = error
        self.job = None
        self.transfer.memory = None
        self.transfer.behind = ()
        self.is_over = True
        gates, self.gates = self.gates, []
        for gate in gates:
            gate.release()


class Job:
    """A ticket and the steps that carry it out.

    Each step moves one chunk, says whether it was the last, and blocks for no other job. What the
    steps have left in flight has ended when the iterator has.
    """

    __slots__ = ("has_begun", "nbytes", "priority", "steps", "ticket")

    def __init__(self, ticket: LaneTicket, steps: Iterator[bool], priority: Priority) -> None:
        self.ticket = ticket
        self.steps = steps
        self.priority = priority
        self.nbytes = ticket.transfer.nbytes
        self.has_begun = False

    def step(self) -> bool:
        """Moves the next chunk; True if nothing is left."""
        self.has_begun = True
        if not next(self.steps, True):
            return False
        next(self.steps, None)  # ends the iterator
        return True


class LaneQueue:
    """Jobs by priority, and by age within one. A job stays until it is removed."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Job]] = []
        self._age: dict[Job, int] = {}
        self._clock = itertools.count()

    def __len__(self) -> int:
        return len(self._age)

    def put(self, job: Job) -> None:
        """Adds a job behind those of its priority. O(log n)."""
        self._age[job] = next(self._clock)
        job.ticket.job = job
        heapq.heappush(self._heap, (job.priority, self._age[job], job))

    def first(self, besides: Collection[Job] = ()) -> Job | None:
        """The job to go on with, none of `besides`; or None. It stays. O(log n) amortised."""
        aside = []
        while self._heap:
            priority, _, job = self._heap[0]
            if job in self._age and job.priority == priority:
                if job not in besides:
                    break
                aside.append(self._heap[0])
            heapq.heappop(self._heap)
        found = self._heap[0][2] if self._heap else None
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def promote(self, job: Job, priority: Priority) -> None:
        """Moves a job up, with its age; does nothing if it is as urgent already. O(log n)."""
        if job in self._age and priority < job.priority:
            job.priority = priority
            heapq.heappush(self._heap, (priority, self._age[job], job))

    def remove(self, job: Job) -> None:
        """Takes out a job that is finished or cancelled. O(1)."""
        del self._age[job]
        job.ticket.job = None
        job.steps = iter(())  # they hold the page, and the heap may keep the job for long

    def forget(self, error: TransferError) -> None:
        """Ends all tickets in a forked child, which has none of the threads that serve them."""
        for job in list(self._age):
            job.ticket.end(error)
        # Never freed: steps that are ended wait for what they have in flight.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
