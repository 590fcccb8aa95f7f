"""The backend of real runs: torch storages on a device, the host slab, the swap file. Synchronous.

Owns slab, staging, swap file, block store. `submit` returns when the bytes have arrived.

[Note: Staging]
    Between device and NVMe bytes go through staging buffers: one for each direction, inside the
    host budget but outside the page space, so that a full slab cannot stop them. Longer transfers
    go through in chunks. Between slab and NVMe the engine reads and writes the slab itself.
"""

from __future__ import annotations

import errno
import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.errors import TransferError
from tvm_pager.transfer.block_store import measure, open_block_store
from tvm_pager.transfer.device_copy import CpuCopier, CudaCopier, stream_of
from tvm_pager.transfer.pieces import HOST_ALIGNMENT, NVME_ALIGNMENT, check_pieces, nvme_runs
from tvm_pager.transfer.protocol import Lane, Piece, Transfer
from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias
from tvm_pager.transfer.slab import HostSlab
from tvm_pager.transfer.staging import Staging, staging_bytes
from tvm_pager.transfer.swap_file import SwapFile

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from tvm_pager.transfer.block_store import BlockStore
    from tvm_pager.transfer.device_copy import Copier
    from tvm_pager.transfer.slab import PageLocker

__all__ = ["CompletedTicket", "TorchBackend", "TorchBackendOptions"]

_LOGGER = logging.getLogger(__name__)
_NO_DEVICE = frozenset({Lane.H2N, Lane.N2H})
_MIN_FILE_BYTES, _MAX_FILE_BYTES = 1 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class TorchBackendOptions:
    """What tests and unusual machines set. Sizes in bytes.

    Attributes:
        staging_bytes: of one direction; None for a sixteenth of the host budget, at most 32 MiB.
        region_bytes: see `HostSlab`.
        page_lock: None: where the device is CUDA.
        locker: see `HostSlab`.
        margin_bytes: see `SwapFile`.
        direct: see `SwapFile`.
        num_threads: I/O depth.
        measure: whether the block store is tried and measured at start; costs 30 ms.
        wrap_store: puts something between backend and block store, such as a store that fails.
    """

    staging_bytes: int | None = None
    region_bytes: int = 1 << 30
    page_lock: bool | None = None
    locker: PageLocker | None = None
    margin_bytes: int | None = None
    direct: bool = True
    num_threads: int = 4
    measure: bool = True
    wrap_store: Callable[[BlockStore], BlockStore] | None = None


class CompletedTicket:
    """The ticket of a transfer that ended inside `submit`."""

    __slots__ = ("error", "transfer")

    def __init__(self, transfer: Transfer, error: TransferError | None) -> None:
        self.transfer = transfer
        self.error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)


