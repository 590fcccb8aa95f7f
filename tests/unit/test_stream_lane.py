"""A lane over a CUDA stream, with a stream and events that the test moves on by hand."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from tests.interpreter import run_program
from tests.leaks import pager_threads
from tests.unit.hand_stream import HandEvent, HandStream
from tests.unit.lane_steps import until
from tvm_pager.errors import TransferError
from tvm_pager.transfer import stream_lane
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer
from tvm_pager.transfer.routes import CHUNK_BYTES
from tvm_pager.transfer.stream_lane import StreamLane

if TYPE_CHECKING:
    from tvm_pager.transfer.lane_queue import LaneTicket

FAULT, WRITE_BACK, PREFETCH = Priority
PATIENCE_S = 20.0
WINDOW = 2  # chunks that are not urgent on the stream


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamLane]:
    monkeypatch.setattr(torch.cuda, "Stream", HandStream)
    monkeypatch.setattr(torch.cuda, "Event", HandEvent)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(HandEvent, "is_lost", False)
    lane = StreamLane(torch.device("cuda"), "test")
    yield lane
    HandEvent.is_lost = False
    lane.close()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by himself: only what the test does moves the lane on."""
    monkeypatch.setattr(StreamLane, "_watch", lambda lane: None)


def stream_of(lane: StreamLane) -> HandStream:
    assert isinstance(lane.stream, HandStream)
    return lane.stream


