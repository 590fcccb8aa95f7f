"""What the tests of the block stores share: buffers at any address, system calls that fail."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence

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
