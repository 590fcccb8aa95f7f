"""A lane with two workers: what runs side by side, what does not, and how it ends."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest

from tests.leaks import pager_threads
from tests.unit.lane_steps import (
    FAULT,
    PATIENCE_S,
    PREFETCH,
    Gate,
    Memory,
    a_transfer,
    over,
    steps,
    still_waits,
    until,
)
from tvm_pager.errors import TransferError
from tvm_pager.transfer import thread_lane
from tvm_pager.transfer.lane_queue import Job, LaneQueue, LaneTicket
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.thread_lane import ThreadLane

A_MOMENT_S = 0.02  # long enough for a thread that is free to take a job


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    lane = ThreadLane("test", runs_inline=False, num_workers=2)
    yield lane
    lane.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Pair:
    """Two prefetches whose first steps have begun, and are held there, each by its own gate."""

    def __init__(self, lane: ThreadLane, log: list[str], num_steps: int = 1) -> None:
        self.gates = [Gate(), Gate()]
        self.tickets = [
            lane.submit(a_transfer(), steps(name, log, num_steps, gate), PREFETCH)
            for name, gate in zip(("one", "two"), self.gates, strict=True)
        ]
        self.wait_inside()

    def wait_inside(self) -> None:
        for gate in self.gates:
            gate.wait_inside()

    def let_go(self, num_steps: int = 1) -> None:
        for gate in self.gates:
            gate.let_go(num_steps)


# --- side by side ---------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", Priority)
def test_two_transfers_proceed_at_the_same_time_and_a_third_waits(
    lane: ThreadLane, priority: Priority
) -> None:
    log: list[str] = []
    gate = Gate()
    tickets = [lane.submit(a_transfer(), steps(n, log, 1, gate), priority) for n in "abc"]
    for _ in range(2):
        gate.wait_inside()
    time.sleep(A_MOMENT_S)
    assert sorted(log) == ["a", "b"], "the oldest begin first"
    gate.let_go()
    gate.wait_inside()
    assert log[2] == "c"
    gate.let_go(2)
    for ticket in tickets:
        assert over(ticket).error is None


def test_one_transfer_keeps_one_worker_and_the_order_of_its_steps(lane: ThreadLane) -> None:
    running: list[int] = []
    seen: list[int] = []

    def careful() -> Iterator[bool]:
        for index in range(20):
            assert not running, "two steps of one transfer at a time"
            running.append(index)
            seen.append(index)
            time.sleep(0.001)
            running.clear()
            yield index == 19

    ticket = lane.submit(a_transfer(), careful(), PREFETCH)
    others = [lane.submit(a_transfer(), steps("other", [], 3), PREFETCH) for _ in range(3)]
    for each in (ticket, *others):
        assert over(each).error is None
    assert seen == list(range(20))


def test_one_job_at_a_time_needs_one_thread(lane: ThreadLane) -> None:
    for _ in range(3):
        over(lane.submit(a_transfer(), steps("a", [], 2), PREFETCH))
    assert len(pager_threads()) == 1


# --- who goes first -------------------------------------------------------------------------------


def test_a_fault_waits_for_one_step_and_then_has_the_lane_to_itself(lane: ThreadLane) -> None:
    """Prefetches would take half of the disk from it, chunk by chunk, until it is done."""
    log: list[str] = []
    pair = Pair(lane, log, 2)
    own = Gate()
    fault = lane.submit(a_transfer(), steps("fault", log, 3, own), FAULT)
    pair.gates[1].let_go()
    own.wait_inside()
    pair.gates[0].let_go()
    time.sleep(A_MOMENT_S)
    own.let_go(3)
    pair.wait_inside()  # both at once, or this never comes
    pair.let_go()
    for ticket in (fault, *pair.tickets):
        assert over(ticket).error is None
    assert log[2:5] == 3 * ["fault"], "a prefetch went on beside the fault"
    assert sorted(log[5:]) == ["one", "two"]


def test_faults_run_side_by_side(lane: ThreadLane) -> None:
    log: list[str] = []
    pair = Pair(lane, log)
    own = Gate()
    faults = [lane.submit(a_transfer(), steps("fault", log, 1, own), FAULT) for _ in range(2)]
    pair.let_go()
    for _ in range(2):
        own.wait_inside()
    own.let_go(2)
    for ticket in (*faults, *pair.tickets):
        assert over(ticket).error is None


def test_a_transfer_that_becomes_urgent_in_a_step_has_the_lane_to_itself(
    lane: ThreadLane,
) -> None:
    log: list[str] = []
    pair = Pair(lane, log, 2)
    one, two = pair.gates
    lane.promote(pair.tickets[0], FAULT)
    two.let_go()
    time.sleep(A_MOMENT_S)
    assert sorted(log) == ["one", "two"]
    one.let_go()
    one.wait_inside()
    time.sleep(A_MOMENT_S)
    assert log[2:] == ["one"]
    one.let_go()
    two.wait_inside()
    two.let_go()
    for ticket in pair.tickets:
        assert over(ticket).error is None


def test_promotion_lets_a_job_run_beside_an_urgent_one_at_once(
    lane: ThreadLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 3 * PATIENCE_S)  # no clock helps
    gate, own = Gate(), Gate()
    fault = lane.submit(a_transfer(), steps("fault", [], 1, gate), FAULT)
    gate.wait_inside()
    other = lane.submit(a_transfer(), steps("other", [], 1, own), PREFETCH)
    time.sleep(A_MOMENT_S)  # the second worker has looked, and waits
    lane.promote(other, FAULT)
    own.wait_inside()
    own.let_go()
    assert over(other).error is None
    assert not fault.done()
    gate.let_go()
    over(fault)


def test_the_queue_passes_over_what_is_running_and_keeps_it() -> None:
    lane = ThreadLane("test", runs_inline=False)
    queue = LaneQueue()
    jobs = [Job(LaneTicket(a_transfer(), lane), iter(()), PREFETCH) for _ in range(3)]
    for job in jobs:
        queue.put(job)
    assert queue.first(besides=[jobs[0]]) is jobs[1]
    assert queue.first(besides=jobs[:2]) is jobs[2]
    assert queue.first(besides=jobs) is None
    assert queue.first() is jobs[0]
    queue.promote(jobs[2], FAULT)
    assert queue.first(besides=[jobs[2]]) is jobs[0]
    assert queue.first() is jobs[2]
    queue.remove(jobs[2])
    assert queue.first(besides=[jobs[0]]) is jobs[1]


# --- strands --------------------------------------------------------------------------------------


class Strands:
    """A transfer of two strands, each with a gate of its own; `errors` are what they end with."""

    def __init__(self, lane: ThreadLane, *errors: Exception | None) -> None:
        self.gates = [Gate(), Gate()]
        first, second = (
            steps("strand", [], 1, gate, error=error)
            for gate, error in zip_longest(self.gates, errors)
        )
        self.ticket = lane.submit(a_transfer(Memory()), first, PREFETCH, [second])


def test_both_workers_carry_one_transfer_and_its_ticket_ends_with_the_last(
    lane: ThreadLane,
) -> None:
    strands = Strands(lane)
    for gate in strands.gates:
        gate.wait_inside()
    strands.gates[1].let_go()
    time.sleep(A_MOMENT_S)
    assert not strands.ticket.done()
    assert strands.ticket.transfer.memory is not None, "a strand uses it"
    strands.gates[0].let_go()
    assert over(strands.ticket).error is None
    assert strands.ticket.transfer.memory is None


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_a_strand_shows_when_the_others_have_ended(
    lane: ThreadLane, failing: int
) -> None:
    problem = OSError(errno.EIO, "Input/output error")
    strands = Strands(lane, *(problem if index == failing else None for index in range(2)))
    for gate in strands.gates:
        gate.wait_inside()
    strands.gates[failing].let_go()
    time.sleep(A_MOMENT_S)
    assert not strands.ticket.done()
    strands.gates[1 - failing].let_go()
    error = over(strands.ticket).error
    assert error is not None
    assert error.errno == errno.EIO


def test_a_transfer_with_one_strand_begun_goes_on_and_one_with_none_is_cancelled(
    lane: ThreadLane,
) -> None:
    gate = Gate()
    busy = lane.submit(a_transfer(), steps("busy", [], 1, gate), PREFETCH)
    gate.wait_inside()
    begun, queued = Strands(lane), Strands(lane)
    begun.gates[0].wait_inside()
    assert [lane.cancel(ticket) for ticket in (begun.ticket, queued.ticket)] == [False, True]
    assert queued.ticket.transfer.memory is None
    with pytest.raises(TransferError, match="called off"):
        queued.ticket.wait()
    gate.let_go()
    for strand in begun.gates:
        strand.let_go()
    assert over(begun.ticket).error is over(busy).error is None


def test_promotion_moves_all_strands_up(lane: ThreadLane) -> None:
    pair = Pair(lane, [])
    log: list[str] = []
    early = lane.submit(a_transfer(), steps("early", log), PREFETCH)
    late = lane.submit(a_transfer(), steps("late", log), PREFETCH, [steps("late", log)])
    lane.promote(late, FAULT)
    pair.let_go()
    for ticket in (early, late, *pair.tickets):
        assert over(ticket).error is None
    assert log == ["late", "late", "early"]


# --- cancelling, failures, the end ----------------------------------------------------------------


def test_only_what_neither_worker_has_begun_is_cancelled(lane: ThreadLane) -> None:
    log: list[str] = []
    pair = Pair(lane, log)
    third = lane.submit(a_transfer(), steps("third", log), PREFETCH)
    assert [lane.cancel(ticket) for ticket in (*pair.tickets, third)] == [False, False, True]
    with pytest.raises(TransferError, match="called off"):
        third.wait()
    pair.let_go()
    for ticket in pair.tickets:
        assert over(ticket).error is None
    assert sorted(log) == ["one", "two"]


def test_a_failure_is_that_of_its_ticket_alone(lane: ThreadLane) -> None:
    gate = Gate()
    problem = OSError(errno.EIO, "Input/output error")
    bad = lane.submit(a_transfer(), steps("bad", [], 1, gate, error=problem), PREFETCH)
    good = lane.submit(a_transfer(), steps("good", [], 2, gate), PREFETCH)
    for _ in range(2):
        gate.wait_inside()
    gate.let_go(3)
    with pytest.raises(TransferError) as caught:
        bad.wait()
    assert caught.value.errno == errno.EIO
    assert over(good).error is None


def test_close_serves_everything_and_ends_both_workers(
    lane: ThreadLane, pool: ThreadPoolExecutor
) -> None:
    log: list[str] = []
    pair = Pair(lane, log, 2)
    others = [lane.submit(a_transfer(), steps("other", log, 2), p) for p in Priority]
    closing = pool.submit(lane.close)
    pair.gates[0].let_go(2)
    assert still_waits(closing)
    pair.gates[1].let_go(2)
    closing.result(PATIENCE_S)
    assert all(ticket.is_over and ticket.error is None for ticket in (*pair.tickets, *others))
    assert len(log) == 10
    assert pager_threads() == []


def test_stop_waits_for_the_step_of_each_worker_and_ends_every_ticket(
    lane: ThreadLane, pool: ThreadPoolExecutor
) -> None:
    log: list[str] = []
    pair = Pair(lane, log, 2)
    others = [lane.submit(a_transfer(), steps("other", log), p) for p in Priority]
    stopping = pool.submit(lane.stop)
    until(lambda: lane._is_stopped)
    pair.gates[0].let_go()
    assert still_waits(stopping)
    pair.gates[1].let_go()
    stopping.result(PATIENCE_S)
    assert sorted(log) == ["one", "two"]
    assert pager_threads() == []
    for ticket in (*pair.tickets, *others):
        with pytest.raises(TransferError, match="closed"):
            ticket.wait()


def test_idle_workers_end_and_come_back(monkeypatch: pytest.MonkeyPatch, lane: ThreadLane) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 0.002)
    log: list[str] = []
    rng = random.Random(0)
    for _ in range(150):  # often enough to come at any moment of a thread's end
        tickets = [lane.submit(a_transfer(), steps("a", log), PREFETCH) for _ in range(3)]
        for ticket in tickets:
            over(ticket)
        time.sleep(rng.uniform(0.001, 0.004))
    assert len(log) == 450


def test_a_worker_that_waits_for_an_urgent_job_does_not_go(
    monkeypatch: pytest.MonkeyPatch, lane: ThreadLane
) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 0.002)
    log: list[str] = []
    pair = Pair(lane, log, 2)
    own = Gate()
    fault = lane.submit(a_transfer(), steps("fault", log, 1, own), FAULT)
    pair.let_go()
    own.wait_inside()
    time.sleep(A_MOMENT_S)
    own.let_go()
    pair.wait_inside()
    pair.let_go()
    for ticket in (fault, *pair.tickets):
        assert over(ticket).error is None


def test_one_worker_serves_all_where_no_second_thread_can_be_started(
    lane: ThreadLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    gate = Gate()
    first = lane.submit(a_transfer(), steps("first", log, 1, gate), PREFETCH)
    gate.wait_inside()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = lane.submit(a_transfer(), steps("second", log), PREFETCH)
    assert not second.done()
    gate.let_go()
    assert over(first).error is over(second).error is None
    assert log == ["first", "second"]
