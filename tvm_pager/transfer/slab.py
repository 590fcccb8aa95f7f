"""The host slab: the DRAM tier's memory, grown region by region, page-locked where CUDA copies.

Owns mappings and their registration; hands out views. Which bytes are whose is the page table's
business.

[Note: Regions]
    The flat offset space [0, capacity) lies in anonymous mappings of `region_bytes` each, made when
    first touched. They are page-aligned (direct I/O), not inherited by fork, not dumped into core
    files (they hold weights), and registered each on its own, so that start-up can stop at what is
    needed. Nothing contiguous crosses a region's
    border: every view is a list. torch's own page-locked allocator is not used: it rounds to powers
        of two.

[Note: Lifetime of slab memory]
    A view keeps its region's mapping alive, also after `close`, which unlocks and lets go. So a
    late reader sees memory that is still mapped. In a forked child the mappings do not exist
    (MADV_DONTFORK), but the objects do: their destructor would unmap whatever lies there by then,
    so the child leaks them on purpose.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tvm_pager.errors import TransferError
from tvm_pager.transfer.raw_bytes import RawDispatch, raw_view
from tvm_pager.units import format_bytes

__all__ = ["CudaLocker", "HostSlab", "PageLocker"]

_SLAB_ALIGNMENT = 4096
_GIB = 1 << 30
_TOUCH_BYTES = 64 << 20  # per task: large enough to amortise a thread, small enough to balance
_MAX_TOUCH_THREADS = 8
_OPEN_SLABS: weakref.WeakSet[HostSlab] = weakref.WeakSet()


class PageLocker(Protocol):
    """Who page-locks memory for device copies."""

    def lock(self, address: int, nbytes: int) -> None:
        """Page-locks a range that has been touched.

        Raises:
            TransferError: refused.
        """

    def unlock(self, address: int, nbytes: int) -> None:
        """Undoes `lock` for the same range.

        Raises:
            TransferError: refused.
        """


class CudaLocker:
    """Registers memory with the CUDA runtime."""

    def lock(self, address: int, nbytes: int) -> None:
        self._check(_cudart().cudaHostRegister(address, nbytes, 0), "register", nbytes)

    def unlock(self, address: int, nbytes: int) -> None:
        self._check(_cudart().cudaHostUnregister(address), "unregister", nbytes)

    @staticmethod
    def _check(result: Any, what: str, nbytes: int) -> None:
        if int(result) == 0:
            return
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        raise TransferError(
            f"CUDA could not {what} {format_bytes(nbytes)} of host memory (cudaError "
            f"{int(result)}; locked memory limit, ulimit -l: {shown}); give a smaller host budget "
            f"or raise the limit",
            errno.ENOMEM,
        )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Region:
    """One mapping with its address and its two faces."""

    __slots__ = ("address", "buffer", "is_locked", "mapping", "nbytes", "tensor")

    def __init__(self, nbytes: int, *, will_lock: bool) -> None:
        try:
            self.mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise TransferError(
                f"host memory: mapping {format_bytes(nbytes)} failed ({error.strerror}); "
                f"give a smaller host budget",
                error.errno,
            ) from error
        hints = [mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP]
        if will_lock:
            hints.append(mmap.MADV_HUGEPAGE)  # all of it is touched anyway: 4 times faster
        for hint in hints:
            with contextlib.suppress(OSError):  # a kernel built without it
                self.mapping.madvise(hint)
        self.nbytes = nbytes
        self.buffer = memoryview(self.mapping)
        self.tensor = raw_view(self.mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.is_locked = False

    def touch(self) -> None:
        """Makes the kernel back every page, in parallel and without the GIL."""
        starts = range(0, self.nbytes, _TOUCH_BYTES)
        num_threads = min(len(starts), os.cpu_count() or 1, _MAX_TOUCH_THREADS)

        def fill(start: int) -> None:
            ctypes.memset(self.address + start, 0, min(_TOUCH_BYTES, self.nbytes - start))

        with ThreadPoolExecutor(num_threads, thread_name_prefix="tvm_pager-touch") as pool:
            list(pool.map(fill, starts))


class HostSlab:
    """A flat, thread-safe space of bytes; see [Note: Regions] and [Note: Lifetime of slab memory].

    Args:
        capacity_bytes: size; rounded down to a multiple of 4096.
        region_bytes: size of each mapping but the last, a multiple of 4096.
        page_lock: whether regions are touched and page-locked when they are mapped.
        locker: who locks; the CUDA runtime unless a test says otherwise.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        region_bytes: int = _GIB,
        page_lock: bool,
        locker: PageLocker | None = None,
    ) -> None:
        if capacity_bytes < 0 or region_bytes <= 0 or region_bytes % _SLAB_ALIGNMENT:
            raise ValueError(
                f"{capacity_bytes=} must be >= 0 and {region_bytes=} a positive multiple of 4096"
            )
        self.capacity_bytes = capacity_bytes // _SLAB_ALIGNMENT * _SLAB_ALIGNMENT
        self.region_bytes = region_bytes
        self.mapped_bytes = 0
        self.locked_bytes = 0
        self._locker = (locker or CudaLocker()) if page_lock else None
        self._regions: list[_Region | None] = [None] * -(-self.capacity_bytes // region_bytes)
        self._lock = threading.Lock()
        self._is_closed = False
        _OPEN_SLABS.add(self)

    def grow(self, nbytes: int) -> None:
        """Maps (and locks) all regions of the first `nbytes` bytes. Blocks; any thread may.

        Raises:
            TransferError: the system refuses memory or locking; what was mapped before stays.
        """
        for index in range(-(-min(nbytes, self.capacity_bytes) // self.region_bytes)):
            self._region(index)

    def view(self, offset: int, nbytes: int) -> list[torch.Tensor]:
        """Gives the range as uint8 tensors, split at region borders, mapping what is missing.

        Raises:
            TransferError: as `grow`.
            AssertionError: the range leaves the slab.
        """
        with RawDispatch():
            return [region.tensor[start:end] for region, start, end in self._split(offset, nbytes)]

    def buffers(self, offset: int, nbytes: int) -> list[memoryview]:
        """Gives the range as writable memoryviews; otherwise as `view`."""
        return [region.buffer[start:end] for region, start, end in self._split(offset, nbytes)]

    def addresses(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Gives the range as (address, nbytes), valid until `close`; otherwise as `view`."""
        return [
            (region.address + start, end - start)
            for region, start, end in self._split(offset, nbytes)
        ]

    def close(self) -> None:
        """Unlocks all regions and lets go of them. No copy may be in flight. Idempotent.

        Raises:
            TransferError: a region could not be unlocked; the others are.
        """
        with self._lock:
            regions = [region for region in self._regions if region is not None]
            self._regions, self._is_closed = [], True
            _OPEN_SLABS.discard(self)
            failure: TransferError | None = None
            for region in regions:
                try:
                    if region.is_locked and self._locker is not None:
                        self._locker.unlock(region.address, region.nbytes)
                except TransferError as error:
                    failure = failure or error
            self.mapped_bytes = self.locked_bytes = 0
        if failure is not None:
            raise failure

    def _split(self, offset: int, nbytes: int) -> list[tuple[_Region, int, int]]:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise AssertionError(
                f"[{offset}, {offset + nbytes}) leaves the {self.capacity_bytes} bytes of the slab"
            )
        parts: list[tuple[_Region, int, int]] = []
        while nbytes:
            index, start = divmod(offset, self.region_bytes)
            take = min(nbytes, self.region_bytes - start)
            parts.append((self._region(index), start, start + take))
            offset += take
            nbytes -= take
        return parts

    def _region(self, index: int) -> _Region:
        regions = self._regions  # `close` replaces the list, and never shortens this one
        region = regions[index] if regions else None
        return region if region is not None else self._map(index)

    def _map(self, index: int) -> _Region:
        with self._lock:
            if self._is_closed:
                raise TransferError("the host slab is closed: make a new pager", errno.EBADF)
            region = self._regions[index]
            if region is not None:
                return region
            nbytes = min(self.region_bytes, self.capacity_bytes - index * self.region_bytes)
            region = _Region(nbytes, will_lock=self._locker is not None)
            if self._locker is not None:
                region.touch()
                self._locker.lock(region.address, nbytes)
                region.is_locked = True
                self.locked_bytes += nbytes
            self.mapped_bytes += nbytes
            self._regions[index] = region
            return region


def _disown_in_child() -> None:
    """Marks slabs closed in a forked child, where their mappings must never be unmapped."""
    for slab in list(_OPEN_SLABS):
        for region in slab._regions:
            if region is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(region.mapping))
        slab._regions, slab._is_closed = [], True
        slab.mapped_bytes = slab.locked_bytes = 0
        slab._lock = threading.Lock()  # another thread of the parent may have held it
    _OPEN_SLABS.clear()


os.register_at_fork(after_in_child=_disown_in_child)
