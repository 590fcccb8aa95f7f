"""Staging: the way between device and NVMe, in chunks through two fixed host buffers.

[Note: Staging]
    One buffer for each direction, inside the host budget but outside the page space, so that a full
    slab cannot stop a write-back to NVMe or a fetch from it. They are allocated at start, and never
    grow. A direction serves one transfer at a time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tvm_pager.errors import ConfigError
from tvm_pager.transfer.pieces import NVME_ALIGNMENT
from tvm_pager.transfer.slab import HostSlab
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from tvm_pager.transfer.block_store import BlockStore
    from tvm_pager.transfer.device_copy import Copier
    from tvm_pager.transfer.pieces import Run
    from tvm_pager.transfer.slab import PageLocker

__all__ = ["Staging", "staging_bytes"]

_MIN_BYTES = 64 << 10
_MAX_BYTES = 32 << 20
_DOWN, _UP = 0, 1


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
        self._locks = (threading.Lock(), threading.Lock())

    def move_down(
        self, storage: torch.UntypedStorage, runs: Iterable[Run], copier: Copier, store: BlockStore
    ) -> None:
        """Copies from the storage to the file. Blocks.

        Raises:
            TransferError: the store failed. Nothing is in flight then.
        """
        base = _DOWN * self.nbytes
        with self._locks[_DOWN]:
            for run in runs:
                for chunk in run.chunks(self.nbytes):
                    filled = base
                    for offset, nbytes in chunk.parts:
                        copier.to_host(storage, offset, self.slab, filled, nbytes)
                        filled += nbytes
                    copier.finish()
                    store.write(chunk.nvme_offset, self.slab.buffers(base, chunk.nbytes)).wait()

    def move_up(
        self, storage: torch.UntypedStorage, runs: Iterable[Run], copier: Copier, store: BlockStore
    ) -> None:
        """Copies from the file to the storage; otherwise as `move_down`."""
        base = _UP * self.nbytes
        with self._locks[_UP]:
            for run in runs:
                for chunk in run.chunks(self.nbytes):
                    store.read(chunk.nvme_offset, self.slab.buffers(base, chunk.nbytes)).wait()
                    taken = base
                    for offset, nbytes in chunk.parts:
                        copier.to_device(storage, offset, self.slab, taken, nbytes)
                        taken += nbytes
                    copier.finish()  # before the next chunk overwrites the buffer
