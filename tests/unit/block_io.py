"""What tests of disks share: buffers at any address, and I/O that fails or is refused."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import TransferError

if TYPE_CHECKING:
    import pytest

    from tvm_pager.transfer.block_store import BlockStore, Completion

MIB = 1 << 20
SIZES = [1, 511, 512, 513, 4095, 4096, 4097, MIB + 3, 9 * MIB + 513]
SHIFTS = [0, 512, 64]  # of the buffer's address from a page border


def buffer_of(nbytes: int, shift: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes + shift + 4096))[shift : shift + nbytes]


def random_buffer(nbytes: int, shift: int = 0, seed: int = 0) -> memoryview:
    buffer = buffer_of(nbytes, shift)
    buffer[:] = random.Random(seed).randbytes(nbytes)
    return buffer


class FaultyCalls:
    """System calls that do as `plan` says, one entry each: an errno, the most bytes, or None."""

    def __init__(self, plan: Sequence[Callable[[int], int | None] | int | None]) -> None:
        self.plan = list(plan)
        self.num_calls = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._call(os.pwritev, fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._call(os.preadv, fd, buffers, offset)

    def _call(
        self, call: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int
    ) -> int:
        self.num_calls += 1
        step = self.plan.pop(0) if self.plan else None
        if isinstance(step, int):
            raise OSError(step, os.strerror(step))
        most = step(len(buffers[0])) if step is not None else len(buffers[0])
        return call(fd, [buffers[0][:most]], offset) if most else 0


def refuse_direct_open(monkeypatch: pytest.MonkeyPatch, code: int = errno.EINVAL) -> None:
    """Makes every file system one without direct I/O, as older tmpfs and some overlays are."""
    real_open = os.open

    def buffered_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", buffered_only)


def refuse_direct_transfers(
    monkeypatch: pytest.MonkeyPatch,
    code: int = errno.EINVAL,
    calls: Sequence[str] = ("pwritev", "preadv"),
) -> None:
    """From now on the flag is accepted and the I/O is not, as some network file systems do."""

    def refusing(name: str) -> Callable[..., int]:
        call: Callable[..., int] = getattr(os, name)

        def move(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(code, os.strerror(code))
            return call(fd, buffers, offset)

        return move

    for name in calls:
        monkeypatch.setattr(os, name, refusing(name))


def nothing_fails(is_write: bool, file_offset: int) -> int | None:
    return None


class FailingStore:
    """A block store that fails as `choose` says: whether it is a write, file offset -> errno.

    A failure shows when the real I/O has ended. `written` has the offsets of all writes.
    """

    def __init__(self, store: BlockStore) -> None:
        self.choose: Callable[[bool, int], int | None] = nothing_fails
        self.written: list[int] = []
        self.engine = store.engine
        self.measured = ""
        self._store = store

    @property
    def io(self) -> Any:
        return self._store.io

    def write(self, file_offset: int, buffers: Sequence[memoryview]) -> Completion:
        self.written.append(file_offset)
        return self._or_failed(self._store.write(file_offset, buffers), True, file_offset)

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> Completion:
        return self._or_failed(self._store.read(file_offset, buffers), False, file_offset)

    def close(self) -> None:
        self._store.close()

    def _or_failed(self, completion: Completion, is_write: bool, file_offset: int) -> Completion:
        code = self.choose(is_write, file_offset)
        return completion if code is None else Failed(completion, code)


class Failed:
    """The completion of I/O that ended and is reported to have failed."""

    def __init__(self, completion: Completion, code: int) -> None:
        self._completion = completion
        self._code = code

    def done(self) -> bool:
        return self._completion.done()

    def wait(self) -> None:
        self._completion.wait()
        raise TransferError(os.strerror(self._code), self._code)
