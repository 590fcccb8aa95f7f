"""A lane whose steps queue copies on a CUDA stream, a few at a time.

[Note: The pump]
    What is on a stream cannot be overtaken. So urgent transfers are queued on it at once, and the
    others only while less than a window of bytes is on it: a fault waits for that, whatever is
    queued, and small transfers keep the link busy too. Whoever enters the pager looks whether a
    chunk has ended (`pump`), and so does a thread that waits until a quarter of the window is left,
    as long as anything is queued: a clock would look too late, and waking up more often would take
    the interpreter from the launching thread. Steps cost microseconds and never block, so they run
    in the thread that looks.

[Note: The window]
    It begins as two chunks of 16 MiB, 0.7 ms of a fast link: half of that is little time to wake up
    in beside a launching thread that has the interpreter, and the link idles when it is not enough.
    So it doubles with every eight windows of bytes in which no fault came, up to `CALM_BYTES`, and
    is small again when one does: it is programs that follow their plan to which the link's rate
    matters and that have no faults to wait for it. Chunks are a quarter of a large window: each
    costs tens of microseconds of whoever puts it there, mostly the launching thread.

[Note: Marks]
    An event marks the end of a chunk. Small transfers that go to the stream together share the one
    behind the last of them, as far as they are a chunk together: for a page of 8 MiB an event and
    what is done with it cost as much as all the rest. Under the lock alone there are tickets whose
    copies are on the stream and that have no event yet.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from tvm_pager.transfer.lane_queue import Job, LaneQueue, LaneTicket
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.routes import CHUNK_BYTES
from tvm_pager.transfer.thread_lane import cancelled_error, closed_error, failure_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tvm_pager.transfer.protocol import Transfer

__all__ = ["CALM_BYTES", "WINDOW_BYTES", "StreamLane"]

WINDOW_BYTES, CALM_BYTES = 2 * CHUNK_BYTES, 8 * CHUNK_BYTES
_CALM_WINDOWS = 8
_MOST_STEPS = 128  # of small pages: to put them there takes 3 ms of whoever looks
_IDLE_S = 5.0  # how long the thread waits for the next queue
_OPEN_LANES: weakref.WeakSet[StreamLane] = weakref.WeakSet()


class _Mark(NamedTuple):
    event: torch.cuda.Event
    nbytes: int  # before it, and after the mark before
    num_steps: int


class StreamLane:
    """Queues copies on one stream of its own. Thread-safe.

    Args:
        device: whose stream.
        name: of the thread that looks, after `tvm_pager-`.

    Attributes:
        chunk_bytes: what a step should copy at most; changes while steps are queued.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._name = f"tvm_pager-{name}"
        self._lock = threading.RLock()
        self._queue = LaneQueue()
        self._window: deque[_Mark] = deque()  # what is on the stream, oldest first
        self._window_bytes = self._window_steps = 0
        self._set_most(WINDOW_BYTES)
        self._is_closing = self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._has_queued = threading.Event()
        _OPEN_LANES.add(self)

    def submit(self, transfer: Transfer, steps: Iterator[bool], priority: Priority) -> LaneTicket:
        """Queues a job, on the stream if it is urgent. Failures surface in the ticket."""
        ticket = LaneTicket(transfer, self)
        with self._lock:
            if self._is_closing:
                ticket.end(closed_error())
                return ticket
            job = Job(ticket, steps, priority)
            self._queue.put(job)
            if priority is Priority.FAULT:
                self._set_most(WINDOW_BYTES)
                self._launch(job)
            else:
                self._fill()
                if len(self._queue):
                    self._watch()
        return ticket

    def promote(self, ticket: LaneTicket, priority: Priority) -> None:
        with self._lock:
            job = ticket.job
            if job is None:
                return
            self._queue.promote(job, priority)
            if priority is Priority.FAULT:
                self._launch(job)

    def cancel(self, ticket: LaneTicket) -> bool:
        """Ends a job of which nothing is on the stream; True if it was one."""
        with self._lock:
            job = ticket.job
            if job is None or job.has_begun:
                return False
            self._queue.remove(job)
            ticket.end(cancelled_error(ticket.transfer))
            return True

    def look(self, ticket: LaneTicket) -> bool:
        event = ticket.event
        if isinstance(event, torch.cuda.Event):
            try:
                if event.query():  # type: ignore[no-untyped-call]
                    ticket.end()
            except RuntimeError as error:  # the device is lost
                ticket.end(failure_of(ticket.transfer, error))
        return ticket.is_over

    def join(self, ticket: LaneTicket) -> None:
        """Blocks until the copies of a ticket that is on the stream have ended."""
        event = ticket.event
        if isinstance(event, torch.cuda.Event):
            try:
                event.synchronize()
            except RuntimeError as error:  # the device is lost
                ticket.end(failure_of(ticket.transfer, error))
                return
            ticket.end()

    def pump(self) -> None:
        """Puts the next chunks on the stream, as far as the window allows. Never blocks."""
        if not len(self._queue) or not self._lock.acquire(blocking=False):
            return
        try:
            self._fill()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Puts all that is queued on the stream, and waits for it. Idempotent. Blocks."""
        with self._lock:
            if self not in _OPEN_LANES:
                return
            _OPEN_LANES.discard(self)
            self._is_closing = True
            while (job := self._queue.first()) is not None:
                self._launch(job)
        self._has_queued.set()
        self.stream.synchronize()  # first: the thread may be waiting for a chunk
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Ends the thread for good; transfers go on as far as others look. Blocks for one chunk."""
        with self._lock:
            self._is_stopped = True
            thread = self._thread
        self._has_queued.set()
        if thread is not None:
            thread.join()

    # --- inside; the lock is held ----------------------------------------------------------------

    def _set_most(self, nbytes: int) -> None:
        """Sets the size of the window; see [Note: The window]."""
        self._most_bytes = nbytes
        self.chunk_bytes = max(CHUNK_BYTES, nbytes // 4)
        self._calm_bytes = 0  # put on the stream since it has changed

    def _fill(self) -> None:
        self._trim()
        before_bytes = self._window_bytes
        while self._window_bytes < self._most_bytes and self._window_steps < _MOST_STEPS:
            if not self._put_chunk():
                break
        self._calm_bytes += max(0, self._window_bytes - before_bytes)
        if self._calm_bytes >= _CALM_WINDOWS * self._most_bytes:
            self._set_most(min(2 * self._most_bytes, CALM_BYTES))

    def _put_chunk(self) -> bool:
        """Puts a chunk of what is queued on the stream, of one transfer or of several; else False.

        See [Note: Marks].
        """
        ended: list[LaneTicket] = []
        nbytes = num_steps = 0
        try:
            while nbytes < self.chunk_bytes and num_steps < _MOST_STEPS:
                job = self._queue.first()
                if job is None:
                    break
                nbytes += min(job.nbytes, self.chunk_bytes)
                num_steps += 1
                if self._step(job):
                    ended.append(job.ticket)
        finally:
            if num_steps:
                self._mark(ended, nbytes, num_steps, is_chunk=True)
        return num_steps > 0

    def _launch(self, job: Job) -> None:
        """Puts all that is left of a job on the stream."""
        while not self._step(job):
            if job.ticket.is_over:
                return
        self._mark([job.ticket], job.nbytes, 1, is_chunk=False)

    def _step(self, job: Job) -> bool:
        """Queues one step; True if nothing is left, and the ticket can have its mark."""
        try:
            is_last = job.step()
        except BaseException as error:
            self._queue.remove(job)
            with contextlib.suppress(RuntimeError):  # the device is lost: nothing moves any more
                self.stream.synchronize()  # what it has queued must not outlive the ticket
            job.ticket.end(failure_of(job.ticket.transfer, error))
            if not isinstance(error, Exception):
                raise
            return False
        if is_last:
            self._queue.remove(job)
        return is_last

    def _mark(
        self, ended: Sequence[LaneTicket], nbytes: int, num_steps: int, *, is_chunk: bool
    ) -> None:
        """Puts an event behind what is on the stream; it is that of these tickets."""
        self._trim()  # also where nothing is ever queued, and `pump` has nothing to do
        # The thread that looks sleeps on what is not urgent, and burns no core.
        event = torch.cuda.Event(blocking=is_chunk)  # type: ignore[no-untyped-call]
        try:
            event.record(self.stream)
        except RuntimeError as error:  # the device is lost
            for ticket in ended:
                ticket.end(failure_of(ticket.transfer, error))
            return
        for ticket in ended:
            ticket.event = event
        self._window.append(_Mark(event, nbytes, num_steps))
        self._window_bytes += nbytes
        self._window_steps += num_steps

    def _trim(self) -> None:
        """Forgets the chunks that have ended."""
        try:
            while self._window and self._window[0].event.query():  # type: ignore[no-untyped-call]
                mark = self._window.popleft()
                self._window_bytes -= mark.nbytes
                self._window_steps -= mark.num_steps
        except RuntimeError:  # the device is lost: each ticket learns that from its own event
            self._window.clear()
            self._window_bytes = self._window_steps = 0

    def _next_look(self) -> torch.cuda.Event:
        """What the thread waits for; see [Note: The pump]."""
        left_bytes = 0
        for mark, later in itertools.pairwise(reversed(self._window)):
            left_bytes += mark.nbytes
            if 4 * left_bytes >= self._window_bytes:
                return later.event
        return self._window[0].event

    def _watch(self) -> None:
        self._has_queued.set()
        if self._thread is None and not self._is_stopped:
            thread = threading.Thread(target=self._keep_looking, name=self._name, daemon=True)
            with contextlib.suppress(RuntimeError):  # no further thread: others look
                thread.start()
                self._thread = thread

    def _keep_looking(self) -> None:
        with torch.cuda.device(self._device):
            while not (self._is_closing or self._is_stopped):
                if not self._has_queued.wait(_IDLE_S):
                    with self._lock:
                        if not self._has_queued.is_set():
                            self._thread = None  # a forgotten lane can go
                            return
                with self._lock:
                    self._fill()
                    event = self._next_look() if len(self._queue) and self._window else None
                    if event is None:
                        self._has_queued.clear()
                if event is not None:
                    event.synchronize()  # releases the GIL


def _forget_in_child() -> None:
    """A forked child has none of the threads, and cannot use CUDA."""
    for lane in list(_OPEN_LANES):
        lane._queue.forget(closed_error())
        lane._lock, lane._queue = threading.RLock(), LaneQueue()
        lane._thread, lane._is_closing = None, True
    _OPEN_LANES.clear()


def _stop_at_exit() -> None:
    """No thread runs into the end of the interpreter, which would tear it out of a wait in C++."""
    for lane in list(_OPEN_LANES):
        lane.stop()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop_at_exit)
