"""The disk: raw direct I/O, and the block stores over the same file, reading, writing and both.

[Note: What is timed]
    As many threads as the effort says each move one chunk at a time, one behind the other through
    the file, until the round is over. Read and write together are as many threads each, the readers
    in the first half of the file, the writers in the second. The file is written once before:
    blocks that were only reserved are read as zeros without asking the disk, and their first write
    is slower than later ones. The bytes are random, because some disks compress.

[Note: Without direct I/O]
    Where the file system refuses it, writes count when they are on the disk, and the page cache is
    emptied before each round of reads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.errors import ConfigError, TransferError
from tvm_pager.observe.profile.effort import share_of
from tvm_pager.observe.profile.links import chunk_sizes
from tvm_pager.observe.profile.rounds import Span, overlap_rates, repeat
from tvm_pager.planning.hardware.profile import DiskRates
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate, Point
from tvm_pager.transfer.block_store import BlockStore, open_block_store
from tvm_pager.transfer.swap_file import SwapFile, usable_bytes
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.observe.profile.effort import Effort
    from tvm_pager.transfer.slab import HostSlab

    Move = Callable[[int, memoryview, bool], None]  # file offset, bytes, whether it writes

__all__ = ["measure_disk", "raw_mover"]

_READ, _WRITE = 0, 1
_MIN_FILE_BYTES = 1 << 20
_RANDOM_BYTES = 1 << 20
_FILL_S = 5.0  # a slow disk gets a smaller file


def measure_disk(
    directory: str, slab: HostSlab, effort: Effort, *, on_gpu: bool
) -> tuple[list[DiskRates], list[str]]:
    """Measures raw I/O, the posix store, and on GPU machines the kvikio store; gives notices too.

    Takes a quarter of the free space at most, in a nameless file that is gone at the end. Blocks.

    Args:
        directory: where the file lies.
        slab: its first region is read into, its second written from; both are overwritten.
        effort: sizes and times.
        on_gpu: whether kvikio is tried.

    Raises:
        ConfigError: the directory cannot be used, or has next to no space.
        TransferError: the disk failed.
    """
    try:
        free_bytes = usable_bytes(directory)
    except OSError as error:
        raise ConfigError(
            f"--nvme {directory}: {error.strerror}; create it or name another"
        ) from error
    nbytes = share_of(effort.disk_bytes, free_bytes)
    if nbytes < _MIN_FILE_BYTES:
        raise ConfigError(
            f"--nvme {directory}: only {format_bytes(free_bytes)} can be used there, too little to "
            f"measure with a quarter of it; free some space or name another directory"
        )
    with contextlib.closing(SwapFile(directory, nbytes)) as file, _Rig(file, slab, effort) as rig:
        rig.fill()
        disks = [rig.measure("raw", raw_mover(file), effort.disk_chunks)]
        notices = []
        for engine in ("posix", "kvikio") if on_gpu else ("posix",):
            try:
                store, _ = open_block_store(
                    file, engine, on_gpu=on_gpu, num_threads=effort.num_disk_threads
                )
            except ConfigError as error:
                notices.append(f"engine {engine} was not measured: {error}")
                continue
            with contextlib.closing(store):
                disks.append(rig.measure(engine, _through(store), effort.engine_chunks))
        return disks, notices + file.notices


@dataclass(slots=True)
class _Side:
    """The threads of one direction: what they do, and on which part of the file."""

    is_write: bool
    start: int  # of its part of the file
    num_slots: int  # chunks in it
    numbers: itertools.count[int]


class _Rig:
    """The file, its buffers and threads. At the exit no I/O is in flight and no thread left."""

    def __init__(self, file: SwapFile, slab: HostSlab, effort: Effort) -> None:
        self._file = file
        self._effort = effort
        self._num_threads = effort.num_disk_threads
        self._buffers = [
            slab.buffers(side * slab.region_bytes, slab.region_bytes)[0] for side in (_READ, _WRITE)
        ]
        self._nbytes = file.nbytes  # of it that was written
        self._max_chunk_bytes = file.nbytes
        self._pool = ThreadPoolExecutor(2 * self._num_threads, "tvm_pager-profile")
        self._stop = threading.Event()

    def __enter__(self) -> _Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)

    def fill(self) -> None:
        """Writes the file once, or as much as a slow disk takes in five seconds."""
        sizes = self._chunk_sizes(self._effort.disk_chunks)
        chunk_bytes = sizes[-1]
        step, move = chunk_bytes * self._num_threads, raw_mover(self._file)
        random, buffer = os.urandom(_RANDOM_BYTES), self._buffers[_WRITE][:step]
        for at in range(0, step, _RANDOM_BYTES):
            part = buffer[at : at + _RANDOM_BYTES]
            part[:] = random[: len(part)]
        started_s = time.perf_counter()
        for start in range(0, self._file.nbytes - step + 1, step):
            futures = [
                self._pool.submit(
                    move, start + i * chunk_bytes, self._view(_WRITE, i, chunk_bytes), True
                )
                for i in range(self._num_threads)
            ]
            for future in futures:
                future.result()
            self._nbytes = start + step
            seconds = time.perf_counter() - started_s
            if seconds > _FILL_S and self._nbytes >= 2 * step:
                break
        # On a slow disk a few large chunks would take longer than a round.
        self._max_chunk_bytes = max(
            sizes[:2][-1],
            int(self._nbytes / seconds * 2 * self._effort.disk_round_s / self._num_threads),
        )

    def measure(self, engine: str, move: Move, chunks: Sequence[int]) -> DiskRates:
        """Measures one way to the disk."""
        sizes = self._chunk_sizes(chunks)
        curves: list[list[Point]] = [[], []]
        for chunk_bytes in sizes:
            for side in (_READ, _WRITE):
                (alone,) = self._rates(move, (side,), chunk_bytes)
                curves[side].append(Point(chunk_bytes, alone))
        read, write, total = self._rates(move, (_READ, _WRITE), sizes[-1])
        return DiskRates(
            engine=engine,
            io=self._file.io,
            num_threads=self._num_threads,
            read=_fitted(curves[_READ], sizes[-1], read),
            write=_fitted(curves[_WRITE], sizes[-1], write),
            duplex_total_bytes_per_s=total,
        )

    def _chunk_sizes(self, wanted: Sequence[int]) -> list[int]:
        """Those that every thread has a buffer for, and half the file a place for."""
        most = min(
            min(map(len, self._buffers)) // self._num_threads,
            self._nbytes // 2 // self._num_threads,
            self._max_chunk_bytes,
        )
        return chunk_sizes(wanted, max(4096, most // 4096 * 4096))

    def _view(self, side: int, index: int, chunk_bytes: int) -> memoryview:
        return self._buffers[side][index * chunk_bytes : (index + 1) * chunk_bytes]

    def _rates(self, move: Move, sides: Sequence[int], chunk_bytes: int) -> list[Figure]:
        """Bytes/s of each side, and of both together if there are two."""
        # Two directions at once vary more than one.
        round_s = self._effort.disk_round_s * len(sides)
        self._run(move, sides, chunk_bytes, round_s / 2)

        def run_round() -> list[float]:
            rates = self._run(move, sides, chunk_bytes, round_s)
            return rates if len(rates) == 1 else [*rates, sum(rates)]

        return repeat(run_round, self._effort.num_disk_rounds, round_s)

    def _run(
        self, move: Move, sides: Sequence[int], chunk_bytes: int, seconds: float
    ) -> list[float]:
        """Keeps all threads of all sides busy for `seconds`; gives bytes/s of each side."""
        if _READ in sides and self._file.io == "buffered":
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        part_bytes = self._nbytes // len(sides) // chunk_bytes * chunk_bytes
        parts = [
            _Side(side == _WRITE, index * part_bytes, part_bytes // chunk_bytes, itertools.count())
            for index, side in enumerate(sides)
        ]
        started_s = time.perf_counter()
        end_s = started_s + seconds
        futures = [
            [
                self._pool.submit(
                    self._work, move, part, self._view(part.is_write, i, chunk_bytes), end_s
                )
                for i in range(self._num_threads)
            ]
            for part in parts
        ]
        try:
            wait(itertools.chain(*futures))
        except BaseException:
            self._stop.set()  # an interrupt: whoever closes the pool waits for the chunks in flight
            raise
        spans = [[span for future in side for span in future.result()] for side in futures]
        return overlap_rates(spans, end_s)

    def _work(self, move: Move, side: _Side, view: memoryview, end_s: float) -> list[Span]:
        """One thread: moves chunk after chunk until `end_s`, at least one."""
        spans: list[Span] = []
        before_s = time.perf_counter()
        while not self._stop.is_set() and (before_s < end_s or not spans):
            slot = next(side.numbers) % side.num_slots
            move(side.start + slot * len(view), view, side.is_write)
            now_s = time.perf_counter()
            spans.append(Span(before_s, now_s, len(view)))
            before_s = now_s
        return spans


def _fitted(points: Sequence[Point], chunk_bytes: int, duplex: Figure) -> LinkRate:
    return LinkRate.fitted(Curve(tuple(points)), Curve((Point(chunk_bytes, duplex),)))


def raw_mover(file: SwapFile) -> Move:
    """Gives what moves a chunk by one system call, past the page cache where that works.

    It blocks; arguments: file offset, bytes in memory, whether to write them. It raises
    `TransferError` if the disk fails or stops short.
    """

    def move(offset: int, view: memoryview, is_write: bool) -> None:
        is_direct = file.io == "direct"
        fd = file.direct_fd if is_direct else file.fd
        what = f"{'writing' if is_write else 'reading'} {len(view)} bytes at {offset}"
        try:
            moved = (os.pwritev if is_write else os.preadv)(fd, [view], offset)
        except OSError as error:
            raise TransferError(
                f"{what} in {file.directory}: {error.strerror}; check the disk (dmesg)", error.errno
            ) from error
        if moved != len(view):
            raise TransferError(
                f"{what} in {file.directory}: stopped short after {moved}; check the disk (dmesg)"
            )
        if is_write and not is_direct:
            file.push(offset, len(view))

    return move


def _through(store: BlockStore) -> Move:
    """The block store, one submission per chunk."""

    def move(offset: int, view: memoryview, is_write: bool) -> None:
        (store.write if is_write else store.read)(offset, [view]).wait()

    return move
