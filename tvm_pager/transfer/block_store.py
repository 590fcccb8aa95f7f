"""Block stores: who reads and writes the swap file, behind one interface with two engines.

`posix` works everywhere and is the oracle; `kvikio` is for GPU machines. Neither is imported before
it is chosen.

[Note: Blocks]
    File offsets are multiples of 4096. Lengths are not: the last block of a write is padded,
    through an aligned buffer of the engine's, so the caller keeps that room free. A read gives
    exactly the bytes asked for, or an
    error: nothing is ever short.

[Note: Completions]
    Buffers given to `write` and `read` belong to the store until the completion is done. The store
    itself keeps file and buffers alive until then, also when the completion is dropped. A
    completion that has failed says so at each `wait`. An interrupt (Ctrl-C) during `wait` is raised
    after the I/O has ended, not before.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from tvm_pager.errors import ConfigError, TransferError
from tvm_pager.transfer.pieces import NVME_ALIGNMENT
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

    from tvm_pager.transfer.swap_file import SwapFile

__all__ = ["BlockStore", "Completion", "Span", "measure", "open_block_store", "spans"]

_MESSAGES = (
    errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EINVAL, errno.EFAULT,
    errno.EBADF, errno.EPERM, errno.EACCES, errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.ENODEV,
)  # fmt: skip


class Completion(Protocol):
    """I/O that was submitted; see [Note: Completions]."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""

    def wait(self) -> None:
        """Blocks until it has ended.

        Raises:
            TransferError: it failed; raised at each call.
        """


class BlockStore(Protocol):
    """Moves blocks between host memory and the swap file. Thread-safe; see [Note: Blocks]."""

    engine: str  # "posix" or "kvikio"
    measured: str  # GB/s at start-up, for people; empty before `measure`

    @property
    def io(self) -> Literal["direct", "buffered"]:
        """The path in use now."""

    def write(self, file_offset: int, buffers: Sequence[memoryview]) -> Completion:
        """Starts writing the buffers one after the other at `file_offset` (bytes).

        Raises:
            AssertionError: the range leaves the file or starts off the alignment.
        """

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> Completion:
        """Starts filling the buffers one after the other from `file_offset` (bytes); as `write`."""

    def close(self) -> None:
        """Waits for all I/O, then ends the threads; the file stays its owner's. Idempotent."""


class Span(NamedTuple):
    """One I/O: whole blocks in one buffer, or less than one block gathered from several."""

    file_offset: int  # multiple of 4096
    views: tuple[memoryview, ...]
    nbytes: int


def spans(file_offset: int, buffers: Sequence[memoryview], max_bytes: int) -> Iterator[Span]:
    """Cuts buffers that follow each other in the file; `max_bytes` is a multiple of 4096."""
    gathered: list[memoryview] = []
    filled = 0
    for buffer in buffers:
        start, nbytes = 0, len(buffer)
        if filled:
            start = min(NVME_ALIGNMENT - filled, nbytes)
            gathered.append(buffer[:start])
            filled += start
            if filled == NVME_ALIGNMENT:
                yield Span(file_offset, tuple(gathered), filled)
                file_offset, gathered, filled = file_offset + filled, [], 0
        end = start + (nbytes - start) // NVME_ALIGNMENT * NVME_ALIGNMENT
        for at in range(start, end, max_bytes):
            take = min(max_bytes, end - at)
            yield Span(file_offset, (buffer[at : at + take],), take)
            file_offset += take
        if end < nbytes:
            gathered.append(buffer[end:])
            filled += nbytes - end
    if filled:
        yield Span(file_offset, tuple(gathered), filled)


def check_range(file: SwapFile, file_offset: int, buffers: Sequence[Sized]) -> int:
    """Gives the bytes in `buffers`.

    Raises:
        AssertionError: as `BlockStore.write`.
        TransferError: the file is closed.
    """
    nbytes = sum(len(buffer) for buffer in buffers)
    if file_offset < 0 or file_offset % NVME_ALIGNMENT or file_offset + nbytes > file.nbytes:
        raise AssertionError(
            f"[{file_offset}, {file_offset + nbytes}) of a swap file of {file.nbytes} bytes: "
            f"it must lie inside and start at a multiple of {NVME_ALIGNMENT}"
        )
    file.fd  # noqa: B018  # raises where the file is closed, before any engine gets stuck on it
    return nbytes


def transfer_error(what: str, file: SwapFile, detail: str, code: int | None) -> TransferError:
    """Builds the one kind of error of both engines; `code` None is looked for in `detail`."""
    if code is None:
        found = (known for known in _MESSAGES if os.strerror(known) in detail)
        code = next(found, errno.EIO if "EOF" in detail else None)
    remedy = (
        "free space there or give another nvme directory"
        if code in (errno.ENOSPC, errno.EDQUOT)
        else "check the disk (dmesg), or give another nvme directory"
    )
    return TransferError(f"{what} in {file.directory}: {detail}; {remedy}", code)


def open_block_store(
    file: SwapFile, engine: str, *, on_gpu: bool, num_threads: int = 4
) -> tuple[BlockStore, list[str]]:
    """Opens the engine asked for, and gives it with notices for the user.

    "auto" is kvikio on GPU machines where it works, else posix, with a notice that names the
    reason.

    Raises:
        ConfigError: the engine is unknown, or asked for by name and not usable here.
    """
    from tvm_pager.transfer import gpu_direct, kvikio, posix

    notices: list[str] = []
    if engine not in ("auto", "posix", "kvikio"):
        raise ConfigError(f"engine={engine!r}: known are auto, posix, kvikio")
    if engine == "kvikio" or (engine == "auto" and on_gpu):
        is_usable, reason = kvikio.probe(gds=on_gpu and gpu_direct.is_offered()[0])
        if is_usable:
            try:
                return kvikio.KvikioStore(file, num_threads=num_threads), notices
            except TransferError as error:
                reason = str(error)
        if engine == "kvikio":
            raise ConfigError(
                f"engine='kvikio' cannot be used: {reason}; install tvm_pager[kvikio] on a GPU "
                f"machine, or use engine='posix'"
            )
        notices.append(f"NVMe engine posix instead of kvikio: {reason}")
    return posix.PosixStore(file, num_threads=num_threads), notices


def measure(
    store: BlockStore,
    buffers: Sequence[memoryview],
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Writes `buffers` to the start of the file, reads them back, gives and keeps the speed.

    To run before the first page is there: it overwrites both. Also a health check: what was written
    must return.

    Raises:
        TransferError: the store does not work.
    """
    nbytes = sum(len(buffer) for buffer in buffers)
    for index, buffer in enumerate(buffers):
        buffer[:] = bytes([0xA5 ^ index & 0xFF]) * len(buffer)
    start = clock()
    store.write(0, buffers).wait()
    middle = clock()
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    restart = clock()
    store.read(0, buffers).wait()
    end = clock()
    for index, buffer in enumerate(buffers):
        if buffer != bytes([0xA5 ^ index & 0xFF]) * len(buffer):
            raise TransferError(
                f"engine {store.engine} ({store.io}): {format_bytes(nbytes)} were written and came "
                f"back different; give another nvme directory or engine",
                errno.EIO,
            )
    write_s, read_s = max(middle - start, 1e-9), max(end - restart, 1e-9)
    store.measured = (
        f"write {nbytes / write_s / 1e9:.2f} GB/s, read {nbytes / read_s / 1e9:.2f} GB/s "
        f"({format_bytes(nbytes)})"
    )
    return store.measured
