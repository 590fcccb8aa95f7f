"""Staging: copies and I/O overlap, and a step that fails leaves neither in flight."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.small_backends import MIB, Make, alias, bytes_of, copy, page_of, run, wipe
from tvm_pager.errors import TransferError
from tvm_pager.transfer.pieces import Part, Run
from tvm_pager.transfer.protocol import Lane, Piece, Priority
from tvm_pager.transfer.staging import NUM_PLACES, Staging

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.transfer.block_store import BlockStore, Completion
    from tvm_pager.transfer.device_copy import SlabRange


class LateCopier:
    """Copies when somebody waits for them, as a stream may."""

    def __init__(self, log: list[str]) -> None:
        self.queued: list[Callable[[], object]] = []
        self._log = log

    def copy(
        self, storage: torch.UntypedStorage, page_offset: int, place: SlabRange, *, down: bool
    ) -> None:
        self._log.append(f"copy {page_offset // 1024}")

        def move() -> None:
            raw = alias(storage)[page_offset : page_offset + place.nbytes]
            (view,) = place.slab.view(place.offset, place.nbytes)
            target, source = (view, raw) if down else (raw, view)
            target.copy_(source)

        self.queued.append(move)

    def finish(self) -> None:
        for move in self.queued:
            move()
        self.queued.clear()


class LateStore:
    """Moves bytes when somebody waits; the I/O with one of the numbers in `failing` fails."""

    engine, io, measured = "late", "direct", ""

    def __init__(self, log: list[str], failing: Sequence[int] = ()) -> None:
        self.content = bytearray(64 * MIB)
        self.in_flight: list[LateIO] = []
        self.num_started = 0
        self.failing = failing
        self.log = log

    def write(self, file_offset: int, buffers: Sequence[memoryview]) -> LateIO:
        return LateIO(self, file_offset, buffers, is_write=True)

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> LateIO:
        return LateIO(self, file_offset, buffers, is_write=False)

    def close(self) -> None:
        raise AssertionError


class LateIO:
    def __init__(
        self, store: LateStore, offset: int, buffers: Sequence[memoryview], *, is_write: bool
    ) -> None:
        self._store, self._at, self._buffers, self._is_write = store, offset, buffers, is_write
        self._fails = store.num_started in store.failing
        store.num_started += 1
        store.in_flight.append(self)
        store.log.append(f"{'write' if is_write else 'read'} {offset // 1024}")

    def done(self) -> bool:
        return self not in self._store.in_flight

    def wait(self) -> None:
        if not self.done():
            self._store.in_flight.remove(self)
            self._store.log.append(f"done {self._at // 1024}")
            at = self._at
            for buffer in self._buffers:
                if self._is_write:
                    self._store.content[at : at + len(buffer)] = buffer
                else:
                    buffer[:] = self._store.content[at : at + len(buffer)]
                at += len(buffer)
        if self._fails:
            raise TransferError("the disk is gone", errno.EIO)


@pytest.fixture
def staging() -> Iterator[Staging]:
    staging = Staging(16 * MIB, page_lock=False, locker=None)
    yield staging
    staging.slab.close()


def run_of(nbytes: int, parts: int = 1) -> Run:
    size = nbytes // parts
    return Run(0, nbytes, tuple(Part(i * size, size) for i in range(parts)))


def page_with(data: torch.Tensor) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(data), device="cpu")
    alias(storage).copy_(data)
    return storage


@pytest.mark.parametrize("nbytes", [4096, MIB, 6 * MIB, 8 * MIB, 20 * MIB, 37 * MIB])
def test_bytes_survive_copies_and_io_that_come_late(staging: Staging, nbytes: int) -> None:
    log: list[str] = []
    copier, store = LateCopier(log), LateStore(log)
    data = bytes_of(nbytes)
    storage = page_with(data)
    for _ in staging.steps_down(storage, [run_of(nbytes, 2)], copier, store):
        assert not store.in_flight
        assert not copier.queued, "another transfer's step may use the buffer now"
    assert store.content[:nbytes] == data.numpy().tobytes()
    alias(storage).zero_()
    for _ in staging.steps_up(storage, [run_of(nbytes, 2)], copier, store):
        assert not store.in_flight
        assert not copier.queued
    assert torch.equal(alias(storage), data)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_step_leaves_nothing_in_flight(staging: Staging, failing: int) -> None:
    """The ticket ends with it, and then the page's memory may be released and reused."""
    log: list[str] = []
    copier, store = LateCopier(log), LateStore(log, [failing])
    storage = page_with(bytes_of(16 * MIB))
    for steps in (
        staging.steps_up(storage, [run_of(16 * MIB)], copier, store),
        staging.steps_down(storage, [run_of(16 * MIB)], copier, store),
    ):
        store.num_started = 0
        with pytest.raises(TransferError, match="the disk is gone"):
            list(steps)
        assert not store.in_flight
        assert not copier.queued


