"""Steps of lanes that note when they run, and stop where a test wants them to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer

if TYPE_CHECKING:
    from tvm_pager.transfer.lane_queue import LaneTicket

FAULT, WRITE_BACK, PREFETCH = Priority
PATIENCE_S = 20.0  # for what takes a moment; nothing waits so long unless it is broken


class Gate:
    """Stops a step inside, until the test lets it go on."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._let = threading.Semaphore(0)

    def pass_through(self) -> None:
        self._entered.release()
        assert self._let.acquire(timeout=PATIENCE_S)

    def wait_inside(self) -> None:
        """Returns as soon as one more step is inside."""
        assert self._entered.acquire(timeout=PATIENCE_S)

    def let_go(self, num_steps: int = 1) -> None:
        self._let.release(num_steps)


class Memory:
    """A page's memory that can be watched dying."""


def a_transfer(memory: object | None = None) -> Transfer:
    return Transfer(7, Lane.H2D, (Piece(0, 0, 0, 4096),), memory)


def steps(
    name: str,
    log: list[str],
    num_steps: int = 1,
    gate: Gate | None = None,
    error: BaseException | None = None,
) -> Iterator[bool]:
    """Notes its name at each step; the last one raises `error` if there is one."""
    for index in range(num_steps):
        log.append(name)
        if gate is not None:
            gate.pass_through()
        if error is not None and index == num_steps - 1:
            raise error
        yield index == num_steps - 1


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "never"
        time.sleep(0.0005)


def over(ticket: LaneTicket) -> LaneTicket:
    """Waits without making the ticket urgent."""
    until(ticket.done)
    return ticket


def still_waits(future: Future[None]) -> bool:
    time.sleep(0.02)
    return not future.done()


# Part of a script with `lane`, `tickets`, `a_transfer` and `stuck`: a child that is forked now
# waits for nothing.
FORK_AND_LOOK = """
child = os.fork()
if child == 0:
    signal.alarm(20)
    for ticket in tickets + [lane.submit(a_transfer(), stuck(), Priority.FAULT)]:
        assert ticket.done()
        assert not lane.cancel(ticket)
        try:
            ticket.wait()
        except TransferError as error:
            assert error.errno == errno.EBADF, error
        else:
            raise AssertionError("no error")
    lane.close()
    print("child: fine", flush=True)
    raise SystemExit
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
