"""A lane whose steps run in a thread of its own: disks, and memory copies of the CPU stand-in.

[Note: Who runs a step]
    One step of the lane runs at a time, in the lane's thread, or in the thread that needs the
    result: a transfer that an operation waits for is begun by the caller itself where the lane is
    idle (`runs_inline`), which saves two changes of thread. Between two steps the most urgent job
    is chosen anew, so a fault waits for one chunk and not for what is queued.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import traceback
import weakref
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.interrupts import interruptible
from tvm_pager.transfer.lane_queue import Job, LaneQueue, LaneTicket
from tvm_pager.transfer.protocol import Priority

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm_pager.transfer.protocol import Transfer

__all__ = ["ThreadLane", "cancelled_error", "closed_error", "failure_of"]

_IDLE_S = 5.0  # how long a thread waits for the next job
_OPEN_LANES: weakref.WeakSet[ThreadLane] = weakref.WeakSet()


class ThreadLane:
    """Serves jobs one step at a time. Thread-safe.

    Args:
        name: of the thread, after `tvm_pager-`.
        runs_inline: whether an urgent job on an idle lane runs inside `submit`. For copies that
            take microseconds; the others would hold the caller's lock for a disk.
    """

    def __init__(self, name: str, *, runs_inline: bool) -> None:
        self._name = f"tvm_pager-{name}"
        self._runs_inline = runs_inline
        self._changed = threading.Condition()
        self._queue = LaneQueue()
        self._is_busy = False  # a step is running, in whichever thread
        self._is_closing = self._is_stopped = False
        self._thread: threading.Thread | None = None
        _OPEN_LANES.add(self)

    def submit(self, transfer: Transfer, steps: Iterator[bool], priority: Priority) -> LaneTicket:
        """Queues a job; see [Note: Who runs a step]. Failures surface in the ticket."""
        ticket = LaneTicket(transfer, self)
        job = Job(ticket, steps, priority)
        with self._changed:
            if self._is_closing:
                ticket.end(closed_error())
                return ticket
            is_idle = not self._is_busy and not len(self._queue)
            self._queue.put(job)
            is_inline = self._runs_inline and priority is Priority.FAULT and is_idle
            if is_inline:
                self._is_busy = job.has_begun = True
            else:
                try:
                    self._wake()
                except RuntimeError as error:  # no thread: a limit, or the interpreter is ending
                    self._end(job, failure_of(transfer, error))
        if is_inline:
            self._run_to_end(job)
        return ticket

    def promote(self, ticket: LaneTicket, priority: Priority) -> None:
        with self._changed:
            if ticket.job is not None:
                self._queue.promote(ticket.job, priority)

    def cancel(self, ticket: LaneTicket) -> bool:
        """Ends a job that has not begun; True if it was one."""
        with self._changed:
            job = ticket.job
            if job is None or job.has_begun:
                return False
            self._end(job, cancelled_error(ticket.transfer))
            return True

    def look(self, ticket: LaneTicket) -> bool:
        return ticket.is_over

    def join(self, ticket: LaneTicket) -> None:
        """Blocks until the ticket is over; runs it here if it has not begun on a free lane."""
        gate: threading.Lock | None = None
        with self._changed:
            job = ticket.job
            is_mine = (
                self._runs_inline and job is not None and not job.has_begun and not self._is_busy
            )
            if is_mine and job is not None:
                self._is_busy = job.has_begun = True
            elif not ticket.is_over:
                gate = threading.Lock()
                gate.acquire()
                ticket.gates.append(gate)
        if is_mine and job is not None:
            self._run_to_end(job)
        elif gate is not None:
            interruptible(gate.acquire)

    def close(self) -> None:
        """Serves what is queued, then ends the thread. Idempotent. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
            self._changed.wait_for(lambda: not self._is_busy and not len(self._queue))
        if thread is not None:
            thread.join()
        _OPEN_LANES.discard(self)

    def stop(self) -> None:
        """Ends the thread after the step that is running, and all tickets. Blocks for that."""
        with self._changed:
            self._is_closing = self._is_stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy)
            while (job := self._queue.first()) is not None:
                self._end(job, closed_error())

    # --- inside ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                has_work = self._changed.wait_for(self._has_work, _IDLE_S)
                job = self._queue.first() if has_work and not self._is_stopped else None
                if job is None:  # closing and nothing left, or idle: a forgotten lane can go
                    self._thread = None
                    return
                self._is_busy = True
                job.has_begun = True
            with contextlib.suppress(BaseException):  # the ticket has it, and others come behind
                self._step(job)

    def _has_work(self) -> bool:
        return not self._is_busy and (len(self._queue) > 0 or self._is_closing)

    def _run_to_end(self, job: Job) -> None:
        while self._step(job, stays_busy=True):
            pass

    def _step(self, job: Job, *, stays_busy: bool = False) -> bool:
        """Runs one step; False if it was the last. The lane is free again unless `stays_busy`."""
        is_last, error, interrupt = False, None, None
        try:
            is_last = job.step()
        except BaseException as problem:
            is_last, error = True, failure_of(job.ticket.transfer, problem)
            interrupt = problem if not isinstance(problem, Exception) else None
        with self._changed:
            if is_last:
                self._end(job, error)
            if is_last or not stays_busy:
                self._is_busy = False
                self._changed.notify_all()
        if interrupt is not None:
            raise interrupt
        return not is_last

    def _end(self, job: Job, error: TransferError | None) -> None:
        job.ticket.end(error)  # first: a child forked in between finds what is not over queued
        self._queue.remove(job)
        self._changed.notify_all()


def failure_of(transfer: Transfer, problem: BaseException) -> TransferError:
    """The error that a ticket shall carry."""
    traceback.clear_frames(problem.__traceback__)  # the steps hold the page, the ticket the error
    problem = problem.with_traceback(None)  # and its frames whoever ran the step, and his frames
    if isinstance(problem, TransferError):
        return problem
    failure = TransferError(
        f"copying {transfer.nbytes} bytes of page {transfer.page_id} on lane "
        f"{transfer.lane.value} failed: {problem!r}",
        problem.errno if isinstance(problem, OSError) else None,
    )
    failure.__cause__ = problem
    return failure


def closed_error() -> TransferError:
    """The error of a transfer that came after `close`."""
    return TransferError("the backend is closed: make a new pager", errno.EBADF)


def cancelled_error(transfer: Transfer) -> TransferError:
    """The error of a transfer that was cancelled."""
    return TransferError(
        f"{transfer.lane.value} of page {transfer.page_id} was called off before it began",
        errno.ECANCELED,
    )


def _forget_in_child() -> None:
    """A forked child has none of the threads, and must not wait for them."""
    for lane in list(_OPEN_LANES):
        lane._queue.forget(closed_error())
        lane._changed = threading.Condition()
        lane._queue, lane._thread = LaneQueue(), None
        lane._is_busy, lane._is_closing = False, True
    _OPEN_LANES.clear()


def _stop_at_exit() -> None:
    """No step runs into the end of the interpreter, which would tear its thread out of C++ code."""
    for lane in list(_OPEN_LANES):
        lane.stop()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop_at_exit)
