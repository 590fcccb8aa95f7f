"""Copies between a page's device memory and the host slab: by the CPU, or by a CUDA stream.

[Note: The storage, not the tensor]
    Copies go to `storage` itself, by address, past every tensor that views it: no version counter
    moves, no mode or subclass is asked, gradients do not notice. On the CPU that is a plain
    memmove: 0.4 us below 4 KiB, where `copy_` and its alias take 5 us, and 10 GB/s above. Torch's
    threads gain a third from 1 MiB on, but only on idle cores: on busy ones they wait for each
    other (1 MiB: 25 us against 24 ms).
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from tvm_pager.transfer.slab import HostSlab

__all__ = ["Copier", "CpuCopier", "CudaCopier", "SlabRange", "stream_of"]


class SlabRange(NamedTuple):
    """Bytes of a slab."""

    slab: HostSlab
    offset: int
    nbytes: int


class Copier(Protocol):
    """Moves bytes between a storage and a slab."""

    def copy(
        self, storage: torch.UntypedStorage, page_offset: int, place: SlabRange, *, down: bool
    ) -> None:
        """Copies, or queues a copy: from the storage to `place`, or back."""

    def finish(self) -> None:
        """Blocks until the copies queued so far have arrived. Releases the GIL."""


class CpuCopier:
    """Copies in the calling thread, at once: CPU tensors stand in for a device."""

    def copy(
        self, storage: torch.UntypedStorage, page_offset: int, place: SlabRange, *, down: bool
    ) -> None:
        address = storage.data_ptr() + page_offset
        for there, size in place.slab.addresses(place.offset, place.nbytes):
            target, source = (there, address) if down else (address, there)
            ctypes.memmove(target, source, size)  # releases the GIL
            address += size

    def finish(self) -> None:
        """Does nothing: copies end before they return."""


class CudaCopier:
    """Copies on a CUDA stream; slab memory must be page-locked.

    The driver is called by address: 2 us a copy, where `copy_` under a stream's context takes 30,
    and a step under pressure makes thousands.

    Args:
        stream: carries the copies.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._handle = ctypes.c_void_p(stream.cuda_stream)
        # Keeps the GIL: to give it up and get it back beside other threads takes longer than a call
        # that only queues.
        driver = ctypes.PyDLL("libcuda.so.1")
        self._up = driver.cuMemcpyHtoDAsync_v2
        self._up.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._down = driver.cuMemcpyDtoHAsync_v2
        self._down.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def copy(
        self, storage: torch.UntypedStorage, page_offset: int, place: SlabRange, *, down: bool
    ) -> None:
        address = storage.data_ptr() + page_offset
        for there, size in place.slab.addresses(place.offset, place.nbytes):
            if self._move(address, there, size, down=down):
                # A thread that has not used this device yet has no context, or another one's: then
                # the driver refuses, or finds nothing wrong as long as the range lies in one of an
                # expandable segment's mappings. Choosing the device binds its context only where
                # that is a change; any call of the runtime does.
                with torch.cuda.device(self.stream.device):
                    self.stream.query()
                    code = self._move(address, there, size, down=down)
                if code:
                    way = "to" if down else "from"
                    raise RuntimeError(
                        f"CUDA error {code} copying {size} bytes at {address:#x} of device memory "
                        f"({storage.nbytes()} bytes at {storage.data_ptr():#x}) {way} host memory "
                        f"at {there:#x}"
                    )
            address += size

    def _move(self, address: int, there: int, nbytes: int, *, down: bool) -> int:
        if down:
            return int(self._down(there, address, nbytes, self._handle))
        return int(self._up(address, there, nbytes, self._handle))

    def finish(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        event.synchronize()


@functools.lru_cache(maxsize=64)
def stream_of(executor: object, device: torch.device) -> torch.cuda.Stream:
    """Gives the stream behind an executor: a stream, or the raw handle of one."""
    if isinstance(executor, torch.cuda.Stream):
        return executor
    if not isinstance(executor, int):
        raise AssertionError(f"{executor!r} is no CUDA stream and no handle of one")
    if executor == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(executor, device)  # type: ignore[no-untyped-call]