def submit(
    lane: StreamLane,
    name: str,
    num_steps: int,
    priority: Priority,
    error: BaseException | None = None,
) -> LaneTicket:
    def steps() -> Iterator[bool]:
        left = num_steps
        while left:
            take = min(left, lane.chunk_bytes // CHUNK_BYTES)
            left -= take
            for _ in range(take):
                stream_of(lane).queue(name)
            if error is not None and not left:
                raise error
            yield not left

    piece = Piece(0, 0, 0, num_steps * CHUNK_BYTES)
    transfer = Transfer(7, Lane.H2D, (piece,), object())
    return lane.submit(transfer, steps(), priority)


@pytest.mark.usefixtures("still")
def test_what_is_not_urgent_is_on_the_stream_a_few_chunks_at_a_time(lane: StreamLane) -> None:
    stream = stream_of(lane)
    tickets = [submit(lane, name, 3, PREFETCH) for name in "ab"]
    assert stream.names == ["a"] * WINDOW
    assert not any(ticket.is_certain for ticket in tickets)
    lane.pump()
    assert stream.names == ["a"] * WINDOW, "nothing has ended"
    stream.end()
    lane.pump()
    assert stream.names == list("aaa")
    assert tickets[0].is_certain
    assert not tickets[0].done()
    stream.end(2)
    assert tickets[0].done()
    assert tickets[0].transfer.memory is None
    lane.pump()
    assert stream.names == list("aaabb")


@pytest.mark.usefixtures("still")
def test_a_fault_is_behind_the_window_only(lane: StreamLane) -> None:
    for name in "ab":
        submit(lane, name, 4, PREFETCH)
    fault = submit(lane, "fault", 3, FAULT)
    assert stream_of(lane).names == ["a"] * WINDOW + ["fault"] * 3
    assert fault.is_certain
    assert not fault.done()
    stream_of(lane).end(WINDOW + 3)
    fault.wait()
    lane.pump()
    assert stream_of(lane).names[WINDOW + 3 :] == ["a"] * WINDOW


@pytest.mark.usefixtures("still")
def test_the_window_grows_while_no_fault_comes_and_is_small_again_after_one(
    lane: StreamLane,
) -> None:
    stream = stream_of(lane)
    submit(lane, "a", 1000, PREFETCH)
    windows = []
    for _ in range(60):
        windows.append(len(stream.names) - stream.num_ended)
        stream.end(windows[-1])
        lane.pump()
    assert windows == sorted(windows)
    assert dict.fromkeys(windows) == dict.fromkeys((2, 4, 8))
    assert windows.count(2) == 8  # of them, the first one was put there by `submit`
    submit(lane, "fault", 1, FAULT)
    stream.end(1000)
    lane.pump()
    assert len(stream.names) - stream.num_ended == WINDOW


@pytest.mark.usefixtures("still")
def test_who_looks_puts_a_bounded_number_of_small_pages_on_the_stream(lane: StreamLane) -> None:
    def steps() -> Iterator[bool]:
        stream_of(lane).queue("a")
        yield True

    small = (Piece(0, 0, 0, 4096),)
    tickets = [
        lane.submit(Transfer(number, Lane.H2D, small, object()), steps(), PREFETCH)
        for number in range(1000)
    ]
    assert sum(ticket.is_certain for ticket in tickets) == stream_lane._MOST_STEPS
    lane.close()
    assert all(ticket.done() for ticket in tickets)


def submit_small(lane: StreamLane, name: str, error: BaseException | None = None) -> LaneTicket:
    def steps() -> Iterator[bool]:
        stream_of(lane).queue(name)
        if error is not None:
            raise error
        yield True

    piece = Piece(0, 0, 0, CHUNK_BYTES // 4)
    return lane.submit(Transfer(7, Lane.H2D, (piece,), object()), steps(), PREFETCH)


@pytest.mark.usefixtures("still")
def test_small_transfers_that_go_together_share_the_mark_behind_the_last(lane: StreamLane) -> None:
    stream = stream_of(lane)
    tickets = [submit_small(lane, "a") for _ in range(24)]
    assert sum(ticket.is_certain for ticket in tickets) == 4 * WINDOW
    stream.end(4 * WINDOW)
    lane.pump()
    assert len({id(ticket.event) for ticket in tickets[8:16]}) == WINDOW
    assert tickets[8].event is tickets[11].event
    assert tickets[11].event is not tickets[12].event
    stream.end(3)
    assert not any(ticket.done() for ticket in tickets[8:])
    stream.end(1)
    assert [ticket.done() for ticket in tickets[8:16]] == [True] * 4 + [False] * 4


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("problem", [RuntimeError("CUDA error"), KeyboardInterrupt()])
def test_who_shares_a_mark_with_a_step_that_fails_has_it_all_the_same(
    lane: StreamLane, problem: BaseException
) -> None:
    for _ in range(8):
        submit_small(lane, "first")
    good = submit_small(lane, "good")
    bad = submit_small(lane, "bad", problem)
    last = submit_small(lane, "last")
    stream_of(lane).end(8)
    with contextlib.suppress(KeyboardInterrupt):
        lane.pump()
    lane.pump()
    assert isinstance(bad.error, TransferError)
    stream_of(lane).end(3)
    assert good.done()
    assert last.done()
    assert good.error is None
    assert last.error is None


@pytest.mark.usefixtures("still")
def test_promotion_puts_all_that_is_left_on_the_stream(lane: StreamLane) -> None:
    submit(lane, "a", 2, PREFETCH)
    ticket = submit(lane, "b", 2, PREFETCH)
    middle = submit(lane, "c", 1, WRITE_BACK)
    lane.promote(ticket, FAULT)
    assert stream_of(lane).names == list("aabb")
    assert ticket.is_certain
    lane.promote(ticket, PREFETCH)
    stream_of(lane).end(4)
    lane.pump()
    assert stream_of(lane).names[4:] == ["c"]
    assert middle.is_certain


@pytest.mark.usefixtures("still")
def test_waiting_makes_urgent_and_ends_with_the_copies(lane: StreamLane) -> None:
    submit(lane, "a", 2, PREFETCH)
    ticket = submit(lane, "b", 2, PREFETCH)
    waiter = threading.Thread(target=ticket.wait)
    waiter.start()
    until(lambda: len(stream_of(lane).names) == 4)
    stream_of(lane).end(3)
    time.sleep(0.02)
    assert waiter.is_alive()
    stream_of(lane).end()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()
    assert ticket.is_over


@pytest.mark.usefixtures("still")
def test_only_what_is_not_on_the_stream_is_cancelled(lane: StreamLane) -> None:
    begun = submit(lane, "a", WINDOW + 1, PREFETCH)
    queued = submit(lane, "b", 1, PREFETCH)
    assert not lane.cancel(begun)
    assert lane.cancel(queued)
    assert not lane.cancel(queued)
    assert queued.transfer.memory is None
    with pytest.raises(TransferError, match="called off") as caught:
        queued.wait()
    assert caught.value.errno == errno.ECANCELED
    stream_of(lane).end(WINDOW)
    lane.pump()
    stream_of(lane).end()
    assert begun.done()
    assert "b" not in stream_of(lane).names


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("priority", Priority)
def test_a_step_that_fails_leaves_nothing_on_the_stream(
    lane: StreamLane, priority: Priority
) -> None:
    ticket = submit(lane, "bad", 2, priority, RuntimeError("CUDA error"))
    assert stream_of(lane).num_synchronized == 1
    assert stream_of(lane).num_ended == 2
    assert not ticket.is_certain
    for _ in range(2):
        with pytest.raises(TransferError, match="CUDA error"):
            ticket.wait()
    good = submit(lane, "good", 1, priority)
    stream_of(lane).end(9)
    good.wait()


@pytest.mark.usefixtures("still")
def test_a_lost_device_fails_the_ticket_also_for_who_only_looks(lane: StreamLane) -> None:
    seen, waited = (submit(lane, "a", 1, FAULT) for _ in range(2))
    HandEvent.is_lost = True
    assert seen.done()
    for ticket in (seen, waited):
        with pytest.raises(TransferError, match="unspecified launch failure"):
            ticket.wait()
        assert not ticket.is_certain


@pytest.mark.usefixtures("still")
def test_a_device_that_is_lost_fails_new_tickets_too(lane: StreamLane) -> None:
    HandEvent.is_lost = True
    for priority in (FAULT, PREFETCH):
        ticket = submit(lane, "a", 1, priority, RuntimeError("CUDA error: device lost"))
        with pytest.raises(TransferError, match="device lost"):
            ticket.wait()


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("priority", [FAULT, PREFETCH])
def test_a_device_lost_with_copies_on_its_stream_fails_tickets_that_come_later(
    lane: StreamLane, priority: Priority
) -> None:
    """Scenario: copies can still be queued, but nothing says any more that they have ended."""
    before = submit(lane, "before", WINDOW, PREFETCH)
    HandEvent.is_lost = True
    later = submit(lane, "later", 1, priority)
    for ticket in (before, later):
        with pytest.raises(TransferError, match="launch failure"):
            ticket.wait()


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), AssertionError("leaves the slab")])
def test_whatever_stops_a_step_its_ticket_has_failed(
    lane: StreamLane, problem: BaseException
) -> None:
    """Half of a transfer must never count as a whole one because it is looked at again."""
    submit(lane, "a", WINDOW, PREFETCH)
    ticket = submit(lane, "b", 2, PREFETCH, problem)
    with contextlib.suppress(KeyboardInterrupt):
        lane.promote(ticket, FAULT)
    stream_of(lane).end(9)
    lane.pump()
    assert ticket.done()
    with pytest.raises(TransferError, match=type(problem).__name__):
        ticket.wait()
    later = submit(lane, "later", 1, FAULT)
    stream_of(lane).end(9)
    later.wait()