class TorchBackend:
    """`Backend` over `torch.UntypedStorage`; host slab and swap file. Thread-safe.

    Args:
        torch_device: where pages live; a CPU stands in for a device.
        host_bytes: budget of host memory, staging included; 0 only without NVMe.
        nvme_dir: directory of the swap file, or None for two tiers.
        nvme_bytes: size of the swap file.
        engine: "auto", "posix" or "kvikio".
        options: everything else.

    Attributes:
        accounted_bytes: gives the device bytes that are pages; set by the pager.
        notices: what the user should know, a sentence each.

    Raises:
        ConfigError: a size, the directory or the engine cannot be used.
        TransferError: the swap file does not work.
    """

    host_alignment = HOST_ALIGNMENT
    nvme_alignment = NVME_ALIGNMENT

    def __init__(
        self,
        torch_device: torch.device | str,
        host_bytes: int,
        nvme_dir: str | os.PathLike[str] | None,
        nvme_bytes: int,
        *,
        engine: str = "auto",
        options: TorchBackendOptions | None = None,
    ) -> None:
        options = options or TorchBackendOptions()
        self.device = torch.device(torch_device)
        is_cuda = self.device.type == "cuda"
        if is_cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.accounted_bytes: Callable[[], int] = lambda: 0
        self.notices: list[str] = []
        self._copier: Copier = CudaCopier(self.device) if is_cuda else CpuCopier()
        self._gate = threading.Condition()  # guards the two below
        self._num_moving = 0
        self._is_closed = False
        stage_bytes = 0 if nvme_dir is None else staging_bytes(host_bytes, options.staging_bytes)
        page_lock = is_cuda if options.page_lock is None else options.page_lock
        self._slab = HostSlab(
            host_bytes - 2 * stage_bytes,
            region_bytes=options.region_bytes,
            page_lock=page_lock,
            locker=options.locker,
        )
        self._make_staging = partial(Staging, page_lock=page_lock, locker=options.locker)
        self._staging = self._make_staging(stage_bytes)
        self.host_capacity_bytes = self._slab.capacity_bytes
        self.nvme_capacity_bytes = 0
        self._file: SwapFile | None = None
        self._store: BlockStore | None = None
        try:
            if nvme_dir is not None:
                self._open_nvme(nvme_dir, nvme_bytes, engine, options)
        except BaseException:
            self.close()
            raise

    # --- device memory ---------------------------------------------------------------------------

    def allocate_device(self, memory: object, nbytes: int, executor: object | None = None) -> None:
        storage = _storage(memory)
        try:
            if executor is None or executor == self.current_executor():
                storage.resize_(nbytes)
            else:
                with torch.cuda.stream(stream_of(executor, self.device)):
                    storage.resize_(nbytes)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # the CPU allocator has no class of its own
                raise
            raise MemoryError(str(error)) from error

    def release_device(self, memory: object, after: tuple[object, ...] = ()) -> None:
        self._copier.drain(after)
        _storage(memory).resize_(0)

    def allocated_bytes(self) -> int:
        """Gives the device bytes that torch's allocator has handed out and not got back; CPU: 0."""
        if self.device.type != "cuda":
            return 0
        # What torch.cuda.memory_allocated gives, without flattening every other statistic first.
        stats = torch._C._cuda_memoryStats(self.device.index)
        return int(stats["allocated_bytes"]["all"]["current"])

    def num_allocated_bytes(self) -> int:
        """Gives the device bytes that torch's allocator has ever handed out; CPU: 0. 50 us."""
        if self.device.type != "cuda":
            return 0
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(stats["allocated_bytes"]["all"]["allocated"])

    def device_overhead_bytes(self) -> int:
        return max(0, self.allocated_bytes() - self.accounted_bytes()) if self._is_cuda else 0

    def current_executor(self) -> int | None:
        """Gives the handle of this thread's current stream, fit for `after`; CPU: None."""
        if not self._is_cuda:
            return None
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    # --- what it is made of ----------------------------------------------------------------------

    @property
    def host_mapped_bytes(self) -> int:
        """Host memory taken so far, staging included."""
        return self._slab.mapped_bytes + self._staging.slab.mapped_bytes

    @property
    def host_locked_bytes(self) -> int:
        """Page-locked memory so far, staging included."""
        return self._slab.locked_bytes + self._staging.slab.locked_bytes

    @property
    def engine_text(self) -> str:
        """Engine, path and measured speed of the NVMe tier, for people; empty without one."""
        store = self._store
        if store is None:
            return ""
        measured = f", {store.measured}" if store.measured else ""
        return f"{store.engine} ({store.io}){measured}"

    def grow_host(self, nbytes: int) -> None:
        """Maps and page-locks the first `nbytes` bytes of page space ahead of use. Blocks."""
        self._slab.grow(nbytes)

    def stage_files(self) -> None:
        """Makes sure that pages can be read from files, also where there is no NVMe tier.

        Then two staging buffers, together an eighth of the host budget and at most 8 MiB, come on
        top of it.
        """
        if not self._staging.nbytes:
            size = staging_bytes(max(self.host_capacity_bytes, _MIN_FILE_BYTES))
            self._staging = self._make_staging(min(size, _MAX_FILE_BYTES))

    def close(self) -> None:
        with self._gate:
            self._is_closed = True
            self._gate.wait_for(lambda: self._num_moving == 0)  # transfers of other threads
        if self._store is not None:
            self._store.close()
        if self._file is not None:
            self._file.close()
        try:
            self._slab.close()
        finally:
            self._staging.slab.close()

    # --- transfers -------------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> CompletedTicket:
        storage = None if transfer.lane in _NO_DEVICE else _storage(transfer.memory)
        check_pieces(
            transfer,
            device_bytes=None if storage is None else storage.nbytes(),
            host_bytes=self.host_capacity_bytes,
            nvme_bytes=self.nvme_capacity_bytes,
        )
        return CompletedTicket(transfer, self._attempt(transfer, storage))

    def read_to_host(
        self, nbytes: int, pieces: Mapping[Lane, Sequence[Piece]], source: Any = None
    ) -> torch.Tensor:
        """Copies a page into new, ordinary host memory of its own: `nbytes` bytes as uint8. Blocks.

        Args:
            nbytes: of the page.
            pieces: what `submit` would be given on the lanes H2D and N2D.
            source: see `Transfer`.

        Raises:
            MemoryError: no memory.
            TransferError: as a ticket.
        """
        storage = torch.UntypedStorage(0, device="cpu")  # type: ignore[no-untyped-call]
        self.allocate_device(storage, nbytes)
        copier = CpuCopier()
        for lane, run in pieces.items():
            transfer = Transfer(-1, lane, tuple(run), storage, (), source)
            check_pieces(
                transfer,
                device_bytes=nbytes,
                host_bytes=self.host_capacity_bytes,
                nvme_bytes=self.nvme_capacity_bytes,
            )
            error = self._attempt(transfer, storage, copier)
            if error is not None:
                raise error
        with torch.inference_mode(mode=False), RawDispatch():
            return raw_alias(storage, torch.device("cpu"))

    def _attempt(
        self,
        transfer: Transfer,
        storage: torch.UntypedStorage | None,
        copier: Copier | None = None,
    ) -> TransferError | None:
        """Moves the bytes; gives the error, if any, that the ticket shall carry."""
        with self._gate:
            if self._is_closed:
                return TransferError("the backend is closed: make a new pager", errno.EBADF)
            self._num_moving += 1
        try:
            self._move(transfer, storage, copier or self._copier)
        except TransferError as error:
            return error
        except (OSError, RuntimeError) as error:  # torch reports device errors as RuntimeError
            failure = TransferError(
                f"copying {transfer.nbytes} bytes of page {transfer.page_id} on lane "
                f"{transfer.lane.value} failed: {error}",
                error.errno if isinstance(error, OSError) else None,
            )
            failure.__cause__ = error
            return failure
        finally:
            with self._gate:
                self._num_moving -= 1
                self._gate.notify_all()
        return None

    def _move(
        self, transfer: Transfer, storage: torch.UntypedStorage | None, copier: Copier
    ) -> None:
        lane = transfer.lane
        if storage is None:
            self._move_slab_and_file(transfer)
            return
        if lane is Lane.R2D:
            transfer.source.fill(storage)
            return
        copier.begin(transfer.after)
        try:
            if lane is Lane.D2H:
                for page_offset, _, offset, nbytes in transfer.pieces:
                    copier.to_host(storage, page_offset, self._slab, offset, nbytes)
            elif lane is Lane.H2D:
                for page_offset, offset, _, nbytes in transfer.pieces:
                    copier.to_device(storage, page_offset, self._slab, offset, nbytes)
            elif lane is Lane.D2N:
                self._staging.move_down(storage, nvme_runs(transfer), copier, self._open_store())
            else:
                store = self._open_store() if transfer.source is None else transfer.source
                self._staging.move_up(storage, nvme_runs(transfer), copier, store)
        finally:
            copier.finish()  # also after a failure: nothing may be in flight any more

    def _move_slab_and_file(self, transfer: Transfer) -> None:
        store = self._open_store()
        start = store.write if transfer.lane is Lane.H2N else store.read
        completions = []
        failure: TransferError | None = None
        try:
            for run in nvme_runs(transfer):
                buffers = [b for part in run.parts for b in self._slab.buffers(*part)]
                completions.append(start(run.nvme_offset, buffers))
        finally:
            for completion in completions:  # all of them, whatever happened to the others
                try:
                    completion.wait()
                except TransferError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    # --- start -----------------------------------------------------------------------------------

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _open_store(self) -> BlockStore:
        if self._store is None:
            raise AssertionError("a transfer to or from NVMe, and no swap file")
        return self._store

    def _open_nvme(
        self,
        directory: str | os.PathLike[str],
        nbytes: int,
        engine: str,
        options: TorchBackendOptions,
    ) -> None:
        self._file = SwapFile(
            directory, nbytes, margin_bytes=options.margin_bytes, direct=options.direct
        )
        self.nvme_capacity_bytes = self._file.nbytes
        for choice in (engine, "posix"):
            store, notices = open_block_store(
                self._file, choice, on_gpu=self._is_cuda, num_threads=options.num_threads
            )
            self._store = options.wrap_store(store) if options.wrap_store is not None else store
            self.notices += notices
            try:
                if options.measure:
                    size = min(self._staging.nbytes, self._file.nbytes)
                    measure(self._store, self._staging.slab.buffers(0, size))
                break
            except TransferError as error:
                if engine != "auto" or store.engine == "posix":
                    raise
                self._store.close()
                self.notices.append(f"NVMe engine posix instead of {store.engine}: {error}")
        self.notices += self._file.notices
        _LOGGER.info("NVMe tier: %s", self.engine_text)


def _storage(memory: object) -> torch.UntypedStorage:
    if not isinstance(memory, torch.UntypedStorage):
        raise AssertionError(f"{type(memory).__name__} is no torch.UntypedStorage")
    return memory
