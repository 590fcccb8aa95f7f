"""The queue of a lane against a plain list: most urgent first, oldest first within one priority."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tvm_pager.transfer.lane_queue import Job, LaneQueue, LaneTicket
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer

PRIORITIES = st.sampled_from(list(Priority))
INDICES = st.integers(0, 1 << 16)


class NoLane:
    """Stands behind tickets that nobody waits for."""

    def promote(self, ticket: LaneTicket, priority: Priority) -> None:
        raise AssertionError

    def join(self, ticket: LaneTicket) -> None:
        raise AssertionError

    def look(self, ticket: LaneTicket) -> bool:
        return False


class Memory:
    """A page's memory that can be watched dying."""


def steps_over(memory: object, num_steps: int = 1) -> Iterator[bool]:
    for index in range(num_steps):
        assert memory is not None
        yield index == num_steps - 1


def make_job(priority: Priority, num_steps: int = 1) -> Job:
    memory = Memory()
    transfer = Transfer(1, Lane.H2D, (Piece(0, 0, 0, 1),), memory)
    return Job(LaneTicket(transfer, NoLane()), steps_over(memory, num_steps), priority)


def memory_of(job: Job) -> weakref.ref[Memory]:
    memory = job.ticket.transfer.memory
    assert isinstance(memory, Memory)
    return weakref.ref(memory)


@dataclass
class Entry:
    job: Job
    priority: Priority
    age: int


class QueueAgainstList(RuleBasedStateMachine):
    """The model keeps a list and looks for the minimum of (priority, age)."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LaneQueue()
        self.entries: list[Entry] = []
        self.gone: list[Job] = []
        self.clock = 0

    @rule(priority=PRIORITIES)
    def put(self, priority: Priority) -> None:
        job = make_job(priority)
        self.queue.put(job)
        self.entries.append(Entry(job, priority, self.clock))
        self.clock += 1

    @rule(index=INDICES, priority=PRIORITIES)
    def promote(self, index: int, priority: Priority) -> None:
        if self.entries:
            entry = self.entries[index % len(self.entries)]
            self.queue.promote(entry.job, priority)
            entry.priority = min(entry.priority, priority)

    @rule(index=INDICES, priority=PRIORITIES)
    def promote_what_has_gone(self, index: int, priority: Priority) -> None:
        if self.gone:
            self.queue.promote(self.gone[index % len(self.gone)], priority)

    @rule(index=INDICES)
    def remove(self, index: int) -> None:
        if self.entries:
            self._remove(self.entries[index % len(self.entries)])

    @rule()
    def serve_first(self) -> None:
        if self.entries:
            first = min(self.entries, key=lambda entry: (entry.priority, entry.age))
            assert self.queue.first() is first.job
            self._remove(first)

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.entries)
        for entry in self.entries:
            assert entry.job.priority is entry.priority
            assert entry.job.ticket.job is entry.job
        assert all(job.ticket.job is None for job in self.gone)
        # Looking throws stale entries away, so it is not done after each rule.
        if self.clock % 3 == 0:
            expected = min(self.entries, key=lambda e: (e.priority, e.age), default=None)
            assert self.queue.first() is (None if expected is None else expected.job)

    def teardown(self) -> None:
        while self.entries:
            self.serve_first()
        assert self.queue.first() is None

    def _remove(self, entry: Entry) -> None:
        self.queue.remove(entry.job)
        self.entries.remove(entry)
        self.gone.append(entry.job)


TestQueueAgainstList = QueueAgainstList.TestCase


def test_promotion_keeps_the_age() -> None:
    queue = LaneQueue()
    first, second, third = (make_job(p) for p in (Priority.PREFETCH, Priority.FAULT, Priority(0)))
    for job in (first, second, third):
        queue.put(job)
    queue.promote(first, Priority.FAULT)
    assert queue.first() is first, "it had waited longest"
    queue.remove(first)
    assert queue.first() is second


def test_a_removed_job_is_let_go_whatever_is_before_it_in_the_queue() -> None:
    """A transfer that was called off must not keep its page alive until its turn would come."""
    queue = LaneQueue()
    queue.put(make_job(Priority.FAULT))
    job = make_job(Priority.PREFETCH)
    queue.put(job)
    memory = memory_of(job)
    queue.remove(job)
    job.ticket.end()
    del job
    gc.disable()
    try:
        assert memory() is None
    finally:
        gc.enable()


def test_the_steps_are_run_to_their_end() -> None:
    """What the last step left in flight is waited for behind its `yield`."""
    has_ended = False

    def steps() -> Iterator[bool]:
        nonlocal has_ended
        yield False
        yield True
        has_ended = True

    job = make_job(Priority.FAULT)
    job.steps = steps()
    assert not job.has_begun
    assert not job.step()
    assert job.has_begun
    assert not has_ended
    assert job.step()
    assert has_ended


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_job_of_one_step_or_none_ends_with_the_first(num_steps: int) -> None:
    assert make_job(Priority.FAULT, num_steps).step()
