"""Two workers on the way to the disk and back: what is in flight, who waits for what, no deadlock.

The block store here is memory that answers late, so that two steps meet wherever they can.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.lane_steps import FAULT, PATIENCE_S, PREFETCH, over, until
from tests.unit.small_backends import MIB, alias, bytes_of
from tvm_pager.errors import TransferError
from tvm_pager.transfer.behind import CopierBehind, Waitable
from tvm_pager.transfer.device_copy import CpuCopier
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer
from tvm_pager.transfer.routes import CHUNK_BYTES, Routes
from tvm_pager.transfer.slab import HostSlab
from tvm_pager.transfer.staging import NUM_PLACES, Staging
from tvm_pager.transfer.thread_lane import ThreadLane

if TYPE_CHECKING:
    from tvm_pager.transfer.lane_queue import LaneTicket

KIB = 1 << 10
DOWN, UP = (Lane.D2N, Lane.H2N), (Lane.N2D, Lane.N2H)


class SlowStore:
    """Moves bytes when somebody waits, after random moments; counts what is in flight."""

    engine, io, measured = "slow", "direct", ""

    def __init__(self, nbytes: int, seed: int, delays_s: Sequence[float]) -> None:
        self.content = bytearray(nbytes)
        self.num_failing = 0
        self.in_flight_bytes = self.most_bytes = 0
        self.awaited_bytes = 0  # nothing ends before so much was in flight at a time
        self.lock = threading.Lock()
        self.rng = random.Random(seed)
        self.delays_s = delays_s

    def write(self, file_offset: int, buffers: Sequence[memoryview]) -> SlowIO:
        return SlowIO(self, file_offset, buffers, is_write=True)

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> SlowIO:
        return SlowIO(self, file_offset, buffers, is_write=False)

    def write_device(self, file_offset: int, parts: Sequence[torch.Tensor]) -> SlowIO:
        return self.write(file_offset, [memoryview(part.numpy()) for part in parts])

    def read_device(self, file_offset: int, parts: Sequence[torch.Tensor]) -> SlowIO:
        return self.read(file_offset, [memoryview(part.numpy()) for part in parts])

    def close(self) -> None:
        assert not self.in_flight_bytes


class SlowIO:
    def __init__(
        self, store: SlowStore, offset: int, buffers: Sequence[memoryview], *, is_write: bool
    ) -> None:
        self._store, self._at, self._buffers, self._is_write = store, offset, buffers, is_write
        self._nbytes = sum(map(len, buffers))
        self._is_done = False
        with store.lock:
            store.in_flight_bytes += self._nbytes
            store.most_bytes = max(store.most_bytes, store.in_flight_bytes)
            self._fails = store.num_failing > 0
            store.num_failing -= self._fails
            self._delay_s = store.rng.choice(store.delays_s)

    def done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        if not self._is_done:
            until(lambda: self._store.most_bytes >= self._store.awaited_bytes)
            time.sleep(self._delay_s)
            at = self._at
            for buffer in self._buffers:
                if self._is_write:
                    self._store.content[at : at + len(buffer)] = buffer
                else:
                    buffer[:] = self._store.content[at : at + len(buffer)]
                at += len(buffer)
            with self._store.lock:
                self._store.in_flight_bytes -= self._nbytes
            self._is_done = True
        if self._fails:
            raise TransferError("the disk is gone", errno.EIO)


@dataclass
class Job:
    """A page of the test: its bytes, where they are in the file, and where outside it."""

    lane: Lane
    data: torch.Tensor
    file_offset: int
    host_offset: int
    storage: torch.UntypedStorage | None = None

    @property
    def transfer(self) -> Transfer:
        outside = 0 if self.storage is not None else self.host_offset
        ends = (outside, self.file_offset)
        source, target = ends if self.lane in DOWN else ends[::-1]
        nbytes = len(self.data)
        return Transfer(
            self.file_offset, self.lane, (Piece(0, source, target, nbytes),), self.storage
        )


class Disk:
    """Slab, staging, a slow store, and a lane of two workers for each direction."""

    def __init__(
        self,
        slab_bytes: int,
        staging_bytes: int,
        file_bytes: int,
        seed: int = 0,
        delays_s: Sequence[float] = (0.0005,),
    ) -> None:
        self.slab = HostSlab(slab_bytes, region_bytes=slab_bytes, page_lock=False)
        self.staging = Staging(staging_bytes, page_lock=False, locker=None)
        self.store = SlowStore(file_bytes, seed, delays_s)
        self.routes = Routes(self.slab, self.staging)
        self.routes.store = self.store
        self.lanes = [
            ThreadLane(name, runs_inline=False, num_workers=NUM_PLACES) for name in ("down", "up")
        ]

    def submit(self, job: Job, priority: Priority, *waits: Waitable) -> LaneTicket:
        copier = CopierBehind(CpuCopier(), waits)
        first, *beside = self.routes.strands(job.transfer, job.storage, copier)
        return self.lane_of(job).submit(job.transfer, first, priority, beside)

    def lane_of(self, job: Job) -> ThreadLane:
        return self.lanes[job.lane in UP]

    def prepare(self, job: Job) -> None:
        """Puts the bytes where the transfer finds them, and noise where it puts them."""
        end = job.file_offset + len(job.data)
        if "d" in job.lane.value:
            job.storage = torch.UntypedStorage(len(job.data), device="cpu")
        filled, empty = (self.outside(job), None) if job.lane in DOWN else (None, self.outside(job))
        if filled is not None:
            filled.copy_(job.data)
            self.store.content[job.file_offset : end] = b"\xdb" * len(job.data)
        if empty is not None:
            empty.fill_(0xDB)
            self.store.content[job.file_offset : end] = job.data.numpy().tobytes()

    def outside(self, job: Job) -> torch.Tensor:
        if job.storage is not None:
            return alias(job.storage)
        return self.slab.view(job.host_offset, len(job.data))[0]

    def has_arrived(self, job: Job) -> bool:
        end = job.file_offset + len(job.data)
        in_file = self.store.content[job.file_offset : end] == job.data.numpy().tobytes()
        return in_file and torch.equal(self.outside(job), job.data)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.store.close()
        self.slab.close()
        self.staging.slab.close()


# --- schedules ------------------------------------------------------------------------------------


def some_jobs(rng: random.Random) -> list[Job]:
    """Pages of up to twelve parts of a place, in both directions, half of them through staging."""
    lanes = rng.sample(4 * (*DOWN, *UP), 10)
    return [
        Job(lane, bytes_of(rng.choice([1, 5000, 8192, 30_000, 100_000]), index), at, at)
        for index, (lane, at) in enumerate(zip(lanes, range(0, 10 << 17, 1 << 17), strict=True))
    ]


@pytest.mark.parametrize("block", range(8))
def test_no_schedule_stops_for_ever_or_mixes_bytes(block: int) -> None:
    """A deadlock shows as a ticket that is never over. 400 schedules."""
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        disk = Disk(2 * MIB, 64 * KIB, 2 * MIB, seed, (0, 0, 0, 20e-6, 200e-6))
        jobs = some_jobs(rng)
        for job in jobs:
            disk.prepare(job)
        disk.store.num_failing = rng.choice([0, 0, 1, 3])
        left = list(jobs)
        while left:
            tickets = [(job, disk.submit(job, rng.choice(list(Priority)))) for job in left]
            for job, ticket in rng.sample(tickets, len(tickets) // 2):
                disk.lane_of(job).promote(ticket, rng.choice(list(Priority)))
            for job, ticket in rng.sample(tickets, 2 if len(tickets) > 4 else 0):
                disk.lane_of(job).cancel(ticket)
            left = []
            for job, ticket in tickets:
                error = over(ticket).error
                assert error is None or error.errno in (errno.EIO, errno.ECANCELED), seed
                left += [job] if error is not None else []
        assert [job for job in jobs if not disk.has_arrived(job)] == [], seed
        disk.close()


# --- what is in flight ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize(
    "lanes",
    [num * [lane] for lane in (*DOWN, *UP) for num in (1, 3)] + [2 * [*DOWN], 2 * [*UP]],
    ids=lambda lanes: "-".join(lane.value for lane in lanes),
)
def test_two_workers_have_two_chunks_in_flight_at_most(lanes: list[Lane], is_direct: bool) -> None:
    """So a fault waits for no more than that; and a transfer that is alone has all of it."""
    nbytes = 48 * MIB
    with closing(Disk(4 * nbytes, 32 * MIB, 4 * nbytes)) as disk:
        disk.routes.direct = disk.store if is_direct else None
        disk.store.awaited_bytes = CHUNK_BYTES + 1  # whenever the other worker wakes up
        jobs = [
            Job(lane, torch.empty(nbytes, dtype=torch.uint8), index * nbytes, index * nbytes)
            for index, lane in enumerate(lanes)
        ]
        for job in jobs:
            if "d" in job.lane.value:
                job.storage = torch.UntypedStorage(nbytes, device="cpu")
        for ticket in [disk.submit(job, PREFETCH) for job in jobs]:
            assert over(ticket).error is None
        assert disk.store.awaited_bytes <= disk.store.most_bytes <= 2 * CHUNK_BYTES


# --- device work ----------------------------------------------------------------------------------


class Kernels:
    """Work of a device that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def synchronize(self) -> None:
        assert self.ended.wait(PATIENCE_S)


