"""Copies between a page's device memory and the host slab: by the CPU, or by a CUDA stream.

Both copiers work in turns: `begin`, any number of `to_host` and `to_device`, `finish`. All bytes
have arrived, and the source may be reused, when `finish` returns; it is also what ends a turn that
failed.

[Note: The storage, not the tensor]
    Copies go to `storage` itself, past every tensor that views it: no version counter moves, no
    mode or subclass is asked, gradients do not notice. On the CPU that is a plain memmove: 0.4 us
    below 4 KiB, where `copy_` and its alias take 5 us, and 10 GB/s above. Torch's threads gain a
    third from 1 MiB on, but only on idle cores: on busy ones they wait for each other (1 MiB: 25 us
    against 24 ms).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

import torch

from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm_pager.transfer.slab import HostSlab

__all__ = ["Copier", "CpuCopier", "CudaCopier", "stream_of"]


class Copier(Protocol):
    """Moves bytes between storages on one device and slabs. Ranges are in bytes."""

    def begin(self, after: tuple[object, ...]) -> None:
        """Starts a turn whose copies come after the work queued on the executors in `after`."""

    def to_host(
        self,
        storage: torch.UntypedStorage,
        page_offset: int,
        slab: HostSlab,
        offset: int,
        nbytes: int,
    ) -> None:
        """Queues a copy from the storage to the slab."""

    def to_device(
        self,
        storage: torch.UntypedStorage,
        page_offset: int,
        slab: HostSlab,
        offset: int,
        nbytes: int,
    ) -> None:
        """Queues a copy from the slab to the storage."""

    def finish(self) -> None:
        """Blocks until the copies queued so far in this turn have arrived. Releases the GIL."""

    def drain(self, after: tuple[object, ...]) -> None:
        """Blocks until the work queued on the executors in `after` has ended."""


class CpuCopier:
    """Copies in the calling thread, at once: CPU tensors stand in for a device."""

    def begin(self, after: tuple[object, ...]) -> None:
        """Does nothing: the CPU has no executors."""

    def to_host(
        self,
        storage: torch.UntypedStorage,
        page_offset: int,
        slab: HostSlab,
        offset: int,
        nbytes: int,
    ) -> None:
        address = storage.data_ptr() + page_offset
        for target, size in slab.addresses(offset, nbytes):
            ctypes.memmove(target, address, size)  # releases the GIL
            address += size

    def to_device(
        self,
        storage: torch.UntypedStorage,
        page_offset: int,
        slab: HostSlab,
        offset: int,
        nbytes: int,
    ) -> None:
        address = storage.data_ptr() + page_offset
        for source, size in slab.addresses(offset, nbytes):
            ctypes.memmove(address, source, size)
            address += size

    def finish(self) -> None:
        """Does nothing: copies end before they return."""

    def drain(self, after: tuple[object, ...]) -> None:
        """Does nothing: the CPU has no executors."""


class CudaCopier:
    """Copies on the stream that is current in the calling thread, which then waits for them.

    Device memory belongs to the stream that was current when it was allocated, so a fetch into
    memory allocated on another stream must name that one in `after`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, after: tuple[object, ...]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for executor in after:
            other = stream_of(executor, self._device)
            if other.cuda_stream != stream.cuda_stream:
                stream.wait_stream(other)

    def to_host(
        self,
        storage: torch.UntypedStorage,
        page_offset: int,
        slab: HostSlab,
        offset: int,
        nbytes: int,
    ) -> None:
        with torch.cuda.device(self._device), RawDispatch():
            for view, part in _pairs(storage, self._device, page_offset, slab.view(offset, nbytes)):
                view.copy_(part, non_blocking=True)

    def to_device(
        self,
        storage: torch.UntypedStorage,
        page_offset: int,
        slab: HostSlab,
        offset: int,
        nbytes: int,
    ) -> None:
        with torch.cuda.device(self._device), RawDispatch():
            for view, part in _pairs(storage, self._device, page_offset, slab.view(offset, nbytes)):
                part.copy_(view, non_blocking=True)

    def finish(self) -> None:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            event.synchronize()

    def drain(self, after: tuple[object, ...]) -> None:
        stream = torch.cuda.current_stream(self._device)
        others = [stream_of(executor, self._device) for executor in after]
        for other in others:
            if other.cuda_stream != stream.cuda_stream:
                stream.wait_stream(other)
        # One executor that is the current stream is ordered by the allocator itself. With several,
        # memory goes back to the pool of one while another may still read it.
        for other in others:
            if len(others) > 1 or other.cuda_stream != stream.cuda_stream:
                other.synchronize()


def stream_of(executor: object, device: torch.device) -> torch.cuda.Stream:
    """Gives the stream behind an executor: a stream, or the raw handle of one."""
    if isinstance(executor, torch.cuda.Stream):
        return executor
    if not isinstance(executor, int):
        raise AssertionError(f"{executor!r} is no CUDA stream and no handle of one")
    if executor == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(executor, device)  # type: ignore[no-untyped-call]


def _pairs(
    storage: torch.UntypedStorage, device: torch.device, offset: int, views: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Gives each view with its bytes of the storage. To be consumed in `RawDispatch`."""
    raw = raw_alias(storage, device)
    for view in views:
        yield view, raw[offset : offset + len(view)]
        offset += len(view)
