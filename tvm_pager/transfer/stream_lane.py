"""A lane whose steps queue copies on a CUDA stream, a few at a time.

[Note: The pump]
    What is on a stream cannot be overtaken. So urgent transfers are queued on it at once, and the
    others only while less than a window of bytes is on it: a fault waits for that, whatever is
    queued, and small transfers keep the link busy too. Whoever enters the pager looks whether a
    chunk has ended (`pump`), and so does a thread that waits for the older half of the window, as
    long as anything is queued: a clock would look too late, and waking up for each chunk costs more
    than to put it there. Steps cost microseconds and never block, so they run in the thread that
    looks.

[Note: The window]
    It begins as two chunks of 16 MiB, 0.7 ms of a fast link: half of that is little time to wake up
    in beside a launching thread that has the interpreter, and the link idles when it is not enough.
    So it doubles with every eight windows of bytes in which no fault came, up to `CALM_BYTES`, and
    is small again when one does: it is programs that follow their plan to which the link's rate
    matters and that have no faults to wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from tvm_pager.transfer.lane_queue import Job, LaneQueue, LaneTicket
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.routes import CHUNK_BYTES
from tvm_pager.transfer.thread_lane import cancelled_error, closed_error, failure_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm_pager.transfer.protocol import Transfer

__all__ = ["CALM_BYTES", "WINDOW_BYTES", "StreamLane"]

WINDOW_BYTES, CALM_BYTES = 2 * CHUNK_BYTES, 8 * CHUNK_BYTES
_CALM_WINDOWS = 8
_MOST_CHUNKS = 128  # of small pages: to put them there takes 3 ms of whoever looks
_IDLE_S = 5.0  # how long the thread waits for the next queue
_OPEN_LANES: weakref.WeakSet[StreamLane] = weakref.WeakSet()


class StreamLane:
    """Queues copies on one stream of its own. Thread-safe.

    Args:
        device: whose stream.
        name: of the thread that looks, after `tvm_pager-`.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._name = f"tvm_pager-{name}"
        self._lock = threading.RLock()
        self._queue = LaneQueue()
        # Chunks on the stream and their bytes, oldest first.
        self._window: deque[tuple[torch.cuda.Event, int]] = deque()
        self._window_bytes = 0
        self._most_bytes = WINDOW_BYTES  # see [Note: The window]
        self._calm_bytes = 0  # put on the stream since it has changed
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
                self._most_bytes, self._calm_bytes = WINDOW_BYTES, 0
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

    def _fill(self) -> None:
        self._trim()
        before_bytes = self._window_bytes
        while self._window_bytes < self._most_bytes and len(self._window) < _MOST_CHUNKS:
            job = self._queue.first()
            if job is None:
                break
            self._step(job)
        self._calm_bytes += max(0, self._window_bytes - before_bytes)
        if self._calm_bytes >= _CALM_WINDOWS * self._most_bytes:
            self._most_bytes, self._calm_bytes = min(2 * self._most_bytes, CALM_BYTES), 0

    def _launch(self, job: Job) -> None:
        """Puts all that is left of a job on the stream."""
        while not self._step(job, is_marked=False):
            pass

    def _step(self, job: Job, *, is_marked: bool = True) -> bool:
        """Queues one chunk; True if nothing is left. The last one is marked by an event anyway."""
        try:
            is_last = job.step()
            event = self._mark(job, is_marked) if is_last or is_marked else None
        except BaseException as error:
            self._queue.remove(job)
            with contextlib.suppress(RuntimeError):  # the device is lost: nothing moves any more
                self.stream.synchronize()  # what it has queued must not outlive the ticket
            job.ticket.end(failure_of(job.ticket.transfer, error))
            if not isinstance(error, Exception):
                raise
            return True
        if is_last:
            self._queue.remove(job)
            job.ticket.event = event
        return is_last

    def _mark(self, job: Job, is_chunk: bool) -> torch.cuda.Event:
        """Puts an event behind the last chunk on the stream."""
        self._trim()  # also where nothing is ever queued, and `pump` has nothing to do
        # The thread that looks sleeps on what is not urgent, and burns no core.
        event = torch.cuda.Event(blocking=is_chunk)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        nbytes = job.ticket.transfer.nbytes
        nbytes = min(nbytes, CHUNK_BYTES) if is_chunk else nbytes
        self._window.append((event, nbytes))
        self._window_bytes += nbytes
        return event

    def _trim(self) -> None:
        """Forgets the chunks that have ended."""
        while self._window and self._window[0][0].query():  # type: ignore[no-untyped-call]
            self._window_bytes -= self._window.popleft()[1]

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
                    place = (len(self._window) - 1) // 2
                    event = self._window[place][0] if len(self._queue) else None
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
