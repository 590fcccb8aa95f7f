"""Many threads at one lane: whatever they do with its transfers, each step runs once, in order."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.unit.lane_steps import PATIENCE_S, a_transfer
from tvm_pager.errors import TransferError
from tvm_pager.transfer.protocol import Priority

if TYPE_CHECKING:
    from tvm_pager.transfer.lane_queue import LaneTicket
    from tvm_pager.transfer.thread_lane import ThreadLane


class Storm:
    """Submits, promotes, cancels, looks and waits from several threads for some seconds."""

    def __init__(self, lane: ThreadLane, seconds: float) -> None:
        self._lane = lane
        self._seconds = seconds
        self._lock = threading.Lock()
        self._num_inside = 0
        self.most_inside = 0  # steps at a time
        self.num_jobs = 0

    def run(self, num_threads: int) -> None:
        """Raises what went wrong in any of the threads."""
        self._end_s = time.monotonic() + self._seconds
        with ThreadPoolExecutor(num_threads) as pool:
            for future in [pool.submit(self._blow, seed) for seed in range(num_threads)]:
                future.result(PATIENCE_S + self._seconds)

    def _blow(self, seed: int) -> None:
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
            lambda ticket, rng: ticket.is_certain,
        ]

    def _finish(self, ticket: LaneTicket, log: list[int], num_steps: int) -> None:
        code = None
        try:
            ticket.wait()
        except TransferError as error:
            code = error.errno
        assert ticket.done()
        assert code in (None, errno.EIO, errno.ECANCELED), ticket.error
        assert log == ([] if code == errno.ECANCELED else list(range(num_steps)))
        with self._lock:
            self.num_jobs += 1
