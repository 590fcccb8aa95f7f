"""A lane with a thread: who goes first, cancelling, failures."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.unit.lane_steps import (
    FAULT,
    PATIENCE_S,
    PREFETCH,
    WRITE_BACK,
    Gate,
    Memory,
    a_transfer,
    over,
    steps,
    still_waits,
)
from tvm_pager.errors import TransferError
from tvm_pager.transfer import thread_lane
from tvm_pager.transfer.thread_lane import ThreadLane

if TYPE_CHECKING:
    from tvm_pager.transfer.lane_queue import LaneTicket
    from tvm_pager.transfer.protocol import Priority


@pytest.fixture(params=[True, False], ids=["inline", "thread"])
def lane(request: pytest.FixtureRequest) -> Iterator[ThreadLane]:
    lane = ThreadLane("test", runs_inline=request.param)
    yield lane
    lane.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# --- order ----------------------------------------------------------------------------------------


def test_a_fault_waits_for_one_step_of_what_was_queued_before_it(lane: ThreadLane) -> None:
    log: list[str] = []
    gate = Gate()
    first = lane.submit(a_transfer(), steps("first", log, 3, gate), PREFETCH)
    gate.wait_inside()
    others = [lane.submit(a_transfer(), steps("other", log, 2), PREFETCH) for _ in range(3)]
    fault = lane.submit(a_transfer(), steps("fault", log, 2), FAULT)
    gate.let_go()
    fault.wait()
    gate.wait_inside()
    assert log == ["first", "fault", "fault", "first"]
    gate.let_go(2)
    for ticket in (first, *others):
        assert over(ticket).error is None
    assert log[4:] == ["first"] + 6 * ["other"]


def test_write_backs_come_between_faults_and_prefetches(lane: ThreadLane) -> None:
    log: list[str] = []
    gate = Gate()
    lane.submit(a_transfer(), steps("first", log, 1, gate), PREFETCH)
    gate.wait_inside()
    tickets = [
        lane.submit(a_transfer(), steps(priority.name, log, 2), priority)
        for priority in (PREFETCH, WRITE_BACK, FAULT, WRITE_BACK)
    ]
    gate.let_go()
    for ticket in tickets:
        over(ticket)
    expected = ["FAULT"] * 2 + ["WRITE_BACK"] * 4 + ["PREFETCH"] * 2
    assert log == ["first", *expected]


def test_promotion_moves_a_queued_job_up_and_never_down(lane: ThreadLane) -> None:
    log: list[str] = []
    gate = Gate()
    lane.submit(a_transfer(), steps("first", log, 1, gate), PREFETCH)
    gate.wait_inside()
    names = {"a": PREFETCH, "b": PREFETCH, "c": WRITE_BACK, "d": PREFETCH}
    tickets = {
        name: lane.submit(a_transfer(), steps(name, log), priority)
        for name, priority in names.items()
    }
    lane.promote(tickets["d"], FAULT)
    lane.promote(tickets["b"], WRITE_BACK)
    lane.promote(tickets["d"], PREFETCH)
    gate.let_go()
    for ticket in tickets.values():
        over(ticket)
    assert log == ["first", "d", "b", "c", "a"]
    lane.promote(tickets["a"], FAULT)  # of what is over: nothing


def test_waiting_for_a_queued_job_makes_it_urgent(
    lane: ThreadLane, pool: ThreadPoolExecutor
) -> None:
    log: list[str] = []
    gate = Gate()
    lane.submit(a_transfer(), steps("first", log, 1, gate), PREFETCH)
    gate.wait_inside()
    before = lane.submit(a_transfer(), steps("before", log), WRITE_BACK)
    wanted = lane.submit(a_transfer(), steps("wanted", log), PREFETCH)
    waiting = pool.submit(wanted.wait)
    while wanted.job is not None and wanted.job.priority is not FAULT:
        time.sleep(0.0005)
    gate.let_go()
    waiting.result(PATIENCE_S)
    over(before)
    assert log == ["first", "wanted", "before"]


# --- cancelling -----------------------------------------------------------------------------------


def test_what_has_not_begun_is_cancelled_at_once(lane: ThreadLane) -> None:
    log: list[str] = []
    gate = Gate()
    first = lane.submit(a_transfer(), steps("first", log, 1, gate), PREFETCH)
    gate.wait_inside()
    memory = Memory()
    watch = weakref.ref(memory)
    ticket = lane.submit(a_transfer(memory), steps("cancelled", log), PREFETCH)
    after = lane.submit(a_transfer(), steps("after", log), PREFETCH)
    del memory
    assert lane.cancel(ticket)
    assert watch() is None, "the ticket and the queue must let go of the page"
    assert ticket.done()
    assert not ticket.is_certain
    for _ in range(2):
        with pytest.raises(TransferError, match="page 7 was called off") as caught:
            ticket.wait()
        assert caught.value.errno == errno.ECANCELED
    assert not lane.cancel(ticket)
    gate.let_go()
    for other in (first, after):
        assert over(other).error is None
    assert log == ["first", "after"]


def test_what_has_begun_goes_on_to_its_end(lane: ThreadLane) -> None:
    log: list[str] = []
    gate = Gate()
    ticket = lane.submit(a_transfer(), steps("a", log, 2, gate), PREFETCH)
    gate.wait_inside()
    assert not lane.cancel(ticket)
    gate.let_go()
    gate.wait_inside()
    assert not lane.cancel(ticket), "between two steps it has begun too"
    assert not ticket.done()
    gate.let_go()
    over(ticket).wait()
    assert not lane.cancel(ticket)
    assert log == ["a", "a"]
    assert ticket.is_certain


def test_somebody_who_waits_is_told_that_it_was_cancelled(
    lane: ThreadLane, pool: ThreadPoolExecutor
) -> None:
    gate = Gate()
    lane.submit(a_transfer(), steps("first", [], 1, gate), PREFETCH)
    gate.wait_inside()
    ticket = lane.submit(a_transfer(), steps("b", []), PREFETCH)
    waiting = pool.submit(ticket.wait)
    assert still_waits(waiting)
    assert lane.cancel(ticket)
    with pytest.raises(TransferError, match="called off"):
        waiting.result(PATIENCE_S)
    gate.let_go()


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [FAULT, PREFETCH])
def test_failures_surface_in_the_ticket_at_each_wait(lane: ThreadLane, priority: Priority) -> None:
    log: list[str] = []
    problem = OSError(errno.ENOSPC, "No space left on device")
    memory = Memory()
    ticket = lane.submit(a_transfer(memory), steps("bad", log, 2, error=problem), priority)
    lengths = set()
    for _ in range(3):
        with pytest.raises(TransferError, match="4096 bytes of page 7 on lane h2d") as caught:
            ticket.wait()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.__cause__ is problem
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1, "tracebacks pile up"
    assert ticket.transfer.memory is None
    assert not ticket.is_certain
    good = lane.submit(a_transfer(), steps("good", log), priority)
    good.wait()
    assert log == ["bad", "bad", "good"]


def test_a_transfer_error_stays_what_it_is(lane: ThreadLane) -> None:
    problem = TransferError("the disk is gone", errno.EIO)
    ticket = lane.submit(a_transfer(), steps("bad", [], error=problem), PREFETCH)
    with pytest.raises(TransferError) as caught:
        ticket.wait()
    assert caught.value is problem


@pytest.mark.parametrize("priority", [FAULT, PREFETCH])
@pytest.mark.parametrize("problem", [OSError(errno.EIO, "x"), TransferError("x", errno.EIO)])
def test_a_failure_keeps_no_page_alive(
    lane: ThreadLane, priority: Priority, problem: Exception
) -> None:
    """A ticket with its error may be kept; the frames of the steps that failed hold the page."""
    memory = Memory()
    watch = weakref.ref(memory)

    def failing(memory: Memory) -> Iterator[bool]:
        yield memory is None
        raise problem

    gc.collect()
    gc.disable()
    try:
        ticket = lane.submit(a_transfer(memory), failing(memory), priority)
        del memory
        over(ticket)
        with pytest.raises(TransferError):
            ticket.wait()
        deadline_s = time.monotonic() + 1
        while watch() is not None and time.monotonic() < deadline_s:
            time.sleep(0.001)  # the lane's thread is on its way out of the step
        assert watch() is None
    finally:
        gc.enable()


def test_an_interrupt_inside_an_inline_step_reaches_the_caller_and_fails_the_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = ThreadLane("test", runs_inline=True)
    tickets: list[LaneTicket] = []
    real = thread_lane.LaneTicket

    def remember(*args: object) -> LaneTicket:
        tickets.append(real(*args))  # type: ignore[arg-type]
        return tickets[-1]

    monkeypatch.setattr(thread_lane, "LaneTicket", remember)
    with pytest.raises(KeyboardInterrupt):
        lane.submit(a_transfer(Memory()), steps("a", [], 2, error=KeyboardInterrupt()), FAULT)
    assert tickets[0].done()
    assert tickets[0].transfer.memory is None
    with pytest.raises(TransferError, match="KeyboardInterrupt"):
        tickets[0].wait()
    log: list[str] = []
    lane.submit(a_transfer(), steps("next", log), FAULT).wait()
    over(lane.submit(a_transfer(), steps("queued", log), PREFETCH)).wait()
    lane.close()
    assert log == ["next", "queued"]


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_nothing_that_a_step_raises_ends_the_lanes_thread(
    lane: ThreadLane, problem: BaseException
) -> None:
    ticket = lane.submit(a_transfer(), steps("bad", [], error=problem), PREFETCH)
    with pytest.raises(TransferError, match=type(problem).__name__):
        over(ticket).wait()
    log: list[str] = []
    assert over(lane.submit(a_transfer(), steps("good", log), PREFETCH)).error is None
    assert log == ["good"]


def test_a_thread_that_cannot_be_started_fails_the_ticket(
    lane: ThreadLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        ticket = lane.submit(a_transfer(Memory()), steps("a", []), PREFETCH)
    with pytest.raises(TransferError, match="can't start new thread"):
        ticket.wait()
    assert ticket.transfer.memory is None
    log: list[str] = []
    over(lane.submit(a_transfer(), steps("later", log), PREFETCH)).wait()
    assert log == ["later"]
