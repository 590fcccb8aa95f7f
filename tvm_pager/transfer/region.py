"""One region of the host slab: an anonymous mapping, touched and page-locked as a whole.

[Note: Touching]
    Page-locking memory that the kernel has not backed yet is several times slower than backing it
    first, in parallel and in huge pages (tools/bench_slab.py measures it). MADV_POPULATE_WRITE does
    that, and where a container's limit is reached it says so: writing zeros would get the process
    killed. That is worth half the rate (8.8 against 16.6 GB/s with eight threads on an H200
    machine; three times torch's allocator all the same). Kernels before 5.14 do not know it, and
    there zeros are written. Both run without the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tvm_pager.errors import TransferError
from tvm_pager.transfer.numa import NumaNode, node_near
from tvm_pager.transfer.raw_bytes import raw_view
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CudaLocker", "PageLocker", "Region", "host_node_of", "touch"]

_TOUCH_BYTES = 64 << 20  # per task: large enough to amortise a thread, small enough to balance
_MAX_TOUCH_THREADS = 8
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PageLocker(Protocol):
    """Who page-locks memory for device copies. Several threads lock different ranges at once."""

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
    """Registers memory with the CUDA runtime.

    Args:
        device: whose context does it: a thread that has not chosen a card would make a context on
            the first. None: the current card of the thread that makes the locker.
    """

    def __init__(self, device: torch.device | int | None = None) -> None:
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):
            self._check(_cudart().cudaHostRegister(address, nbytes, 0), "register", nbytes)

    def unlock(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):
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


def host_node_of(device: torch.device) -> NumaNode | None:
    """The NUMA node for host memory that is copied to and from `device`; None: any will do."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, slot = (getattr(found, name, None) for name in names)
    if domain is None or bus is None or slot is None:  # a build of torch that does not say
        return None
    return node_near(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


class Region:
    """One mapping with its address and its two faces, as soon as `map` has made it.

    Attributes:
        start: where it begins in the slab.
        gate: held by whoever maps it or gives it up, so that others wait for this region only.
        is_ready: mapped, and locked where that was asked for.
        is_gone: given up; nobody may map it any more.
    """

    __slots__ = (
        "address",
        "buffer",
        "gate",
        "is_gone",
        "is_locked",
        "is_ready",
        "mapping",
        "nbytes",
        "start",
        "tensor",
    )

    address: int
    buffer: memoryview
    tensor: torch.Tensor

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.gate = threading.Lock()
        self.mapping: mmap.mmap | None = None
        self.is_ready = self.is_gone = self.is_locked = False

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def map(
        self,
        locker: PageLocker | None,
        *,
        node: NumaNode | None = None,
        huge_pages: bool = True,
        touch_with: Callable[[int, int], None] | None = None,
    ) -> None:
        """Maps the region, and with a locker touches and locks all of it. Blocks.

        Args:
            locker: who page-locks; None leaves the memory to be backed as it is used.
            node: whose memory is preferred; see [Note: NUMA placement].
            huge_pages: whether the kernel is asked for them before it is touched.
            touch_with: called with address and bytes; `touch` unless a benchmark says otherwise.

        Raises:
            TransferError: the system refuses memory or locking. Nothing stays mapped.
        """
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _no_memory("mapping", self.nbytes, error) from error
        self.mapping = mapping  # at once: a child forked from here on has to know of it
        try:
            self._advise(mapping, huge_pages=locker is not None and huge_pages)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            if node is not None:
                node.prefer(self.address, self.nbytes)
            if locker is not None:
                (touch_with or touch)(self.address, self.nbytes)
                locker.lock(self.address, self.nbytes)
                self.is_locked = True
        except BaseException:
            # Here and now: the traceback of a kept error would keep all of it.
            self.mapping = None
            mapping.close()
            raise
        self.buffer = memoryview(mapping)
        self.tensor = raw_view(mapping)
        self.is_ready = True

    @staticmethod
    def _advise(mapping: mmap.mmap, *, huge_pages: bool) -> None:
        hints = [mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP]
        if huge_pages:
            hints.append(mmap.MADV_HUGEPAGE)  # all of it is touched anyway
        for hint in hints:
            with contextlib.suppress(OSError):  # a kernel built without it
                mapping.madvise(hint)


def touch(
    address: int, nbytes: int, *, num_threads: int | None = None, populate: bool = True
) -> None:
    """Makes the kernel back a zeroed anonymous range; see [Note: Touching]. Blocks.

    Args:
        address: page-aligned.
        nbytes: size.
        num_threads: None: one for each core, eight at most.
        populate: whether MADV_POPULATE_WRITE is tried before zeros are written.

    Raises:
        TransferError: the kernel has no memory for it.
    """
    starts = range(address, address + nbytes, _TOUCH_BYTES)
    if num_threads is None:
        num_threads = min(os.cpu_count() or 1, _MAX_TOUCH_THREADS)

    def back(start: int) -> None:
        size = min(_TOUCH_BYTES, address + nbytes - start)
        if populate and _LIBC.madvise(start, size, _MADV_POPULATE_WRITE) == 0:
            return
        if populate and ctypes.get_errno() != errno.EINVAL:
            failure = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            raise _no_memory("touching", nbytes, failure)
        ctypes.memset(start, 0, size)

    try:
        with ThreadPoolExecutor(
            min(len(starts), num_threads), thread_name_prefix="tvm_pager-touch"
        ) as pool:
            list(pool.map(back, starts))
    except TransferError:
        raise
    except RuntimeError:  # no further thread: at a limit, or because the interpreter is ending
        for start in starts:
            back(start)


def _no_memory(what: str, nbytes: int, error: OSError) -> TransferError:
    return TransferError(
        f"host memory: {what} {format_bytes(nbytes)} failed ({error.strerror}); give a smaller "
        f"host budget",
        error.errno,
    )
