"""A lane with two workers under many threads, and in a forked child."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.interpreter import run_program
from tests.unit.lane_steps import FORK_AND_LOOK, PATIENCE_S, a_transfer
from tvm_pager.errors import TransferError
from tvm_pager.transfer import thread_lane
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.thread_lane import ThreadLane

if TYPE_CHECKING:
    from tvm_pager.transfer.lane_queue import LaneTicket


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    lane = ThreadLane("test", runs_inline=False, num_workers=2)
    yield lane
    lane.close()


# --- many threads ---------------------------------------------------------------------------------


class Storm:
    """Submits, promotes, cancels, looks and waits from several threads for some seconds."""

    def __init__(self, lane: ThreadLane, seconds: float) -> None:
        self._lane = lane
        self._end_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._num_inside = 0
        self.most_inside = 0
        self.num_jobs = 0

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[LaneTicket, list[int], int]] = []
        while time.monotonic() < self._end_s:
            log: list[int] = []
            num_steps = rng.randint(1, 4)
            job = self._steps(log, num_steps, rng.random() < 0.1)
            ticket = self._lane.submit(a_transfer(), job, rng.choice(list(Priority)))
            held.append((ticket, log, num_steps))
            for ticket, *_ in rng.sample(held, min(3, len(held))):
                rng.choice(self._treatments())(ticket, rng)
            if len(held) > 8:
                self._finish(*held.pop(rng.randrange(len(held))))
        for entry in held:
            self._finish(*entry)

    def _steps(self, log: list[int], num_steps: int, fails: bool) -> Iterator[bool]:
        is_inside: list[None] = []
        for index in range(num_steps):
            assert not is_inside, "two steps of one transfer at a time"
            is_inside.append(None)
            with self._lock:
                self._num_inside += 1
                self.most_inside = max(self.most_inside, self._num_inside)
            time.sleep(0)
            with self._lock:
                self._num_inside -= 1
            log.append(index)
            is_inside.clear()
            if fails and index == num_steps - 1:
                raise OSError(errno.EIO, "x")
            yield index == num_steps - 1

    def _treatments(self) -> list[Callable[[LaneTicket, random.Random], object]]:
        return [
            lambda ticket, rng: self._lane.promote(ticket, rng.choice(list(Priority))),
            lambda ticket, rng: self._lane.cancel(ticket),
            lambda ticket, rng: ticket.done(),
        ]

    def _finish(self, ticket: LaneTicket, log: list[int], num_steps: int) -> None:
        code = None
        try:
            ticket.wait()
        except TransferError as error:
            code = error.errno
        assert code in (None, errno.EIO, errno.ECANCELED), ticket.error
        assert log == ([] if code == errno.ECANCELED else list(range(num_steps)))
        self.num_jobs += 1


def test_many_threads_share_two_workers(lane: ThreadLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 0.005)
    storm = Storm(lane, 2.0)
    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(storm.run, seed) for seed in range(6)]:
            future.result(PATIENCE_S + 2.0)
    assert storm.num_jobs > 100
    assert storm.most_inside == 2


# --- fork -----------------------------------------------------------------------------------------

_FORK = (
    """
import errno, os, signal, threading
from tvm_pager.errors import TransferError
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer
from tvm_pager.transfer.thread_lane import ThreadLane

inside, let = threading.Semaphore(0), threading.Semaphore(0)

def a_transfer():
    return Transfer(7, Lane.H2N, (Piece(0, 0, 0, 4096),), None)

def stuck():
    inside.release()
    let.acquire()
    yield True

lane = ThreadLane("test", runs_inline=False, num_workers=2)
tickets = [lane.submit(a_transfer(), stuck(), Priority.PREFETCH) for _ in range(3)]
for _ in range(2):
    inside.acquire()
"""
    + FORK_AND_LOOK
    + """
let.release(3)
lane.close()
for ticket in tickets:
    ticket.wait()
print("parent: fine")
"""
)


def test_a_forked_child_waits_for_neither_worker() -> None:
    result = run_program(_FORK, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["child: fine", "parent: fine"]