@pytest.mark.parametrize("lane", [Lane.D2N, Lane.N2D])
def test_copies_come_behind_the_work_that_uses_the_memory(lane: Lane) -> None:
    with closing(Disk(MIB, 64 * KIB, MIB)) as disk:
        job = Job(lane, bytes_of(100_000), 0, 0)
        disk.prepare(job)
        before = disk.outside(job).clone()
        kernels = Kernels()
        ticket = disk.submit(job, FAULT, kernels)
        until(lambda: lane is Lane.D2N or disk.store.most_bytes > 0)  # reading needs no device
        time.sleep(0.02)
        assert not ticket.done()
        assert torch.equal(disk.outside(job), before)
        assert lane is Lane.N2D or disk.store.content[:100_000] == b"\xdb" * 100_000
        kernels.ended.set()
        assert over(ticket).error is None
        assert disk.has_arrived(job)


@pytest.mark.parametrize("lane", [Lane.D2N, Lane.N2D])
def test_nobody_waits_for_the_work_that_another_transfer_comes_behind(lane: Lane) -> None:
    with closing(Disk(MIB, 64 * KIB, MIB)) as disk:
        late, job = (Job(lane, bytes_of(20_000), at, at) for at in (0, 1 << 17))
        disk.prepare(late)
        disk.prepare(job)
        kernels = Kernels()
        waiting = disk.submit(late, FAULT, kernels)
        assert over(disk.submit(job, FAULT)).error is None
        assert disk.has_arrived(job)
        assert not waiting.done()
        kernels.ended.set()
        assert over(waiting).error is None
        assert disk.has_arrived(late)
