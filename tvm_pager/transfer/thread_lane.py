"""A lane whose steps run in threads of its own: disks, and memory copies of the CPU stand-in.

[Note: Who runs a step]
    A step runs in one of the lane's threads, or in the thread that needs the result: a transfer
    that an operation waits for is begun by the caller itself where the lane is idle
    (`runs_inline`), which saves two changes of thread. Between two steps the most urgent job is
    chosen anew, so a fault waits for one chunk and not for what is queued.

[Note: Two workers]
    What happens between the last byte of one transfer and the first of the next (threads wake up,
    the ticket ends, the next step is cut into I/O) takes a tenth of what 8 MiB take on a fast disk.
    With two workers the disk is busy with one job meanwhile, where another one is as urgent. A long
    transfer is two jobs, its strands, so that one that is alone has both workers; its ticket ends
    with the last of them.

    - Steps of one job never run at once, and keep their order. Jobs of one priority begin in
      theirs, and may end in another.
    - While a job runs, no step of a less urgent one begins: it would take half of the disk, and a
      fault would wait for more than the steps that it found running.
    - A step waits for no other job. What it needs besides the disk, such as a place in the staging
      buffers, there is one of for each worker.
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
    from collections.abc import Iterator, Sequence

    from tvm_pager.transfer.protocol import Transfer

__all__ = ["ThreadLane", "cancelled_error", "closed_error", "failure_of"]

_IDLE_S = 5.0  # how long a thread waits for the next job
_OPEN_LANES: weakref.WeakSet[ThreadLane] = weakref.WeakSet()


class ThreadLane:
    """Serves jobs, a step of each at a time. Thread-safe.

    Args:
        name: of the threads, after `tvm_pager-`.
        runs_inline: whether an urgent job on an idle lane runs inside `submit`. For copies that
            take microseconds; the others would hold the caller's lock for a disk.
        num_workers: how many jobs proceed at the same time; see [Note: Two workers].
    """

    def __init__(self, name: str, *, runs_inline: bool, num_workers: int = 1) -> None:
        self._name = f"tvm_pager-{name}"
        self._runs_inline = runs_inline
        self._num_workers = num_workers
        self._changed = threading.Condition()
        self._queue = LaneQueue()
        self._running: list[Job] = []  # a step of theirs is running, in whichever thread
        self._is_closing = self._is_stopped = False
        self._threads: list[threading.Thread] = []
        self._strands: dict[LaneTicket, _Strands] = {}  # of tickets with more than one job
        _OPEN_LANES.add(self)

    def submit(
        self,
        transfer: Transfer,
        steps: Iterator[bool],
        priority: Priority,
        beside: Sequence[Iterator[bool]] = (),
    ) -> LaneTicket:
        """Queues a job; see [Note: Who runs a step]. Failures surface in the ticket.

        Args:
            transfer: what is moved.
            steps: move it.
            priority: of all of them.
            beside: further steps, of which each iterator may run at the same time as the others.
        """
        ticket = LaneTicket(transfer, self)
        job = Job(ticket, steps, priority)
        with self._changed:
            if self._is_closing:
                ticket.end(closed_error())
                return ticket
            is_idle = not len(self._queue)
            self._queue.put(job)
            if beside:
                jobs = [job, *(Job(ticket, others, priority) for others in beside)]
                self._strands[ticket] = _Strands(jobs)
                for other in jobs[1:]:
                    self._queue.put(other)
            is_inline = self._runs_inline and priority is Priority.FAULT and is_idle
            if is_inline:
                self._begin(job)
            else:
                try:
                    self._wake()
                except RuntimeError as error:  # no thread: a limit, or the interpreter is ending
                    for each in self._jobs_of(ticket):
                        self._end(each, failure_of(transfer, error))
        if is_inline:
            self._run_to_end(job)
        return ticket

    def promote(self, ticket: LaneTicket, priority: Priority) -> None:
        with self._changed:
            for job in self._jobs_of(ticket):
                self._queue.promote(job, priority)
                if self._running and self._choose() is not None:
                    self._changed.notify_all()  # beside what is as urgent

    def cancel(self, ticket: LaneTicket) -> bool:
        """Ends a job that has not begun; True if it was one."""
        with self._changed:
            jobs = self._jobs_of(ticket)
            if not jobs or any(job.has_begun for job in jobs):
                return False
            for job in jobs:
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
                self._runs_inline and job is not None and not job.has_begun and not self._running
            )
            if is_mine and job is not None:
                self._begin(job)
            elif not ticket.is_over:
                gate = threading.Lock()
                gate.acquire()
                ticket.gates.append(gate)
        if is_mine and job is not None:
            self._run_to_end(job)
        elif gate is not None:
            interruptible(gate.acquire)

    def close(self) -> None:
        """Serves what is queued, then ends the threads. Idempotent. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            threads = list(self._threads)
            self._changed.wait_for(lambda: not len(self._queue))
        for thread in threads:
            thread.join()
        _OPEN_LANES.discard(self)

    def stop(self) -> None:
        """Ends the threads after the steps that are running, and all tickets. Blocks for that."""
        with self._changed:
            self._is_closing = self._is_stopped = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            while (job := self._queue.first()) is not None:
                self._end(job, closed_error())

    # --- inside ----------------------------------------------------------------------------------

    def _jobs_of(self, ticket: LaneTicket) -> list[Job]:
        """Its jobs that have not ended."""
        strands = self._strands.get(ticket)
        if strands is not None:
            return list(strands.jobs)
        return [ticket.job] if ticket.job is not None else []

    def _wake(self) -> None:
        while len(self._threads) < min(self._num_workers, len(self._queue)):
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:  # else the other one serves it
                    raise
                break
            self._threads.append(thread)
        self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news, _IDLE_S)
                job = None if self._is_stopped else self._choose()
                if job is None:
                    if len(self._queue) and not self._is_stopped:
                        continue  # something more urgent is still running
                    # Closing and nothing left, or idle: a forgotten lane can go.
                    self._threads.remove(threading.current_thread())
                    return
                self._begin(job)
            with contextlib.suppress(BaseException):  # the ticket has it, and others come behind
                self._step(job)

    def _has_news(self) -> bool:
        is_over = self._is_closing and not len(self._queue)
        return is_over or self._is_stopped or self._choose() is not None

    def _choose(self) -> Job | None:
        """The job whose next step may begin now; see [Note: Two workers]."""
        if len(self._running) >= self._num_workers:
            return None
        job = self._queue.first(besides=self._running)
        if job is None or any(other.priority < job.priority for other in self._running):
            return None
        return job

    def _begin(self, job: Job) -> None:
        job.has_begun = True
        self._running.append(job)

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
                self._running.remove(job)
                # Where one is left, this thread takes it, and waking others would cost it time.
                if stays_busy or len(self._queue) - len(self._running) > 1:
                    self._changed.notify_all()
        if interrupt is not None:
            raise interrupt
        return not is_last

    def _end(self, job: Job, error: TransferError | None) -> None:
        strands = self._strands.get(job.ticket)
        if strands is not None:
            strands.error = error = strands.error or error
            strands.jobs.remove(job)
        if strands is None or not strands.jobs:
            # First: a child forked in between finds what is not over queued.
            job.ticket.end(error)
            self._strands.pop(job.ticket, None)
        self._queue.remove(job)
        if self._is_closing:
            self._changed.notify_all()


class _Strands:
    """The jobs of one ticket that have not ended, and the first error of one that has."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.error: TransferError | None = None


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
        lane._queue, lane._threads, lane._running = LaneQueue(), [], []
        lane._strands, lane._is_closing = {}, True
    _OPEN_LANES.clear()


def _stop_at_exit() -> None:
    """No step runs into the end of the interpreter, which would tear its thread out of C++ code."""
    for lane in list(_OPEN_LANES):
        lane.stop()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop_at_exit)
