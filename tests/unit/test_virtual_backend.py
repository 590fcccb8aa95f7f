"""The virtual clock: hand-made cases with known times, and the laws that hold whatever happens."""

from __future__ import annotations

import errno
import itertools
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import MIB, make_hardware
from tvm_pager.errors import TransferError
from tvm_pager.transfer.protocol import Backend, Lane, Piece, Priority, Ticket, Transfer
from tvm_pager.transfer.virtual_backend import VirtualBackend, VirtualMemory, VirtualOptions

if TYPE_CHECKING:
    from tvm_pager.transfer.virtual_lane import Chunk, VirtualTicket

FREE = VirtualOptions(submit_ns=0, is_launch_bounded=False)
KB = 1000  # a page of 1000 bytes takes a microsecond of the link


def make_backend(nvme: int = 0, options: VirtualOptions = FREE, **others: object) -> VirtualBackend:
    return VirtualBackend(make_hardware(), 1 << 40, nvme, options=options, **others)


def copy(lane: Lane, nbytes: int, offset: int = 0) -> Transfer:
    source = 0 if lane.value[0] == "d" else offset
    target = 0 if lane.value[2] == "d" else offset
    memory = VirtualMemory(nbytes) if "d" in lane.value else None
    return Transfer(1, lane, (Piece(0, source, target, nbytes),), memory)


def end_of(backend: VirtualBackend, ticket: VirtualTicket) -> int:
    ticket.wait()
    assert ticket.begin_ns is not None
    assert ticket.end_ns is not None
    assert ticket.begin_ns <= ticket.end_ns <= backend.host_ns
    return ticket.end_ns


def test_it_is_a_backend_with_tickets() -> None:
    backend: Backend = make_backend()
    ticket = backend.submit(copy(Lane.D2H, KB))
    assert isinstance(ticket, Ticket)
    assert ticket.is_certain
    assert not ticket.done()


def test_a_copy_begins_behind_what_is_queued_on_the_device() -> None:
    """Scenario: 1. An operation of 500 ns. 2. A write-back: 1000 bytes, a byte a nanosecond."""
    backend = make_backend()
    backend.run("op", 10, 500)
    ticket = backend.submit(copy(Lane.D2H, KB))
    assert backend.host_ns == 10
    assert end_of(backend, ticket) == 10 + 500 + 1000
    assert ticket.begin_ns == 510


def test_two_copies_of_one_direction_follow_each_other() -> None:
    backend = make_backend()
    first, second = (backend.submit(copy(Lane.D2H, KB)) for _ in range(2))
    assert (end_of(backend, first), end_of(backend, second)) == (1000, 2000)


def test_both_directions_at_once_slow_each_other_down_while_both_are_busy() -> None:
    """Scenario: 1000 bytes out, from 600 on 1000 bytes in. 600 alone, 2 x 400 together, 600."""
    backend = make_backend()
    out = backend.submit(copy(Lane.D2H, KB))
    backend.host_ns = 600
    into = backend.submit(copy(Lane.H2D, KB))
    assert end_of(backend, out) == 600 + 2 * 400
    assert end_of(backend, into) == 1400 + 600


def test_an_operation_waits_for_its_fetch_and_the_host_does_not() -> None:
    backend = make_backend()
    backend.run("before", 10, 100)
    ticket = backend.submit(copy(Lane.H2D, KB))
    backend.order(ticket, ())
    backend.run("reader", 10, 50)
    assert backend.host_ns == 20
    assert backend.synchronize() == 110 + 1000 + 50
    assert backend.stream.stall_ns == 1000
    assert backend.stream.busy_ns == 150


def test_who_takes_the_memory_of_a_page_that_leaves_waits_for_the_copy() -> None:
    backend = make_backend()
    memory = VirtualMemory(KB)
    ticket = backend.submit(Transfer(1, Lane.D2H, (Piece(0, 0, 0, KB),), memory))
    backend.release_device(memory, tickets=(ticket,))
    assert memory.nbytes == 0
    assert backend.host_ns == 0
    backend.run("next", 10, 50)
    assert backend.synchronize() == 1050


