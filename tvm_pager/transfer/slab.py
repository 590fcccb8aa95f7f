"""The host slab: the DRAM tier's memory, grown region by region, page-locked where CUDA copies.

Owns the regions and hands out views. Which bytes are whose is the page table's business.

[Note: Regions]
    The flat offset space [0, capacity) lies in anonymous mappings of at most `region_bytes` each,
    made when first touched, or ahead of that in the background. They are page-aligned (direct I/O),
    not inherited by fork, not dumped into core files (they hold weights), near the GPU where there
    is a choice, and registered each on its own, so that start-up can stop at what is needed.
    Nothing contiguous crosses a region's border: every view is a list. torch's own page-locked
    allocator is not used: it rounds to powers of two.

[Note: Capacity changes]
    A region is mapped and unmapped as a whole, because CUDA registers it as a whole. So a slab that
    shrinks into the middle of a mapped region keeps all of it, and `mapped_bytes` says so;
    `border_below` gives the size that keeps no more than asked. A slab whose last region is mapped
    and shorter than `region_bytes` grows by further regions beside it, up to the same border. A
    slot holds the regions of one stretch of `region_bytes`: nearly always one.

[Note: Who waits for what]
    `_lock` covers the slots and the counts, and is never held while memory is touched or locked; a
    region's gate covers that work. Gate before lock, never the other way round. So threads that
    want the same region do its work once, those that want different ones work side by side, and
    nobody ever waits for more than one region.

[Note: Lifetime of slab memory]
    A view keeps its region's mapping alive, also after `close`, which unlocks and lets go. So a
    late reader sees memory that is still mapped. In a forked child the mappings do not exist
    (MADV_DONTFORK), but the objects do: their destructor would unmap whatever lies there by then,
    so the child leaks them on purpose.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import threading
import weakref
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.transfer.raw_bytes import RawDispatch
from tvm_pager.transfer.region import CudaLocker, PageLocker, Region
from tvm_pager.transfer.slab_builder import SlabBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from tvm_pager.transfer.numa import NumaNode

__all__ = ["CudaLocker", "HostSlab", "PageLocker"]

_SLAB_ALIGNMENT = 4096
_GIB = 1 << 30
_OPEN_SLABS: weakref.WeakSet[HostSlab] = weakref.WeakSet()


class HostSlab:
    """A flat, thread-safe space of bytes; see [Note: Regions] and [Note: Lifetime of slab memory].

    Args:
        capacity_bytes: size; rounded down to a multiple of 4096.
        region_bytes: size of each mapping but the last, a multiple of 4096.
        page_lock: whether regions are touched and page-locked when they are mapped.
        locker: who locks; the CUDA runtime unless a test says otherwise.
        node: whose memory is preferred; None: any.

    Attributes:
        mapped_bytes: what is mapped; may exceed the capacity after `shrink_capacity`.
        locked_bytes: what of that is page-locked.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        region_bytes: int = _GIB,
        page_lock: bool,
        locker: PageLocker | None = None,
        node: NumaNode | None = None,
    ) -> None:
        if capacity_bytes < 0 or region_bytes <= 0 or region_bytes % _SLAB_ALIGNMENT:
            raise ValueError(
                f"{capacity_bytes=} must be >= 0 and {region_bytes=} a positive multiple of 4096"
            )
        self.capacity_bytes = _round_down(capacity_bytes)
        self.region_bytes = region_bytes
        self.mapped_bytes = 0
        self.locked_bytes = 0
        self._locker = (locker or CudaLocker()) if page_lock else None
        self._node = node
        self._lock = threading.Lock()
        self._slots: list[tuple[Region, ...]] = [()] * self._num_slots(self.capacity_bytes)
        self._is_closed = False
        self._builder = SlabBuilder(self)
        _OPEN_SLABS.add(self)

    # --- looking ---------------------------------------------------------------------------------

    def view(self, offset: int, nbytes: int) -> list[torch.Tensor]:
        """Gives the range as uint8 tensors, split at region borders, mapping what is missing.

        Blocks while it maps, or while somebody else maps the same region.

        Raises:
            TransferError: the system refuses memory or locking; what was mapped before stays.
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

    def ready_bytes(self, nbytes: int) -> int:
        """Gives how many of the first `nbytes` bytes are mapped, and locked if they are to be."""
        regions = [region for slot in self._slots for region in slot if region.is_ready]
        return sum(max(0, min(region.end, nbytes) - region.start) for region in regions)

    # --- ahead of use ----------------------------------------------------------------------------

    def grow(self, nbytes: int) -> None:
        """Maps (and locks) all regions of the first `nbytes` bytes. Blocks; otherwise as `view`."""
        offset = 0
        while offset < min(nbytes, self.capacity_bytes):
            offset = self._region(offset).end

    def build_in_background(
        self, nbytes: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Starts to map, touch and lock all regions of the first `nbytes` bytes; returns at once.

        One thread does it, a region after the other; other accesses are served meanwhile and wait
        for one region at most. A build that is under way is extended. It stops at the first error,
        which is then in `error`; accesses to what is missing try again, and raise what they meet.

        Args:
            nbytes: how much of the slab; the capacity at most.
            progress: called by that thread with the bytes done and the bytes to do, first and last,
                and at most four times a second between. It must not wait for a lock that somebody
                holds while closing the slab. What it raises is logged, and ends the calls.

        Raises:
            TransferError: the slab is closed, or no thread can be started.
        """
        with self._lock:
            self._refuse_closed()
        self._builder.build(min(nbytes, self.capacity_bytes), progress)

    @property
    def error(self) -> TransferError | None:
        """What ended the last build in the background, or None."""
        return self._builder.error

    def map_next(self, limit_bytes: int) -> bool:
        """Maps the first region that is missing below the limit; False where none is, or closed.

        Blocks; otherwise as `view`.
        """
        with self._lock:
            offset = self._first_missing(min(limit_bytes, self.capacity_bytes))
            if self._is_closed or offset is None:
                return False
            region = self._claim(offset)
        self._map(region)
        return True

    # --- size ------------------------------------------------------------------------------------

    def border_below(self, nbytes: int) -> int:
        """Gives the largest capacity, `nbytes` at most, that leaves no more than that mapped."""
        end = min(_round_down(nbytes), self.capacity_bytes)
        slots = self._slots[end // self.region_bytes :][:1]
        across = [r.start for slot in slots for r in slot if r.start < end < r.end]
        return min([end, *across])

    def grow_capacity(self, capacity_bytes: int) -> None:
        """Makes the slab larger; what is new is mapped when first touched. Does not block.

        Raises:
            ValueError: that is less than it has.
            TransferError: the slab is closed.
        """
        end = _round_down(capacity_bytes)
        with self._lock:
            self._refuse_closed()
            if end < self.capacity_bytes:
                raise ValueError(f"{capacity_bytes=} is below {self.capacity_bytes}")
            self._slots += [()] * (self._num_slots(end) - len(self._slots))
            self.capacity_bytes = end

    def shrink_capacity(self, capacity_bytes: int) -> None:
        """Makes the slab smaller; regions wholly beyond are unlocked and unmapped.

        The caller guarantees that no frame lies beyond, and that no transfer there is in flight.
        Blocks for the unlocking, and while a region beyond is being mapped. See [Note: Capacity
        changes] for what stays mapped.

        Raises:
            ValueError: that is more than it has, or negative.
            TransferError: the slab is closed, or a region could not be unlocked; the others are.
        """
        end = _round_down(capacity_bytes)
        with self._lock:
            self._refuse_closed()
            if not 0 <= end <= self.capacity_bytes:
                raise ValueError(f"{capacity_bytes=} is not in [0, {self.capacity_bytes}]")
            self.capacity_bytes = end
            last = self._num_slots(end) - 1
            gone = [r for slot in self._slots[max(0, last) :] for r in slot if r.start >= end]
            slots = self._slots[: last + 1]
            if slots:
                slots[last] = tuple(region for region in slots[last] if region.start < end)
            self._slots = slots
        self._give_up(gone)

    def close(self) -> None:
        """Ends the build, unlocks all regions and lets go of them. Idempotent.

        No copy may be in flight. Blocks for the unlocking, and for one region being mapped.

        Raises:
            TransferError: a region could not be unlocked; the others are.
        """
        with self._lock:
            regions = [region for slot in self._slots for region in slot]
            self._slots, self._is_closed = [], True
            _OPEN_SLABS.discard(self)
        self._builder.stop()
        self._give_up(regions)

    # --- regions ---------------------------------------------------------------------------------

    def _split(self, offset: int, nbytes: int) -> list[tuple[Region, int, int]]:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise AssertionError(
                f"[{offset}, {offset + nbytes}) leaves the {self.capacity_bytes} bytes of the slab"
            )
        parts: list[tuple[Region, int, int]] = []
        end = offset + nbytes
        while offset < end:
            region = self._region(offset)
            stop = min(end, region.end)
            parts.append((region, offset - region.start, stop - region.start))
            offset = stop
        return parts

    def _region(self, offset: int) -> Region:
        """The region that holds this byte, mapped. O(1) but for [Note: Capacity changes]."""
        slots = self._slots
        if slots:  # not closed
            for region in slots[offset // self.region_bytes]:
                if region.start <= offset < region.end and region.is_ready:
                    return region
        while True:
            with self._lock:
                self._refuse_closed()
                region = self._claim(offset)
            if self._map(region):
                return region

    def _claim(self, offset: int) -> Region:
        """The region that holds this byte, new where there is none; its claimant calls `_map`."""
        index = offset // self.region_bytes
        start = index * self.region_bytes
        end = min(start + self.region_bytes, self.capacity_bytes)
        for region in self._slots[index]:  # in order, without gaps
            if offset < region.end:
                return region
            start = region.end
        region = Region(start, end - start)
        self._slots[index] += (region,)
        return region

    def _map(self, region: Region) -> bool:
        """Maps a claimed region unless that is done; False if it has been given up meanwhile.

        If that fails, the region stays as it was: whoever waits for it tries again.
        """
        with region.gate:
            if region.is_gone:
                return False
            if not region.is_ready:
                region.map(self._locker, node=self._node)
                self._count(region, 1)
            return True

    def _give_up(self, regions: Iterable[Region]) -> None:
        failure: TransferError | None = None
        for region in regions:
            region.is_gone = True  # before the gate: who waits there to map it does not begin
            with region.gate:
                if not region.is_ready:
                    continue
                try:
                    if region.is_locked and self._locker is not None:
                        self._locker.unlock(region.address, region.nbytes)
                except TransferError as error:
                    failure = failure or error
                self._count(region, -1)
        if failure is not None:
            raise failure

    def _count(self, region: Region, sign: int) -> None:
        with self._lock:
            self.mapped_bytes += sign * region.nbytes
            self.locked_bytes += sign * region.nbytes * region.is_locked

    def _first_missing(self, limit: int) -> int | None:
        offset = 0
        for index, slot in enumerate(self._slots):
            for region in slot:
                if not region.is_ready:
                    break
                offset = region.end
            if offset < min((index + 1) * self.region_bytes, limit):
                return offset
        return None

    def _num_slots(self, nbytes: int) -> int:
        return -(-nbytes // self.region_bytes)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError("the host slab is closed: make a new pager", errno.EBADF)


def _round_down(nbytes: int) -> int:
    return nbytes // _SLAB_ALIGNMENT * _SLAB_ALIGNMENT


def _disown_in_child() -> None:
    """Marks slabs closed in a forked child, where their mappings must never be unmapped."""
    for slab in list(_OPEN_SLABS):
        for region in (region for slot in slab._slots for region in slot):
            if region.mapping is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(region.mapping))
        slab._slots, slab._is_closed = [], True
        slab.mapped_bytes = slab.locked_bytes = 0
        slab._builder = SlabBuilder(slab)  # the parent's thread is not here, and may have held
        slab._lock = threading.Lock()  # either lock
    _OPEN_SLABS.clear()


def _stop_builders() -> None:
    """Keeps a thread from touching memory, and CUDA, while the interpreter ends."""
    for slab in list(_OPEN_SLABS):
        slab._builder.stop()


os.register_at_fork(after_in_child=_disown_in_child)
atexit.register(_stop_builders)
