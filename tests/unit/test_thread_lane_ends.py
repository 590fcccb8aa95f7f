"""A lane with a thread: who runs its steps, how it ends, many threads, fork."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.interpreter import run_program
from tests.leaks import pager_threads
from tests.unit.lane_steps import (
    FAULT,
    FORK_AND_LOOK,
    PATIENCE_S,
    PREFETCH,
    WRITE_BACK,
    Gate,
    Memory,
    a_transfer,
    over,
    steps,
    still_waits,
    until,
)
from tests.unit.lane_storm import Storm
from tvm_pager.errors import TransferError
from tvm_pager.transfer import thread_lane
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.thread_lane import ThreadLane


@pytest.fixture(params=[True, False], ids=["inline", "thread"])
def lane(request: pytest.FixtureRequest) -> Iterator[ThreadLane]:
    lane = ThreadLane("test", runs_inline=request.param)
    yield lane
    lane.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# --- who runs a step ------------------------------------------------------------------------------


def noting_thread(into: list[threading.Thread], num_steps: int = 1) -> Iterator[bool]:
    for index in range(num_steps):
        into.append(threading.current_thread())
        yield index == num_steps - 1


def test_an_urgent_job_on_an_idle_lane_runs_in_the_caller() -> None:
    lane = ThreadLane("test", runs_inline=True)
    threads: list[threading.Thread] = []
    assert lane.submit(a_transfer(), noting_thread(threads, 3), FAULT).is_over
    assert threads == 3 * [threading.current_thread()]
    assert pager_threads() == [], "no thread was needed"
    lane.close()


def test_what_is_not_urgent_or_slow_runs_in_the_lanes_thread() -> None:
    threads: list[threading.Thread] = []
    for runs_inline, priority in ((True, PREFETCH), (True, WRITE_BACK), (False, FAULT)):
        lane = ThreadLane("test", runs_inline=runs_inline)
        over(lane.submit(a_transfer(), noting_thread(threads), priority))
        lane.close()
    assert [thread.name for thread in threads] == 3 * ["tvm_pager-test"]


def test_an_urgent_job_on_a_busy_lane_does_not_run_in_the_caller() -> None:
    lane = ThreadLane("test", runs_inline=True)
    gate = Gate()
    first = lane.submit(a_transfer(), steps("first", [], 1, gate), PREFETCH)
    gate.wait_inside()
    log: list[str] = []
    fault = lane.submit(a_transfer(), steps("fault", log), FAULT)
    assert (fault.is_over, log) == (False, [])
    gate.let_go()
    assert over(first).error is over(fault).error is None
    lane.close()


def test_an_inline_job_keeps_the_lane_for_all_of_its_steps(pool: ThreadPoolExecutor) -> None:
    lane = ThreadLane("test", runs_inline=True)
    gate = Gate()
    log: list[str] = []
    inline = pool.submit(lane.submit, a_transfer(), steps("inline", log, 2, gate), FAULT)
    gate.wait_inside()
    queued = lane.submit(a_transfer(), steps("queued", log), FAULT)
    waiting = pool.submit(queued.wait)
    gate.let_go()
    gate.wait_inside()
    assert still_waits(waiting)
    assert log == ["inline", "inline"]
    gate.let_go()
    inline.result(PATIENCE_S).wait()
    waiting.result(PATIENCE_S)
    lane.close()


def test_who_waits_for_a_job_that_has_not_begun_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the thread of the lane never gets to it."""
    lane = ThreadLane("test", runs_inline=True)
    monkeypatch.setattr(lane, "_wake", lambda: None)
    threads: list[threading.Thread] = []
    tickets = [lane.submit(a_transfer(), noting_thread(threads, 2), PREFETCH) for _ in range(2)]
    for ticket in reversed(tickets):
        assert not ticket.done()
        ticket.wait()
    assert threads == 4 * [threading.current_thread()]
    lane.close()


# --- its end --------------------------------------------------------------------------------------


def test_close_serves_all_that_is_queued(lane: ThreadLane, pool: ThreadPoolExecutor) -> None:
    gate = Gate()
    log: list[str] = []
    tickets = [lane.submit(a_transfer(), steps("first", log, 2, gate), PREFETCH)]
    gate.wait_inside()
    tickets += [lane.submit(a_transfer(), steps("other", log), p) for p in Priority]
    closing = pool.submit(lane.close)
    assert still_waits(closing)
    gate.let_go(2)
    closing.result(PATIENCE_S)
    assert all(ticket.is_over and ticket.error is None for ticket in tickets)
    assert len(log) == 5
    assert pager_threads() == []
    lane.close()


