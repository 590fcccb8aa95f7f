"""One lane of the virtual backend: what is queued, what is on its stream, how far that has got.

[Note: Coupled lanes]
    The two directions of one link, or of one disk, slow each other down. What is on its way has a
    rest, in nanoseconds that it would take alone; while the other direction is busy the rest
    shrinks more slowly, by the factor that was measured. So an end is known only when nothing that
    begins before it can still be queued: `VirtualBackend` moves all lanes on in the order of time,
    and never beyond the host's clock unless the host waits.

[Note: Streams and threads]
    A lane between device and DRAM is a stream, as in stream_lane.py: urgent transfers are put on it
    whole, the others in chunks while less than a window is on it, and what is on it is not
    overtaken. A lane of the disk is a thread, as in thread_lane.py: one chunk at a time, of the
    most urgent transfer. Here nobody is late in putting the next chunk there.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.transfer.lane_queue import Job, LaneQueue, LaneTicket
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.thread_lane import cancelled_error, closed_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tvm_pager.transfer.lane_queue import Launcher
    from tvm_pager.transfer.protocol import Transfer
    from tvm_pager.transfer.virtual_compute import Mark

__all__ = ["Chunk", "VirtualLane", "VirtualTicket"]

_ROUNDING_NS = 1e-3  # of sums of fractions, which shall not cost a whole nanosecond


class VirtualTicket(LaneTicket):
    """A ticket with times, in nanoseconds of the virtual clock; None until they are known."""

    __slots__ = ("begin_ns", "end_ns")

    def __init__(self, transfer: Transfer, lane: Launcher) -> None:
        super().__init__(transfer, lane)
        self.begin_ns: int | None = None
        self.end_ns: int | None = None


@dataclass(slots=True)
class Chunk:
    """What moves in one go.

    Attributes:
        ticket: of which it is a part.
        nbytes: counted by the window.
        alone_ns: how long it takes while the other direction is idle.
        slowdown: factor while it is busy, at least 1.
        after: a place in the compute stream that comes first; None: none.
        ready_ns: when it was put on the stream.
        is_last: whether the ticket ends with it.
    """

    ticket: VirtualTicket
    nbytes: int
    alone_ns: float
    slowdown: float
    after: Mark | None
    ready_ns: int
    is_last: bool


class VirtualLane:
    """A lane; see the notes above. Its `Launcher` is the backend.

    Args:
        name: for people.
        launcher: whom tickets ask.
        window_bytes: of a stream: what of queued transfers may be on it; None: a thread.

    Attributes:
        other: the opposite direction; set by who makes the two.
        busy_ns: time in which bytes moved.
        begun_ns: when its last chunk began.
        free_ns: when its last chunk ended.
    """

    other: VirtualLane

    def __init__(self, name: str, launcher: Launcher, window_bytes: int | None) -> None:
        self.name = name
        self.busy_ns = 0
        self.begun_ns = 0
        self.free_ns = 0
        self._launcher = launcher
        self._is_stream = window_bytes is not None
        self._window_bytes = 1 if window_bytes is None else window_bytes
        self._queue = LaneQueue()
        self._chunks: deque[Chunk] = deque()  # on the stream; the first may be on its way
        self._num_window_bytes = 0
        self._rest_ns = 0.0  # of the first, if `_is_busy`
        self._since_ns = 0  # when `_rest_ns` was right
        self._is_busy = False
        self._is_closed = False

    # --- queueing; every chunk that ends before `now_ns` has ended -------------------------------

    def submit(
        self,
        transfer: Transfer,
        chunks: Callable[[VirtualTicket], Iterator[Chunk]],
        priority: Priority,
        now_ns: int,
    ) -> VirtualTicket:
        """Queues a transfer, cut into `chunks`."""
        ticket = VirtualTicket(transfer, self._launcher)
        if self._is_closed:
            ticket.end(closed_error())
            return ticket
        job = Job(ticket, self._steps(chunks(ticket)), priority)
        self._queue.put(job)
        if self._is_stream and priority is Priority.FAULT:
            self._launch(job, now_ns)
        else:
            self.pump(now_ns)
        return ticket

    def promote(self, ticket: LaneTicket, priority: Priority, now_ns: int) -> None:
        """See `Backend.promote`."""
        job = ticket.job
        if job is None:
            return
        self._queue.promote(job, priority)
        if self._is_stream and priority is Priority.FAULT:
            self._launch(job, now_ns)

    def cancel(self, ticket: LaneTicket) -> bool:
        """See `Backend.cancel`."""
        job = ticket.job
        if job is None or job.has_begun:
            return False
        self._queue.remove(job)
        ticket.end(cancelled_error(ticket.transfer))
        return True

    def pump(self, now_ns: int) -> None:
        """Puts queued chunks on the stream, as far as the window allows."""
        while self._num_window_bytes < self._window_bytes:
            job = self._queue.first()
            if job is None:
                return
            self._step(job, now_ns)

    def close(self) -> None:
        """Refuses whatever comes."""
        self._is_closed = True

    @property
    def has_work(self) -> bool:
        """Whether anything is queued or on its way."""
        return bool(self._chunks) or len(self._queue) > 0

    # --- time ------------------------------------------------------------------------------------

    def next_ns(self) -> int | None:
        """When it begins or ends a chunk, as things are; None: not before others have moved."""
        if not self._chunks:
            return None
        chunk = self._chunks[0]
        if self._is_busy:
            factor = chunk.slowdown if self.other._is_busy else 1.0
            return self._since_ns + math.ceil(self._rest_ns * factor - _ROUNDING_NS)
        begin_ns = max(self.free_ns, chunk.ready_ns)
        if chunk.after is None:
            return begin_ns
        return None if chunk.after.ns is None else max(begin_ns, chunk.after.ns)

    def move_on(self, now_ns: int) -> Chunk | None:
        """Begins or ends a chunk at `now_ns`, which `next_ns` has given; gives it if it ended."""
        self.other._accrue(now_ns)
        chunk = self._chunks[0]
        ticket = chunk.ticket
        if not self._is_busy:
            self._is_busy, self._rest_ns = True, chunk.alone_ns
            self.begun_ns = self._since_ns = now_ns
            if ticket.begin_ns is None:
                ticket.begin_ns = now_ns
            return None
        self.busy_ns += now_ns - self.begun_ns
        self._is_busy = False
        self.free_ns = now_ns
        self._chunks.popleft()
        self._num_window_bytes -= chunk.nbytes
        self.pump(now_ns)
        if chunk.is_last:
            ticket.end_ns = now_ns
            ticket.end()
        return chunk

    def _accrue(self, now_ns: int) -> None:
        """Lets what is on its way get as far as it does by `now_ns`, before the rate changes."""
        if self._is_busy:
            factor = self._chunks[0].slowdown if self.other._is_busy else 1.0
            self._rest_ns = max(0.0, self._rest_ns - (now_ns - self._since_ns) / factor)
            self._since_ns = now_ns

    # --- inside ----------------------------------------------------------------------------------

    def _launch(self, job: Job, now_ns: int) -> None:
        while not self._step(job, now_ns):
            pass

    def _step(self, job: Job, now_ns: int) -> bool:
        """Puts one chunk on the stream; True if nothing is left."""
        is_last = job.step()
        self._chunks[-1].ready_ns = now_ns
        if is_last:
            self._queue.remove(job)
            if self._is_stream:
                job.ticket.event = self._chunks[-1]
        return is_last

    def _steps(self, chunks: Iterator[Chunk]) -> Iterator[bool]:
        for chunk in chunks:
            self._chunks.append(chunk)
            self._num_window_bytes += chunk.nbytes
            yield chunk.is_last