def test_a_copy_that_is_over_delays_nobody() -> None:
    backend = make_backend()
    ticket = backend.submit(copy(Lane.H2D, KB))
    backend.host_ns = 5000
    assert ticket.done()
    backend.order(ticket, ())
    backend.run("reader", 10, 50)
    assert backend.synchronize() == 5060
    assert backend.stream.stall_ns == 0


def test_what_is_urgent_overtakes_what_is_queued_beyond_the_window() -> None:
    """Scenario: 1. 100 MiB wanted later. 2. An urgent page. Two chunks of 16 MiB are before it."""
    backend = make_backend()
    late = backend.submit(copy(Lane.H2D, 100 * MIB), Priority.PREFETCH)
    assert not late.is_certain
    urgent = backend.submit(copy(Lane.H2D, MIB))
    assert urgent.is_certain
    assert end_of(backend, urgent) == 33 * MIB
    assert end_of(backend, late) == 101 * MIB


def test_a_promoted_transfer_goes_on_the_stream_at_once() -> None:
    backend = make_backend()
    first = backend.submit(copy(Lane.H2D, 64 * MIB), Priority.PREFETCH)
    second = backend.submit(copy(Lane.H2D, 8 * MIB), Priority.PREFETCH)
    backend.order(second, ())
    assert second.is_certain
    assert not first.is_certain
    backend.run("reader", 1, 1)
    assert backend.synchronize() == (32 + 8) * MIB + 1


def test_only_what_has_not_begun_can_be_called_off() -> None:
    backend = make_backend()
    begun = backend.submit(copy(Lane.H2D, 64 * MIB), Priority.PREFETCH)
    queued = backend.submit(copy(Lane.H2D, MIB), Priority.PREFETCH)
    assert not backend.cancel(begun)
    assert backend.cancel(queued)
    assert queued.done()
    assert not queued.is_certain
    with pytest.raises(TransferError) as caught:
        queued.wait()
    assert caught.value.errno == errno.ECANCELED
    assert end_of(backend, begun) == 64 * MIB


def test_the_host_waits_for_the_disk() -> None:
    """Scenario: a page from NVMe: four nanoseconds a byte, then half of it over the link."""
    backend = make_backend(nvme=1 << 30)
    ticket = backend.submit(copy(Lane.N2D, 8192, offset=4096))
    assert not ticket.is_certain
    backend.order(ticket, ())
    assert backend.host_ns == 4 * 8192 + 4096
    backend.run("reader", 10, 50)
    assert backend.synchronize() == 4 * 8192 + 4096 + 60
    assert backend.stream.stall_ns == 4 * 8192 + 4096


def test_reads_and_writes_share_the_disk() -> None:
    backend = make_backend(nvme=1 << 30)
    down = backend.submit(copy(Lane.H2N, 8192))
    up = backend.submit(copy(Lane.N2H, 8192, offset=65536))
    assert end_of(backend, down) == end_of(backend, up) == 2 * 4 * 8192


def test_on_the_disk_each_chunk_goes_to_the_most_urgent() -> None:
    backend = make_backend(nvme=1 << 30)
    late = backend.submit(copy(Lane.H2N, 48 * MIB), Priority.WRITE_BACK)
    urgent = backend.submit(copy(Lane.H2N, MIB, offset=64 * MIB))
    assert end_of(backend, urgent) == 4 * (16 + 1) * MIB
    assert end_of(backend, late) == 4 * 49 * MIB


def test_a_launch_waits_while_a_thousand_others_have_not_begun() -> None:
    bounded = make_backend(options=VirtualOptions(submit_ns=0))
    for _ in range(2000):
        bounded.run("op", 1, 100)
    assert 2000 * 100 - 1100 * 100 < bounded.host_ns < 2000 * 100 - 900 * 100
    assert bounded.synchronize() == 1 + 2000 * 100