@pytest.mark.usefixtures("still")
def test_chunks_that_have_ended_are_forgotten_where_nothing_is_ever_queued(
    lane: StreamLane,
) -> None:
    for _ in range(100):
        ticket = submit(lane, "a", 3, FAULT)
        stream_of(lane).end(3)
        assert ticket.done()
    assert len(lane._window) <= 1


def test_queued_transfers_go_on_while_nobody_enters_the_pager(lane: StreamLane) -> None:
    stream = stream_of(lane)
    tickets = [submit(lane, name, 3, PREFETCH) for name in "abc"]
    for num in range(WINDOW, 9):
        until(lambda num=num: len(stream.names) == num)
        stream.end()
    until(lambda: len(stream.names) == 9)
    stream.end(9)
    assert all(ticket.done() for ticket in tickets)
    assert stream.names == list("aaabbbccc")


def test_a_forgotten_lanes_thread_ends_and_a_new_one_comes(
    lane: StreamLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_lane, "_IDLE_S", 0.01)
    for _ in range(3):
        tickets = [submit(lane, "a", 2, PREFETCH) for _ in range(3)]
        while not all(ticket.done() for ticket in tickets):
            stream_of(lane).end(9)
            time.sleep(0.001)
        until(lambda: pager_threads() == [])


def test_close_puts_everything_on_the_stream_and_waits(lane: StreamLane) -> None:
    tickets = [submit(lane, name, 3, PREFETCH) for name in "abc"]
    lane.close()
    assert stream_of(lane).num_ended == 9
    assert all(ticket.done() for ticket in tickets)
    assert pager_threads() == []
    late = submit(lane, "late", 1, FAULT)
    with pytest.raises(TransferError, match="closed") as caught:
        late.wait()
    assert caught.value.errno == errno.EBADF
    lane.close()


_FORK = """
import contextlib, errno, os, signal, threading, torch
from tests.unit.test_stream_lane import HandEvent, HandStream, submit
from tvm_pager.errors import TransferError
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.stream_lane import StreamLane

torch.cuda.Stream, torch.cuda.Event = HandStream, HandEvent
torch.cuda.device = contextlib.nullcontext
lane = StreamLane(torch.device("cuda"), "test")
tickets = [submit(lane, "a", 2, Priority.FAULT)]
tickets += [submit(lane, name, 3, Priority.PREFETCH) for name in "bc"]
held, let = threading.Event(), threading.Event()

def hold():
    with lane._lock:
        held.set()
        let.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    HandEvent.is_lost = True  # no child can use CUDA
    lane.pump()
    for ticket in tickets + [submit(lane, "late", 1, Priority.FAULT)]:
        assert ticket.done()
        assert not lane.cancel(ticket)
        try:
            ticket.wait()
        except TransferError:
            pass
        else:
            raise AssertionError("no error")
    lane.close()
    print("child: fine", flush=True)
    raise SystemExit
_, status = os.waitpid(child, 0)
assert status == 0, status
let.set()
lane.close()
for ticket in tickets:
    ticket.wait()
print("parent: fine")
"""


def test_a_forked_child_waits_for_nothing() -> None:
    result = run_program(_FORK, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["child: fine", "parent: fine"]