def test_a_copy_that_cannot_be_queued_leaves_the_one_before_it_not_in_flight(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_down in (True, False):
        log: list[str] = []
        copier, store = LateCopier(log), LateStore(log)
        real_copy = copier.copy

        def copy(*args: object, real: Callable[..., None] = real_copy, **options: object) -> None:
            if args[1]:  # the second part
                raise RuntimeError("CUDA error")
            real(*args, **options)

        monkeypatch.setattr(copier, "copy", copy)
        move = staging.steps_down if is_down else staging.steps_up
        with pytest.raises(RuntimeError, match="CUDA error"):
            list(move(page_with(bytes_of(MIB)), [run_of(MIB, 2)], copier, store))
        assert not store.in_flight
        assert not copier.queued


def test_an_interrupt_while_waiting_leaves_nothing_in_flight(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    copier, store = LateCopier(log), LateStore(log)
    real_wait = LateIO.wait

    def wait(io: LateIO) -> None:
        was_done = io.done()
        real_wait(io)
        if io._at == 0 and not was_done:
            raise KeyboardInterrupt  # as block stores do: when the I/O has ended

    monkeypatch.setattr(LateIO, "wait", wait)
    for move in (staging.steps_up, staging.steps_down):
        with pytest.raises(KeyboardInterrupt):
            list(move(page_with(bytes_of(16 * MIB)), [run_of(16 * MIB)], copier, store))
        assert not store.in_flight
        assert not copier.queued


@pytest.mark.parametrize(("nbytes", "num_parts"), [(2 * MIB, 1), (4 * MIB, 2), (8 * MIB, 2)])
def test_one_part_is_written_while_the_next_is_filled(
    staging: Staging, nbytes: int, num_parts: int
) -> None:
    log: list[str] = []
    run = run_of(nbytes)
    storage = page_with(bytes_of(nbytes))
    parts = range(0, nbytes // 1024, nbytes // num_parts // 1024)
    list(staging.steps_down(storage, [run], LateCopier(log), LateStore(log)))
    filled = [f"{what} {part}" for part in parts for what in ("copy", "write")]
    assert log == filled + [f"done {part}" for part in parts]
    log.clear()
    list(staging.steps_up(storage, [run], LateCopier(log), LateStore(log)))
    emptied = [f"{what} {part}" for part in parts for what in ("done", "copy")]
    assert log == [f"read {part}" for part in parts] + emptied


def test_small_pages_are_not_cut(staging: Staging) -> None:
    log: list[str] = []
    list(
        staging.steps_down(page_with(bytes_of(MIB)), [run_of(MIB)], LateCopier(log), LateStore(log))
    )
    assert log == ["copy 0", "write 0", "done 0"]


# --- places ---------------------------------------------------------------------------------------


class MeetingStore(LateStore):
    """Its first I/O of each of two transfers starts only when the other's does."""

    def __init__(self) -> None:
        super().__init__([])
        self.meeting = threading.Barrier(2, timeout=5)
        self.met: set[threading.Thread] = set()

    def _meet(self) -> None:
        if threading.current_thread() not in self.met:
            self.met.add(threading.current_thread())
            self.meeting.wait()

    def write(self, file_offset: int, buffers: Sequence[memoryview]) -> LateIO:
        self._meet()
        return super().write(file_offset, buffers)

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> LateIO:
        self._meet()
        return super().read(file_offset, buffers)


def test_two_transfers_are_in_the_staging_at_a_time_each_in_its_own_place(staging: Staging) -> None:
    """Neither waits for a second place: here each goes on only when the other one has begun."""
    nbytes = 12 * MIB
    pages = [page_with(bytes_of(nbytes, seed)) for seed in range(2)]
    runs = [Run(slot * nbytes, nbytes, (Part(0, nbytes),)) for slot in range(2)]
    for move in (staging.steps_down, staging.steps_up):
        store = MeetingStore() if move == staging.steps_down else store_of(pages)
        with ThreadPoolExecutor(2) as pool:
            moves = [
                pool.submit(list, move(page, [run], LateCopier([]), store))
                for page, run in zip(pages, runs, strict=True)
            ]
            for future in moves:
                future.result()
        for slot, page in enumerate(pages):
            data = bytes_of(nbytes, slot)
            assert store.content[slot * nbytes : (slot + 1) * nbytes] == data.numpy().tobytes()
            assert torch.equal(alias(page), data)


def store_of(pages: Sequence[torch.UntypedStorage]) -> MeetingStore:
    """A store that holds the pages one behind the other, whose own bytes are gone."""
    store = MeetingStore()
    at = 0
    for page in pages:
        store.content[at : at + page.nbytes()] = alias(page).numpy().tobytes()
        at += page.nbytes()
        alias(page).zero_()
    return store


def test_a_failed_step_gives_its_place_back(staging: Staging) -> None:
    run = run_of(MIB)
    storage = page_with(bytes_of(MIB))

    def fail_and_go_on() -> None:
        for _ in range(NUM_PLACES):
            with pytest.raises(TransferError, match="gone"):
                list(staging.steps_up(storage, [run], LateCopier([]), LateStore([], [0])))
        list(staging.steps_up(storage, [run], LateCopier([]), LateStore([])))

    thread = threading.Thread(target=fail_and_go_on, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits for a place that nobody has"


class GatedStore:
    """A block store whose first read, once it is armed, is held up when its bytes have come."""

    def __init__(self, store: BlockStore) -> None:
        self.inside, self.let = threading.Event(), threading.Event()
        self.is_armed = False
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> Completion:
        completion = self._store.read(file_offset, buffers)
        if self.is_armed:
            self.is_armed = False
            completion.wait()
            self.inside.set()
            assert self.let.wait(20)
        return completion


def test_a_page_read_into_host_memory_does_not_meet_a_fetch_in_the_staging(make: Make) -> None:
    """Both come up from NVMe, one in the thread of the lane and one for the caller."""
    stores: list[GatedStore] = []

    def wrap(store: BlockStore) -> GatedStore:
        stores.append(GatedStore(store))
        return stores[-1]

    backend = make(wrap_store=wrap)
    data = [bytes_of(32 << 10, seed) for seed in range(2)]
    pages = [page_of(backend, d) for d in data]
    for slot, page in enumerate(pages):
        run(backend, Lane.D2N, page, len(data[slot]), slot << 16)
    wipe(backend, pages[0], len(data[0]))
    stores[0].is_armed = True
    ticket = backend.submit(copy(Lane.N2D, pages[0], len(data[0]), 0), Priority.PREFETCH)
    assert stores[0].inside.wait(20)
    threading.Timer(0.1, stores[0].let.set).start()
    kept = backend.read_to_host(len(data[1]), {Lane.N2D: [Piece(0, 1 << 16, 0, len(data[1]))]})
    ticket.wait()
    assert torch.equal(alias(pages[0]).cpu(), data[0])
    assert torch.equal(kept, data[1])