def test_closing_waits_for_everything_and_refuses_what_comes() -> None:
    backend = make_backend()
    ticket = backend.submit(copy(Lane.D2H, 64 * MIB), Priority.WRITE_BACK)
    backend.close()
    assert ticket.done()
    assert backend.host_ns == 64 * MIB
    with pytest.raises(TransferError, match="closed"):
        backend.submit(copy(Lane.D2H, KB)).wait()


LANES = st.sampled_from([Lane.D2H, Lane.H2D, Lane.D2N, Lane.H2N, Lane.N2D, Lane.N2H])
ACTIONS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 3000), st.integers(0, 3000)),
    st.tuples(st.just("submit"), LANES, st.integers(1, 40 * MIB), st.sampled_from(Priority)),
    st.tuples(st.sampled_from(["order", "wait", "done", "cancel", "promote"]), st.integers(0, 30)),
    st.tuples(st.just("sleep"), st.integers(0, 100 * MIB)),
)


@given(actions=st.lists(ACTIONS, max_size=40))
def test_the_laws_of_the_virtual_clock(actions: list[tuple[object, ...]]) -> None:
    """Time never goes back; no direction is faster than its rate; operations wait for fetches."""
    chunks: list[tuple[Chunk, int, int]] = []
    kernels: list[tuple[int, int]] = []
    waits: list[tuple[VirtualTicket, int]] = []  # and how many operations had been launched
    backend = make_backend(
        nvme=1 << 40,
        on_copy=lambda chunk, begin, end: chunks.append((chunk, begin, end)),
        on_kernel=lambda name, begin, end: kernels.append((begin, end)),
    )
    tickets: list[VirtualTicket] = []
    num_launched, submitted_ns = 0, {}
    for action, *values in actions:
        before = backend.host_ns
        if action == "run":
            backend.run("op", *values)
            num_launched += values[1] > 0
        elif action == "submit":
            lane, nbytes, priority = values
            ticket = backend.submit(copy(lane, nbytes), priority)
            submitted_ns[id(ticket)] = before
            tickets.append(ticket)
        elif action == "sleep":
            backend.host_ns += values[0]
        elif tickets:
            ticket = tickets[values[0] % len(tickets)]
            if action == "order" and ticket.error is None:
                backend.order(ticket, ())
                waits.append((ticket, num_launched))
            elif action == "wait" and ticket.error is None:
                ticket.wait()
            elif action == "done":
                ticket.done()
            elif action == "cancel":
                backend.cancel(ticket)
            elif action == "promote":
                backend.promote(ticket, Priority.FAULT)
        assert backend.host_ns >= before
    backend.synchronize()
    backend.close()
    assert len(kernels) == num_launched
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(kernels))
    for ticket, num_before in waits:
        assert all(begin >= ticket.end_ns for begin, _ in kernels[num_before:])
    _check_lanes(tickets, chunks, submitted_ns)


def _check_lanes(
    tickets: list[VirtualTicket],
    chunks: list[tuple[Chunk, int, int]],
    submitted_ns: dict[int, int],
) -> None:
    moved = dict.fromkeys(map(id, tickets), 0)
    for chunk, begin, _ in chunks:
        moved[id(chunk.ticket)] += chunk.nbytes
        assert begin >= submitted_ns[id(chunk.ticket)]
    for ticket in tickets:
        if ticket.error is None:
            assert moved[id(ticket)] == ticket.transfer.nbytes
        else:
            assert ticket.error.errno == errno.ECANCELED
            assert not moved[id(ticket)]
    for names, slowest in (("d2h",), 1), (("h2d",), 1), (("d2n", "h2n"), 4), (("n2d", "n2h"), 4):
        own = [c for c in chunks if c[0].ticket.transfer.lane.value in names]
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(own))
        for chunk, begin, end in own:
            assert end - begin >= math.floor(slowest * chunk.nbytes)
            assert end - begin <= 2 * (slowest + 1) * chunk.nbytes + 2
