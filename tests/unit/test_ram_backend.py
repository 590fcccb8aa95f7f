"""The backend of the tests: late, seeded, in order per lane, and merciless with broken rules."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pager.errors import TransferError
from tvm_pager.transfer.protocol import Backend, Lane, Piece, Ticket, Transfer
from tvm_pager.transfer.ram_backend import POISON, RamBackend, RamMemory

KIB = 1024


def make_backend(**options: object) -> RamBackend:
    return RamBackend(64 * KIB, 64 * KIB, **options)


def page_of(backend: RamBackend, data: bytes) -> RamMemory:
    memory = RamMemory()
    backend.allocate_device(memory, len(data))
    memory.data[:] = data
    return memory


def copy(lane: Lane, memory: RamMemory | None, nbytes: int, offset: int = 0) -> Transfer:
    """The whole of a page to or from `offset` of the other tier, or tiers."""
    source = 0 if lane.value[0] == "d" else offset
    target = 0 if lane.value[2] == "d" else offset
    return Transfer(1, lane, (Piece(0, source, target, nbytes),), memory)


def test_it_is_a_backend_with_tickets() -> None:
    backend: Backend = make_backend()
    ticket = backend.submit(copy(Lane.H2N, None, 512))
    assert isinstance(ticket, Ticket)
    ticket.wait()


@given(seed=st.integers(0, 1000), max_delay=st.integers(0, 8), nbytes=st.integers(1, 9000))
def test_a_page_survives_the_trip_through_all_tiers(seed: int, max_delay: int, nbytes: int) -> None:
    backend = make_backend(seed=seed, max_delay=max_delay)
    data = bytes(index * 7 % 251 for index in range(nbytes))
    memory = page_of(backend, data)
    for lane in (Lane.D2H, Lane.H2N, Lane.N2H):
        backend.submit(copy(lane, memory if lane is Lane.D2H else None, nbytes, 8192)).wait()
    backend.release_device(memory)
    assert memory.nbytes == 0
    backend.allocate_device(memory, nbytes)
    assert set(memory.data) == {POISON}
    backend.submit(copy(Lane.H2D, memory, nbytes, 8192)).wait()
    assert memory.data == data
    backend.submit(copy(Lane.D2N, memory, nbytes, 20480)).wait()
    backend.release_device(memory)
    backend.allocate_device(memory, nbytes)
    backend.submit(copy(Lane.N2D, memory, nbytes, 20480)).wait()
    assert memory.data == data
    assert backend.hazards == []
    assert backend.pending == ()


def test_the_same_seed_gives_the_same_moments() -> None:
    def moments(seed: int) -> list[int]:
        backend = make_backend(seed=seed, max_delay=9)
        tickets = [backend.submit(copy(Lane.H2N, None, 512, i * 4096)) for i in range(8)]
        pending = []
        while any(ticket in backend.pending for ticket in tickets):
            backend.tick()
            pending.append(len(backend.pending))
        return pending

    assert moments(1) == moments(1)
    assert len({tuple(moments(seed)) for seed in range(10)}) > 1


@given(seed=st.integers(0, 1000))
def test_what_is_cancelled_before_it_begins_moves_nothing_and_says_so(seed: int) -> None:
    backend = make_backend(seed=seed, max_delay=6)
    memory = page_of(backend, b"x" * 512)
    ticket = backend.submit(copy(Lane.D2H, memory, 512))
    is_cancelled = backend.cancel(ticket)
    while not ticket.done():
        backend.tick()
    if is_cancelled:
        assert backend.host[:512] == bytes([POISON]) * 512
        with pytest.raises(TransferError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.ECANCELED
        assert not backend.pending
    else:
        assert backend.host[:512] == b"x" * 512
        assert not backend.cancel(ticket)


@given(seed=st.integers(0, 1000))
def test_stream_order_gives_bytes_before_the_copy_and_keeps_memory_until_it(seed: int) -> None:
    backend = make_backend(seed=seed, max_delay=6, in_order=True)
    memory = page_of(backend, b"x" * 512)
    down = backend.submit(copy(Lane.D2H, memory, 512))
    block = memory.data
    backend.release_device(memory, (), (down,))
    assert memory.nbytes == 0
    assert down.done() or bytes(block) == b"x" * 512
    down.wait()
    assert backend.host[:512] == b"x" * 512
    backend.allocate_device(memory, 512)
    up = backend.submit(copy(Lane.H2D, memory, 512))
    backend.order(up, ())
    assert bytes(memory.data) == b"x" * 512
    if not up.done():
        backend.host[:4] = b"late"
        up.wait()
        assert not backend.hazards or "changed in flight" in backend.hazards[0]


def test_done_never_blocks_and_moves_the_clock() -> None:
    backend = make_backend(seed=3, max_delay=5)
    ticket = backend.submit(copy(Lane.H2N, None, 512))
    assert sum(1 for _ in range(6) if not ticket.done()) <= 6
    assert ticket.done()


def test_without_delay_a_transfer_ends_in_submit() -> None:
    backend = make_backend(max_delay=0)
    memory = page_of(backend, b"x" * 600)
    ticket = backend.submit(copy(Lane.D2H, memory, 600))
    assert backend.pending == ()
    assert ticket.done()
    assert backend.host[:600] == b"x" * 600


def corrupted(act: str) -> tuple[int, int]:
    """Counts the seeds for which breaking a rule corrupts bytes, and those that record a hazard."""
    num_wrong = num_hazards = 0
    for seed in range(100):
        backend = make_backend(seed=seed, max_delay=4)
        data = bytes(range(200)) * 4
        memory = page_of(backend, data)
        if act == "write source":
            ticket = backend.submit(copy(Lane.D2H, memory, 800))
            memory.data[:] = bytes(800)
            ticket.wait()
            num_wrong += backend.host[:800] != data
        elif act == "release source":
            ticket = backend.submit(copy(Lane.D2H, memory, 800))
            backend.release_device(memory)
            ticket.wait()
            num_wrong += backend.host[:800] != data
        elif act == "release target":
            backend.host[:800] = bytes(800)
            ticket = backend.submit(copy(Lane.H2D, memory, 800))
            backend.release_device(memory)
            other = page_of(backend, data)  # gets the block that the copy still writes
            ticket.wait()
            num_wrong += other.data != data
        else:
            other = page_of(backend, bytes(800))
            tickets = [backend.submit(copy(Lane.D2H, page, 800)) for page in (memory, other)]
            for ticket in tickets:
                ticket.wait()
            num_wrong += backend.host[:800] != bytes(800)
        num_hazards += bool(backend.hazards)
    return num_wrong, num_hazards


@pytest.mark.parametrize("act", ["write source", "release source", "release target", "reuse frame"])
def test_reuse_before_the_end_corrupts_bytes_for_some_seeds(act: str) -> None:
    num_wrong, num_hazards = corrupted(act)
    assert num_wrong >= 10
    if act != "write source":  # writes to bytes cannot be seen
        assert num_hazards >= num_wrong


def test_reading_one_source_twice_is_no_hazard() -> None:
    backend = make_backend(seed=2, max_delay=5)
    memory = page_of(backend, bytes(512))
    tickets = [backend.submit(copy(Lane.D2H, memory, 512, at)) for at in (0, 512)]
    for ticket in tickets:
        ticket.wait()
    assert backend.hazards == []


def test_the_rest_of_the_last_block_on_nvme_is_overwritten() -> None:
    backend = make_backend(max_delay=0)
    backend.nvme[:8192] = bytes(8192)
    memory = page_of(backend, b"x" * 100)
    backend.submit(copy(Lane.D2N, memory, 100, 4096))
    assert backend.nvme[4096:8192] == b"x" * 100 + bytes([POISON]) * 3996
    assert backend.nvme[:4096] == bytes(4096)


def test_pieces_that_continue_each_other_pad_once() -> None:
    backend = make_backend(max_delay=0)
    memory = page_of(backend, bytes(range(250)) * 4)
    pieces = (Piece(0, 0, 4096, 512), Piece(512, 512, 4608, 488))
    backend.submit(Transfer(1, Lane.D2N, pieces, memory)).wait()
    assert backend.nvme[4096:5096] == memory.data


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failures_hit_the_next_of_a_lane_and_surface_in_the_ticket(code: int) -> None:
    backend = make_backend(seed=1, max_delay=3)
    memory = page_of(backend, b"y" * 512)
    backend.fail_next(2, lane=Lane.D2N, code=code)
    backend.submit(copy(Lane.D2H, memory, 512)).wait()
    for _ in range(2):
        ticket = backend.submit(copy(Lane.D2N, memory, 512))
        for _ in range(2):
            with pytest.raises(TransferError) as caught:
                ticket.wait()
            assert caught.value.errno == code
        assert ticket.error is caught.value
    backend.submit(copy(Lane.D2N, memory, 512)).wait()
    assert backend.num_failed == {Lane.D2N: 2}
    assert backend.num_submitted == {Lane.D2H: 1, Lane.D2N: 3}
    assert backend.bytes_by_lane[Lane.D2N] == 3 * 512


def test_an_error_does_not_show_before_the_end() -> None:
    backend = make_backend(seed=0, max_delay=5)
    backend.fail_next(lane=Lane.H2N)
    ticket = backend.submit(copy(Lane.H2N, None, 512))
    while ticket in backend.pending:
        assert ticket.error is None
        backend.tick()
    assert ticket.error is not None


def test_a_failed_transfer_leaves_its_target_half_written() -> None:
    backend = make_backend(max_delay=0)
    memory = page_of(backend, b"z" * 1000)
    backend.fail_next()
    with pytest.raises(TransferError):
        backend.submit(copy(Lane.D2H, memory, 1000)).wait()
    assert backend.host[:500] == b"z" * 500
    assert set(backend.host[500:1000]) == {POISON}


def test_a_function_can_choose_what_fails() -> None:
    backend = make_backend(fail=lambda transfer: errno.EIO if transfer.page_id == 1 else None)
    ticket = backend.submit(copy(Lane.H2N, None, 512))
    with pytest.raises(TransferError):
        ticket.wait()
    backend.submit(Transfer(2, Lane.H2N, (Piece(0, 0, 0, 512),), None)).wait()


def test_device_memory_is_counted_limited_and_refused_on_request() -> None:
    backend = make_backend(device_capacity=1000)
    memory, other = RamMemory(), RamMemory()
    backend.allocate_device(memory, 600)
    with pytest.raises(MemoryError, match="600 of 1000"):
        backend.allocate_device(other, 401)
    assert other.nbytes == 0
    backend.allocate_device(other, 400)
    backend.release_device(memory)
    assert backend.device_bytes == 400
    backend.refuse_next_allocations()
    with pytest.raises(MemoryError, match="refused"):
        backend.allocate_device(memory, 1)
    backend.allocate_device(memory, 1)


@pytest.mark.parametrize(
    ("lane", "piece"),
    [
        (Lane.D2H, Piece(0, 0, 0, 513)),
        (Lane.D2H, Piece(0, 1, 0, 10)),
        (Lane.D2H, Piece(0, 0, 100, 10)),
        (Lane.D2H, Piece(0, 0, 64 * KIB, 10)),
        (Lane.D2N, Piece(0, 0, 512, 10)),
        (Lane.H2D, Piece(0, -512, 0, 10)),
        (Lane.N2D, Piece(0, 0, 0, 0)),
    ],
)
def test_transfers_off_their_tiers_are_bugs(lane: Lane, piece: Piece) -> None:
    backend = make_backend()
    with pytest.raises(AssertionError):
        backend.submit(Transfer(1, lane, (piece,), page_of(backend, bytes(512))))


def test_close_ends_everything_and_refuses_more() -> None:
    backend = make_backend(seed=4, max_delay=9)
    ticket = backend.submit(copy(Lane.H2N, None, 512))
    backend.close()
    backend.close()
    assert ticket not in backend.pending
    late = backend.submit(copy(Lane.H2N, None, 512))
    with pytest.raises(TransferError):
        late.wait()
