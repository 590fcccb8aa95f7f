"""Staging: the way between device and NVMe, in chunks through two fixed host buffers.

[Note: Staging]
    One buffer for each direction, inside the host budget but outside the page space, so that a full
    slab cannot stop a write-back to NVMe or a fetch from it. They are allocated at start, and never
    grow. A direction serves one step of one transfer at a time, and nothing stays in its buffer
    between two steps: so an urgent transfer may come in between.
"""

from __future__ import annotations

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
    from tvm_pager.transfer.pieces import Run
    from tvm_pager.transfer.slab import PageLocker

__all__ = ["Readable", "Staging", "staging_bytes"]

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

    Raises:
        TransferError: no memory for them.
    """

    def __init__(self, nbytes: int, *, page_lock: bool, locker: PageLocker | None) -> None:
        self.nbytes = nbytes
        # Two regions of one slab: each buffer is contiguous and page-aligned.
        self.slab = HostSlab(
            2 * nbytes, region_bytes=nbytes or NVME_ALIGNMENT, page_lock=page_lock, locker=locker
        )
        self.slab.grow(2 * nbytes)

    def steps_down(
        self, storage: torch.UntypedStorage, runs: Iterable[Run], copier: Copier, store: BlockStore
    ) -> Iterator[bool]:
        """Copies from the storage to the file, one buffer a step, in two halves.

        While one half is written the other is filled. The steps of one direction must not run in
        two threads at once.

        Raises:
            TransferError: the store failed. Nothing is in flight then.
        """
        for halves, is_last in self._steps(runs, _DOWN):
            with _Waits(copier) as waits:
                for chunk, base in halves:
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
        for halves, is_last in self._steps(runs, _UP):
            with _Waits(copier) as waits:
                for chunk, base in halves:
                    buffers = self.slab.buffers(base, chunk.nbytes)
                    waits.completions.append(store.read(chunk.nvme_offset, buffers))
                for (chunk, base), completion in zip(halves, waits.completions, strict=True):
                    completion.wait()
                    taken = base
                    for offset, nbytes in chunk.parts:
                        place = SlabRange(self.slab, taken, nbytes)
                        copier.copy(storage, offset, place, down=False)
                        taken += nbytes
            yield is_last

    def _steps(
        self, runs: Iterable[Run], direction: int
    ) -> Iterator[tuple[list[tuple[Run, int]], bool]]:
        """Gives up to two chunks with their halves' offsets, and whether they are the last.

        What would fit one half is cut in two, so that copy and I/O overlap there as well.
        """
        half = self.nbytes // 2 // NVME_ALIGNMENT * NVME_ALIGNMENT
        bases = (direction * self.nbytes, direction * self.nbytes + half)
        chunks: list[Run] = []
        for run in runs:
            is_cut = _MIN_CUT_BYTES <= run.nbytes <= half
            chunks += run.chunks(align_up(run.nbytes // 2, NVME_ALIGNMENT) if is_cut else half)
        for at in range(0, len(chunks), 2):
            pair = chunks[at : at + 2]
            yield list(zip(pair, bases, strict=False)), at + 2 >= len(chunks)


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
