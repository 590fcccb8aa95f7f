"""The way of a transfer, cut into steps: which copies and which I/O, in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tvm_pager.transfer.device_copy import SlabRange
from tvm_pager.transfer.pieces import CHUNK_BYTES, nvme_runs
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias
from tvm_pager.transfer.staging import NUM_PLACES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tvm_pager.transfer.block_store import BlockStore, Completion
    from tvm_pager.transfer.device_copy import Copier
    from tvm_pager.transfer.pieces import Run
    from tvm_pager.transfer.protocol import Transfer
    from tvm_pager.transfer.slab import HostSlab
    from tvm_pager.transfer.staging import Staging

__all__ = ["CHUNK_BYTES", "DeviceStore", "Pace", "Routes"]

# Two workers with two in flight each, or one of twice the size: as much as two chunks.
_DISK_CHUNK_BYTES = CHUNK_BYTES // 2
_DISK = frozenset({Lane.D2N, Lane.H2N, Lane.N2D, Lane.N2H})


class Pace(Protocol):
    """Says how large steps are at the moment."""

    @property
    def chunk_bytes(self) -> int:
        """What a step should copy at most."""


class DeviceStore(Protocol):
    """A block store that also takes device memory: uint8 tensors, one after the other."""

    def write_device(self, file_offset: int, parts: Sequence[torch.Tensor]) -> Completion: ...

    def read_device(self, file_offset: int, parts: Sequence[torch.Tensor]) -> Completion: ...


class Routes:
    """Gives the steps of transfers between storages, one slab and one swap file.

    Attributes:
        staging: the way between device and file.
        store: who reads and writes the file; None without one.
        direct: the store, where it moves bytes between device and file without staging.
    """

    def __init__(self, slab: HostSlab, staging: Staging) -> None:
        self.staging = staging
        self.store: BlockStore | None = None
        self.direct: DeviceStore | None = None
        self._slab = slab

    def steps(
        self,
        transfer: Transfer,
        storage: torch.UntypedStorage | None,
        copier: Copier,
        pace: Pace | None = None,
    ) -> Iterator[bool]:
        """Carries a transfer out, a chunk at a time; each step says whether it was the last.

        Args:
            transfer: what to move.
            storage: the page's device memory; None on H2N and N2H.
            copier: copies between device and slab. On the lanes from and to NVMe it is waited for,
                on the others the caller waits.
            pace: how much a step copies between device and slab; None: `CHUNK_BYTES`.

        Raises:
            TransferError: from a step: it failed, and nothing is in flight.
        """
        if transfer.lane is Lane.R2D and storage is not None:
            return _fill(transfer, storage)
        if transfer.lane not in _DISK and storage is not None:
            return self._between_device_and_slab(transfer, storage, copier, pace)
        return self._disk_steps(transfer, storage, copier, nvme_runs(transfer))

    def strands(
        self, transfer: Transfer, storage: torch.UntypedStorage | None, copier: Copier
    ) -> list[Iterator[bool]]:
        """As `steps`, in iterators that may run at the same time.

        Two, on a lane from or to NVMe and where there is more than one step to make.
        """
        if transfer.lane not in _DISK:
            return [self.steps(transfer, storage, copier)]
        staged = 0 if storage is None or self._is_direct(transfer) else self.staging.place_bytes
        most = min(staged or CHUNK_BYTES, CHUNK_BYTES)
        runs = nvme_runs(transfer)
        if transfer.nbytes <= most:
            return [self._disk_steps(transfer, storage, copier, runs)]
        cut = [chunk for run in runs for chunk in run.chunks(most)]
        shares = [cut[first::NUM_PLACES] for first in range(NUM_PLACES)]
        return [self._disk_steps(transfer, storage, copier, share) for share in shares if share]

    def _disk_steps(
        self,
        transfer: Transfer,
        storage: torch.UntypedStorage | None,
        copier: Copier,
        runs: list[Run],
    ) -> Iterator[bool]:
        if storage is None:
            return self._between_slab_and_file(transfer, runs)
        if self.direct is not None and self._is_direct(transfer):
            return self._between_device_and_file(transfer, storage, copier, runs, self.direct)
        if transfer.lane is Lane.D2N:
            return self.staging.steps_down(storage, runs, copier, self._open_store())
        source = self._open_store() if transfer.source is None else transfer.source
        return self.staging.steps_up(storage, runs, copier, source)

    def _is_direct(self, transfer: Transfer) -> bool:
        return self.direct is not None and transfer.source is None

    def _between_device_and_slab(
        self,
        transfer: Transfer,
        storage: torch.UntypedStorage,
        copier: Copier,
        pace: Pace | None,
    ) -> Iterator[bool]:
        down = transfer.lane is Lane.D2H
        left = transfer.nbytes
        room = CHUNK_BYTES if pace is None else pace.chunk_bytes
        for page_offset, source, target, nbytes in transfer.pieces:
            at, offset = page_offset, target if down else source
            end = at + nbytes
            while at < end:
                take = min(end - at, room)
                copier.copy(storage, at, SlabRange(self._slab, offset, take), down=down)
                at, offset, left, room = at + take, offset + take, left - take, room - take
                if not room or not left:
                    yield not left
                    room = CHUNK_BYTES if pace is None else pace.chunk_bytes

    def _between_slab_and_file(self, transfer: Transfer, runs: list[Run]) -> Iterator[bool]:
        """While one chunk is on its way the next one is submitted: the disk never waits for us."""
        store = self._open_store()
        start = store.write if transfer.lane is Lane.H2N else store.read
        chunks = [chunk for run in runs for chunk in run.chunks(_DISK_CHUNK_BYTES)]
        in_flight: list[Completion] = []
        try:
            for index, chunk in enumerate(chunks):
                buffers = [b for part in chunk.parts for b in self._slab.buffers(*part)]
                in_flight.append(start(chunk.nvme_offset, buffers))
                if len(in_flight) > 1:
                    in_flight.pop(0).wait()
                yield index == len(chunks) - 1
        finally:
            failure: BaseException | None = None
            for completion in in_flight:  # all of them, whatever happened to the others
                try:
                    completion.wait()
                except BaseException as error:
                    failure = failure or error
            if failure is not None:
                raise failure

    def _between_device_and_file(
        self,
        transfer: Transfer,
        storage: torch.UntypedStorage,
        copier: Copier,
        runs: list[Run],
        store: DeviceStore,
    ) -> Iterator[bool]:
        down = transfer.lane is Lane.D2N
        start = store.write_device if down else store.read_device
        chunks = [chunk for run in runs for chunk in run.chunks(CHUNK_BYTES)]
        copier.finish()  # its stream comes after the work that uses the memory; the disk does not
        with RawDispatch():
            raw = raw_alias(storage, storage.device)
            parts = [[raw[at : at + size] for at, size in chunk.parts] for chunk in chunks]
        for index, chunk in enumerate(chunks):
            start(chunk.nvme_offset, parts[index]).wait()
            yield index == len(chunks) - 1

    def _open_store(self) -> BlockStore:
        if self.store is None:
            raise AssertionError("a transfer to or from NVMe, and no swap file")
        return self.store


def _fill(transfer: Transfer, storage: torch.UntypedStorage) -> Iterator[bool]:
    transfer.source.fill(storage)
    yield True