def test_close_waits_for_an_inline_step_of_another_thread(pool: ThreadPoolExecutor) -> None:
    lane = ThreadLane("test", runs_inline=True)
    gate = Gate()
    inline = pool.submit(lane.submit, a_transfer(), steps("inline", [], 1, gate), FAULT)
    gate.wait_inside()
    closing = pool.submit(lane.close)
    assert still_waits(closing)
    gate.let_go()
    closing.result(PATIENCE_S)
    assert inline.result(PATIENCE_S).error is None


def test_a_lane_that_was_never_used_closes_at_once(lane: ThreadLane) -> None:
    lane.close()
    assert pager_threads() == []


def test_stop_ends_the_thread_after_one_step_and_every_ticket(
    lane: ThreadLane, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    log: list[str] = []
    tickets = [lane.submit(a_transfer(), steps("first", log, 3, gate), PREFETCH)]
    gate.wait_inside()
    tickets += [lane.submit(a_transfer(), steps("other", log), p) for p in Priority]
    waiting = pool.submit(tickets[-1].wait)
    stopping = pool.submit(lane.stop)
    until(lambda: lane._is_stopped)
    assert still_waits(stopping)
    gate.let_go()
    stopping.result(PATIENCE_S)
    with pytest.raises(TransferError, match="closed"):
        waiting.result(PATIENCE_S)
    assert log == ["first"]
    assert pager_threads() == []
    for ticket in tickets:
        assert ticket.done()
        with pytest.raises(TransferError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.EBADF
    lane.close()


@pytest.mark.parametrize("priority", Priority)
def test_what_comes_after_close_fails(lane: ThreadLane, priority: Priority) -> None:
    log: list[str] = []
    lane.close()
    ticket = lane.submit(a_transfer(Memory()), steps("late", log), priority)
    assert ticket.done()
    assert ticket.transfer.memory is None
    assert not lane.cancel(ticket)
    for _ in range(2):
        with pytest.raises(TransferError, match="closed") as caught:
            ticket.wait()
        assert caught.value.errno == errno.EBADF
    assert log == []
    assert pager_threads() == []


def test_the_thread_of_a_forgotten_lane_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 0.02)
    lane = ThreadLane("test", runs_inline=False)
    watch = weakref.ref(lane)
    gate = Gate()
    ticket = lane.submit(a_transfer(), steps("a", [], 1, gate), PREFETCH)
    gate.wait_inside()
    (thread,) = pager_threads()
    gate.let_go()
    over(ticket)
    del lane, ticket
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    gc.collect()
    assert watch() is None


def test_an_idle_lane_gets_a_new_thread(monkeypatch: pytest.MonkeyPatch, lane: ThreadLane) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 0.002)
    log: list[str] = []
    rng = random.Random(0)
    for _ in range(200):  # often enough to come at any moment of the thread's end
        over(lane.submit(a_transfer(), steps("a", log), PREFETCH))
        time.sleep(rng.uniform(0.001, 0.004))
    assert len(log) == 200


# --- many threads ---------------------------------------------------------------------------------


def test_many_threads_share_a_lane(lane: ThreadLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 0.005)
    storm = Storm(lane, 2.5)
    storm.run(num_threads=8)
    assert storm.num_jobs > 100
    assert storm.most_inside == 1


# --- fork -----------------------------------------------------------------------------------------

_FORK = (
    """
import errno, os, signal, sys, threading
from tvm_pager.errors import TransferError
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer
from tvm_pager.transfer.thread_lane import ThreadLane

runs_inline = sys.argv[1] == "True"
queued, in_flight, inside, let = (threading.Event() for _ in range(4))

def a_transfer():
    return Transfer(7, Lane.H2N, (Piece(0, 0, 0, 4096),), None)

def half_done():
    queued.wait()
    try:
        yield False
        yield True
    finally:
        in_flight.wait()  # as for I/O whose threads no child has

def stuck():
    inside.set()
    let.wait()
    yield True

lane = ThreadLane("test", runs_inline=runs_inline)
half = lane.submit(a_transfer(), half_done(), Priority.PREFETCH)
while not half.job.has_begun:
    pass
tickets = [half, lane.submit(a_transfer(), stuck(), Priority.FAULT)]
queued.set()
inside.wait()
tickets.append(lane.submit(a_transfer(), stuck(), Priority.PREFETCH))
"""
    + FORK_AND_LOOK
    + """
let.set()
in_flight.set()
lane.close()
for ticket in tickets:
    ticket.wait()
print("parent: fine")
"""
)


@pytest.mark.parametrize("runs_inline", [True, False])
def test_a_forked_child_waits_for_nothing(runs_inline: bool) -> None:
    """It has none of the threads; the parent goes on as if nothing had been."""
    result = run_program(_FORK, runs_inline, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["child: fine", "parent: fine"]
