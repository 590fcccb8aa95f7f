"""Staging: the way between device and NVMe, in chunks through two fixed host buffers.

[Note: Staging]
    One buffer for each direction, inside the host budget but outside the page space, so that a full
    slab cannot stop a write-back to NVMe or a fetch from it. They are allocated at start, and never
    grow. A buffer has a place for each worker of the lane. A step takes one place, never a second
    one, and nothing stays in it between two steps: so an urgent transfer may come in between, and
    nobody who has a place waits for another. Within a place copies and I/O overlap, in parts.
"""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, Self

from tvm_pager.errors import ConfigError
from tvm_pager.transfer.device_copy import SlabRange
from tvm_pager.transfer.pieces import NVME_ALIGNMENT
from tvm_pager.transfer.slab import HostSlab
from tvm_pager.units import align_up, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from tvm_pager.transfer.block_store import BlockStore, Completion
    from tvm_pager.transfer.device_copy import Copier
    from tvm_pager.transfer.numa import NumaNode
    from tvm_pager.transfer.pieces import Run
    from tvm_pager.transfer.slab import PageLocker

__all__ = ["NUM_PLACES", "Readable", "Staging", "staging_bytes"]

NUM_PLACES = 2  # of a direction: transfers that proceed at the same time
_NUM_PARTS = 2  # of a place: one is copied while the other is read or written
_MIN_BYTES = 64 << 10
_MAX_BYTES = 32 << 20
_MIN_CUT_BYTES = 4 << 20  # of less, overlapping saves less than a second I/O costs
_DOWN, _UP = 0, 1


class Readable(Protocol):
    """What bytes come from: the swap file's store, or a range of another file."""

    def read(self, file_offset: int, buffers: Sequence[memoryview], /) -> Completion: ...


def staging_bytes(host_bytes: int, asked_bytes: int | None = None) -> int:
    """Gives the size (bytes) of one buffer: what was asked, or a sixteenth of the budget.

    Raises:
        ConfigError: the budget cannot hold two of them.
    """
    nbytes = min(_MAX_BYTES, host_bytes // 16) if asked_bytes is None else asked_bytes
    nbytes = max(_MIN_BYTES, nbytes // NVME_ALIGNMENT * NVME_ALIGNMENT)
    if 2 * nbytes > host_bytes:
        raise ConfigError(
            f"host budget of {format_bytes(host_bytes)} with NVMe: the two staging buffers alone "
            f"need {format_bytes(2 * nbytes)}; give a larger host budget, or no nvme"
        )
    return nbytes


class Staging:
    """Two staging buffers; see [Note: Staging].

    Args:
        nbytes: size of each; 0 where there is no NVMe tier.
        page_lock: see `HostSlab`.
        locker: see `HostSlab`.
        node: see `HostSlab`.

    Raises:
        TransferError: no memory for them.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        page_lock: bool,
        locker: PageLocker | None,
        node: NumaNode | None = None,
    ) -> None:
        self.nbytes = nbytes
        # Two regions of one slab: each buffer is contiguous and page-aligned.
        self.slab = HostSlab(
            2 * nbytes,
            region_bytes=nbytes or NVME_ALIGNMENT,
            page_lock=page_lock,
            locker=locker,
            node=node,
        )
        self.slab.grow(2 * nbytes)
        self._part_bytes = nbytes // (NUM_PLACES * _NUM_PARTS) // NVME_ALIGNMENT * NVME_ALIGNMENT
        self._places: list[SimpleQueue[int]] = []  # free ones, by direction; offsets in the slab
        for direction in (_DOWN, _UP):
            self._places.append(SimpleQueue())
            for place in range(NUM_PLACES):
                offset = direction * nbytes + place * self.place_bytes
                self._places[direction].put(offset)

    @property
    def place_bytes(self) -> int:
        """The most that a step moves."""
        return _NUM_PARTS * self._part_bytes

    def steps_down(
        self, storage: torch.UntypedStorage, runs: Iterable[Run], copier: Copier, store: BlockStore
    ) -> Iterator[bool]:
        """Copies from the storage to the file, one place a step, in parts.

        While one part is written the next is filled. A step waits while as many others of its
        direction as there are places run.

        Raises:
            TransferError: the store failed. Nothing is in flight then.
        """
        for chunks, is_last in self._steps(runs):
            with self._place(_DOWN) as bases, _Waits(copier) as waits:
                for chunk, base in zip(chunks, bases, strict=False):
                    filled = base
                    for offset, nbytes in chunk.parts:
                        place = SlabRange(self.slab, filled, nbytes)
                        copier.copy(storage, offset, place, down=True)
                        filled += nbytes
                    copier.finish()
                    buffers = self.slab.buffers(base, chunk.nbytes)
                    waits.completions.append(store.write(chunk.nvme_offset, buffers))
            yield is_last

    def steps_up(
        self, storage: torch.UntypedStorage, runs: Iterable[Run], copier: Copier, store: Readable
    ) -> Iterator[bool]:
        """Copies from the file to the storage; otherwise as `steps_down`."""
        for chunks, is_last in self._steps(runs):
            with self._place(_UP) as bases, _Waits(copier) as waits:
                for chunk, base in zip(chunks, bases, strict=False):
                    buffers = self.slab.buffers(base, chunk.nbytes)
                    waits.completions.append(store.read(chunk.nvme_offset, buffers))
                for chunk, base, done in zip(chunks, bases, waits.completions, strict=False):
                    done.wait()
                    taken = base
                    for offset, nbytes in chunk.parts:
                        place = SlabRange(self.slab, taken, nbytes)
                        copier.copy(storage, offset, place, down=False)
                        taken += nbytes
            yield is_last

    def _steps(self, runs: Iterable[Run]) -> Iterator[tuple[list[Run], bool]]:
        """Gives as many chunks as a place has parts at most, and whether they are the last.

        What would fit one part is cut in two, so that copy and I/O overlap there as well.
        """
        part = self._part_bytes
        chunks: list[Run] = []
        for run in runs:
            is_cut = _MIN_CUT_BYTES <= run.nbytes <= part
            chunks += run.chunks(align_up(run.nbytes // 2, NVME_ALIGNMENT) if is_cut else part)
        for at in range(0, len(chunks), _NUM_PARTS):
            yield chunks[at : at + _NUM_PARTS], at + _NUM_PARTS >= len(chunks)

    @contextlib.contextmanager
    def _place(self, direction: int) -> Iterator[list[int]]:
        """Takes a free place; gives the offsets of its parts. Blocks while others have them all."""
        places = self._places[direction]
        place = places.get()
        try:
            yield [place + part * self._part_bytes for part in range(_NUM_PARTS)]
        finally:
            places.put(place)


class _Waits:
    """Waits for I/O and copies in flight when its block ends, however it ends; then raises."""

    def __init__(self, copier: Copier) -> None:
        self.completions: list[Completion] = []
        self._copier = copier

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failure: BaseException | None = None
        for completion in self.completions:
            try:
                completion.wait()
            except BaseException as problem:  # an interrupt: the others are in flight all the same
                failure = failure or problem
        self._copier.finish()
        if failure is not None and error is None:
            raise failure
