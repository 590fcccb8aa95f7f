"""Plain copies between page-locked host memory and the device, timed on the device's own clock.

Two rigs with one interface: CUDA streams, and threads where CPU tensors stand in for a device. Each
side walks through its own pair of buffers, chunk after chunk, so that nothing is measured out of a
cache that is smaller than the buffers.

[Note: Who issues]
    One thread issues the copies of both sides, in turns of a few. So the rate of small chunks
    includes what a copy costs that thread, about 8 us: what a lane that issues from Python pays as
    well.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from tvm_pager.errors import TransferError
from tvm_pager.observe.profile.rounds import Span
from tvm_pager.transfer.slab import HostSlab

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tvm_pager.transfer.numa import NumaNode
    from tvm_pager.transfer.slab import PageLocker

__all__ = ["D2H", "H2D", "Copies", "CpuCopies", "CudaCopies", "open_copies", "open_slab"]

H2D, D2H = 0, 1
_TURN = 8  # copies of one side before the other's turn
_MAX_MARKS = 64  # events of one side in a run
_MIN_SLAB_BYTES = 1 << 20

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Copies(Protocol):
    """Copies between host and device. Sides are `H2D` and `D2H`; each owns two buffers."""

    nbytes: int  # of each buffer

    def run(self, sides: Sequence[int], chunk_bytes: int, num_chunks: int) -> list[list[Span]]:
        """Copies chunks on all sides at the same time; gives the spans of each. Blocks."""

    def time_empty(self, side: int, num_calls: int) -> float:
        """Seconds for copies of one byte, each of them issued and waited for. Blocks."""


class _Buffers:
    """The two pairs of buffers, and the chunks that they are cut into."""

    def __init__(self, slab: HostSlab, device: torch.device, nbytes: int) -> None:
        (host_source,), (host_target,) = slab.view(0, nbytes), slab.view(nbytes, nbytes)
        host_source.zero_()
        host_target.zero_()
        self._device_buffers = [
            torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._sides = (
            (self._device_buffers[H2D], host_source),
            (host_target, self._device_buffers[D2H]),
        )
        self.nbytes = nbytes
        self._cut: tuple[int, int, list[Pairs]] | None = None

    def pairs(self, side: int, chunk_bytes: int, num_chunks: int) -> Pairs:
        """(target, source) of the chunks, cut before any clock runs: cutting costs as copying."""
        if self._cut is None or self._cut[:2] != (chunk_bytes, num_chunks):
            self._cut = (
                chunk_bytes,
                num_chunks,
                [self._chunks(s, chunk_bytes, num_chunks) for s in (H2D, D2H)],
            )
        return self._cut[2][side]

    def _chunks(self, side: int, chunk_bytes: int, num_chunks: int) -> Pairs:
        num_slots = self.nbytes // chunk_bytes
        slots = [
            tuple(buffer[i * chunk_bytes : (i + 1) * chunk_bytes] for buffer in self._sides[side])
            for i in range(min(num_slots, num_chunks))
        ]
        return list(itertools.islice(itertools.cycle(slots), num_chunks))  # type: ignore[arg-type]


class CudaCopies:
    """Copies on two CUDA streams, timed by events. The device must not be busy otherwise."""

    def __init__(self, device: torch.device, slab: HostSlab, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        self._buffers = _Buffers(slab, device, nbytes)
        self._streams = [self._stream() for _ in (H2D, D2H)]
        torch.cuda.synchronize(device)  # the buffers were filled on another stream

    def run(self, sides: Sequence[int], chunk_bytes: int, num_chunks: int) -> list[list[Span]]:
        pairs = [self._buffers.pairs(side, chunk_bytes, num_chunks) for side in sides]
        streams = [self._streams[side] for side in sides]
        start = self._event()
        start.record(streams[0])
        for stream in streams[1:]:
            stream.wait_event(start)
        marks: list[list[tuple[int, torch.cuda.Event]]] = [[] for _ in sides]
        turn = max(_TURN, -(-num_chunks // _MAX_MARKS)) if len(sides) == 1 else _TURN
        mark_every = turn * max(1, num_chunks // (turn * _MAX_MARKS))
        for begin in range(0, num_chunks, turn):
            end = min(begin + turn, num_chunks)
            for side, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    for target, source in pairs[side][begin:end]:
                        target.copy_(source, non_blocking=True)
                if end % mark_every == 0 or end == num_chunks:
                    event = self._event()
                    event.record(stream)
                    marks[side].append((end, event))
        for stream in streams:
            stream.synchronize()
        return [_spans(start, side, chunk_bytes) for side in marks]

    def time_empty(self, side: int, num_calls: int) -> float:
        ((target, source),) = self._buffers.pairs(side, 1, 1)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream = self._streams[side]
        with torch.cuda.stream(stream):
            started_s = time.perf_counter()
            for _ in range(num_calls):
                target.copy_(source, non_blocking=True)
                event.record(stream)
                event.synchronize()
            return time.perf_counter() - started_s

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CpuCopies:
    """Copies by one thread per side, for CPU tensors that stand in for a device."""

    def __init__(self, slab: HostSlab, nbytes: int, pool: ThreadPoolExecutor) -> None:
        self.nbytes = nbytes
        self._buffers = _Buffers(slab, torch.device("cpu"), nbytes)
        self._pool = pool

    def run(self, sides: Sequence[int], chunk_bytes: int, num_chunks: int) -> list[list[Span]]:
        pairs = [self._buffers.pairs(side, chunk_bytes, num_chunks) for side in sides]
        if len(pairs) == 1:
            return [_copy_all(pairs[0], chunk_bytes)]
        barrier = threading.Barrier(len(pairs))

        def copy(side: Pairs) -> list[Span]:
            barrier.wait()
            return _copy_all(side, chunk_bytes)

        try:
            return list(self._pool.map(copy, pairs))
        except BaseException:
            barrier.abort()  # an interrupt may have come before the second thread was started
            raise

    def time_empty(self, side: int, num_calls: int) -> float:
        ((target, source),) = self._buffers.pairs(side, 1, 1)
        started_s = time.perf_counter()
        for _ in range(num_calls):
            target.copy_(source)
        return time.perf_counter() - started_s


@contextlib.contextmanager
def open_copies(device: torch.device, slab: HostSlab, nbytes: int) -> Iterator[Copies]:
    """Opens the rig of the device over the first 2 x `nbytes` of the slab, which must outlive it.

    At the exit, also after an interrupt, no copy is in flight and no thread is left.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            try:
                yield CudaCopies(device, slab, nbytes)
            finally:
                torch.cuda.synchronize(device)
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the stand-in's lanes: a copy never waits for other threads
    try:
        with ThreadPoolExecutor(2, "tvm_pager-profile") as pool:
            yield CpuCopies(slab, nbytes, pool)
    finally:
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def open_slab(
    nbytes: int,
    *,
    page_lock: bool,
    locker: PageLocker | None = None,
    node: NumaNode | None = None,
) -> Iterator[HostSlab]:
    """Opens a slab of two regions of `nbytes` each, or of less where the system locks no more.

    Raises:
        TransferError: not even 1 MiB can be had.
    """
    while True:
        slab = HostSlab(
            2 * nbytes, region_bytes=nbytes, page_lock=page_lock, locker=locker, node=node
        )
        try:
            slab.grow(2 * nbytes)
            break
        except BaseException as error:
            slab.close()
            if not isinstance(error, TransferError) or nbytes // 2 < _MIN_SLAB_BYTES:
                raise
            nbytes = nbytes // 2 // 4096 * 4096
    try:
        yield slab
    finally:
        slab.close()


def _spans(
    start: torch.cuda.Event, marks: Sequence[tuple[int, torch.cuda.Event]], chunk_bytes: int
) -> list[Span]:
    """Turns events, each behind that many chunks, into spans from `start` on."""
    spans, done, before_s = [], 0, 0.0
    for num_chunks, event in marks:
        now_s = start.elapsed_time(event) / 1e3
        spans.append(Span(before_s, now_s, (num_chunks - done) * chunk_bytes))
        done, before_s = num_chunks, now_s
    return spans


def _copy_all(pairs: Pairs, chunk_bytes: int) -> list[Span]:
    spans = []
    for begin in range(0, len(pairs), _TURN):
        turn = pairs[begin : begin + _TURN]
        started_s = time.perf_counter()
        for target, source in turn:
            target.copy_(source)
        spans.append(Span(started_s, time.perf_counter(), len(turn) * chunk_bytes))
    return spans
