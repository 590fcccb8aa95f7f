"""Engine `posix`: os.preadv and os.pwritev in a few threads, past the page cache where possible.

[Note: Bounce buffers]
    Direct I/O wants aligned addresses and whole blocks. What has neither (the last block of a page,
    an address off the alignment) goes through an aligned buffer of the thread's, 1 MiB, outside the
    host budget and backed by memory only as far as it was ever used, normally one page.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Literal, Protocol

from tvm_pager.errors import TransferError
from tvm_pager.transfer.block_store import Span, check_range, spans, transfer_error
from tvm_pager.transfer.pieces import NVME_ALIGNMENT
from tvm_pager.units import align_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.transfer.swap_file import SwapFile

__all__ = ["FutureCompletion", "PosixStore", "SystemCalls"]

# Several to a chunk of a disk's lane; smaller ones wait for the interpreter, not for the disk.
_TASK_BYTES = 4 << 20
_BOUNCE_BYTES = 1 << 20
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class SystemCalls(Protocol):
    """The two calls that move bytes; module `os`, or a test's that fails on purpose."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...


class FutureCompletion:
    """The completion of a few thread-pool tasks, which hold file and buffers themselves."""

    __slots__ = ("_futures",)

    def __init__(self, futures: Sequence[Future[None]]) -> None:
        self._futures = futures

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                # All, also after a failure: the buffers are in use until the last has ended.
                wait(self._futures)
                break
            except BaseException as error:  # an interrupt; see [Note: Completions]
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt
        for future in self._futures:
            failure = future.exception()
            if failure is not None:
                raise failure.with_traceback(None)


class PosixStore:
    """Block store over the file's own descriptors; see [Note: Blocks] and [Note: Bounce buffers].

    Args:
        file: the open swap file; stays its owner's.
        num_threads: I/O depth.
        calls: who executes the system calls.
    """

    engine = "posix"

    def __init__(
        self, file: SwapFile, *, num_threads: int = 4, calls: SystemCalls | None = None
    ) -> None:
        self.measured = ""
        self._file = file
        self._calls: SystemCalls = calls if calls is not None else os
        self._local = threading.local()
        numbers = itertools.count()

        def name_thread() -> None:
            threading.current_thread().name = f"tvm_pager-posix-{next(numbers)}"

        self._pool = ThreadPoolExecutor(num_threads, "tvm_pager-posix", initializer=name_thread)

    @property
    def io(self) -> Literal["direct", "buffered"]:
        return self._file.io

    def write(self, file_offset: int, buffers: Sequence[memoryview]) -> FutureCompletion:
        return self._submit(file_offset, buffers, is_write=True)

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> FutureCompletion:
        return self._submit(file_offset, buffers, is_write=False)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _submit(
        self, file_offset: int, buffers: Sequence[memoryview], *, is_write: bool
    ) -> FutureCompletion:
        check_range(self._file, file_offset, buffers)
        tasks: list[list[Span]] = []
        room = 0
        for span in spans(file_offset, buffers, _TASK_BYTES):
            if room < span.nbytes:
                tasks.append([])
                room = _TASK_BYTES + NVME_ALIGNMENT  # a last, partial block is no task of its own
            tasks[-1].append(span)
            room -= span.nbytes
        try:
            return FutureCompletion(
                [self._pool.submit(self._run, task, is_write) for task in tasks]
            )
        except RuntimeError as error:
            raise TransferError(
                "the block store is closed: make a new pager", errno.EBADF
            ) from error

    # --- in the pool's threads -------------------------------------------------------------------

    def _run(self, task: Sequence[Span], is_write: bool) -> None:
        for span in task:
            self._move(span, is_write)

    def _move(self, span: Span, is_write: bool) -> None:
        if self._file.io == "direct":
            try:
                self._move_direct(span, is_write)
                return
            except TransferError as error:
                if error.errno not in _REFUSED:
                    raise
                self._file.degrade(os.strerror(error.errno))
        at = span.file_offset
        for view in span.views:
            self._loop(self._file.fd, view, at, is_write, granularity=1)
            at += len(view)
        if is_write:
            self._file.push(span.file_offset, span.nbytes)

    def _move_direct(self, span: Span, is_write: bool) -> None:
        fd = self._file.direct_fd
        is_whole = len(span.views) == 1 and span.nbytes % NVME_ALIGNMENT == 0
        if is_whole and _address(span.views[0]) % self._file.memory_alignment == 0:
            self._loop(fd, span.views[0], span.file_offset, is_write, NVME_ALIGNMENT)
            return
        bounce = self._bounce()
        at = span.file_offset
        for view in _gathered(span.views):
            nbytes = sum(len(part) for part in view)
            block = bounce[: align_up(nbytes, NVME_ALIGNMENT)]
            if is_write:
                _copy(view, block, to_block=True)
                block[nbytes:] = bytes(len(block) - nbytes)
            self._loop(fd, block, at, is_write, NVME_ALIGNMENT)
            if not is_write:
                _copy(view, block, to_block=False)
            at += nbytes

    def _loop(
        self, fd: int, view: memoryview, offset: int, is_write: bool, granularity: int
    ) -> None:
        """Moves all of `view`; goes on from the last whole `granularity` after a partial transfer.

        EINTR is retried by Python itself.
        """
        moved = 0
        call = self._calls.pwritev if is_write else self._calls.preadv
        verb = "writing" if is_write else "reading"
        while moved < len(view):
            what = f"{verb} {len(view) - moved} bytes at {offset + moved} of the swap file"
            try:
                step = call(fd, [view[moved:]], offset + moved)
            except OSError as error:
                raise transfer_error(
                    what, self._file, error.strerror or str(error), error.errno
                ) from error
            if moved + step < len(view):
                step = step // granularity * granularity
                if step <= 0:
                    raise transfer_error(
                        what, self._file, f"stopped short by the disk after {step}", errno.EIO
                    )
            moved += step

    def _bounce(self) -> memoryview:
        view: memoryview | None = getattr(self._local, "bounce", None)
        if view is None:
            view = self._local.bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        return view


def _gathered(views: Sequence[memoryview]) -> list[list[memoryview]]:
    """Portions that each fit the bounce buffer; several views are less than a block together."""
    if len(views) > 1:
        return [list(views)]
    (view,) = views
    return [[view[at : at + _BOUNCE_BYTES]] for at in range(0, len(view), _BOUNCE_BYTES)]


def _copy(views: Sequence[memoryview], block: memoryview, *, to_block: bool) -> None:
    at = 0
    for view in views:
        part = block[at : at + len(view)]
        if to_block:
            part[:] = view
        else:
            view[:] = part
        at += len(view)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
