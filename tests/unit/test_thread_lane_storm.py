"""A lane with two workers under many threads, and in a forked child."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interpreter import run_program
from tests.unit.lane_steps import FORK_AND_LOOK
from tests.unit.lane_storm import Storm
from tvm_pager.transfer import thread_lane
from tvm_pager.transfer.thread_lane import ThreadLane


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    lane = ThreadLane("test", runs_inline=False, num_workers=2)
    yield lane
    lane.close()


# --- many threads ---------------------------------------------------------------------------------


def test_many_threads_share_two_workers(lane: ThreadLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_lane, "_IDLE_S", 0.005)
    storm = Storm(lane, 2.0)
    storm.run(num_threads=6)
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
