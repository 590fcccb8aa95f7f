"""The backend of real runs: torch storages on a device, the host slab, the swap file.

Owns slab, staging, swap file, block store and lanes.

[Note: Lanes]
    Copies between device and slab are queued on a CUDA stream for each direction; on the CPU
    stand-in a thread for each direction makes them. What touches the disk has two threads for each
    direction, because its steps wait: between device and NVMe bytes go through staging, between
    slab and NVMe the engine reads and writes the slab itself. No lane waits for another one's
    queue: copies of the disk's lanes have streams of their own, one for each direction.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.errors import TransferError
from tvm_pager.transfer.behind import CopierBehind, after_events, after_tickets
from tvm_pager.transfer.block_store import measure, open_block_store
from tvm_pager.transfer.device_copy import CpuCopier, CudaCopier, stream_of
from tvm_pager.transfer.direct_route import choose_direct
from tvm_pager.transfer.lane_queue import LaneTicket
from tvm_pager.transfer.options import TorchBackendOptions
from tvm_pager.transfer.pieces import HOST_ALIGNMENT, NVME_ALIGNMENT, check_pieces
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Transfer
from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias
from tvm_pager.transfer.region import CudaLocker, host_node_of
from tvm_pager.transfer.routes import Routes
from tvm_pager.transfer.slab import HostSlab
from tvm_pager.transfer.staging import NUM_PLACES, Staging, staging_bytes
from tvm_pager.transfer.stream_lane import StreamLane
from tvm_pager.transfer.swap_file import SwapFile
from tvm_pager.transfer.thread_lane import ThreadLane

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from tvm_pager.transfer.device_copy import Copier
    from tvm_pager.transfer.protocol import Ticket

__all__ = ["TorchBackend", "TorchBackendOptions"]

_LOGGER = logging.getLogger(__name__)
_NO_DEVICE = frozenset({Lane.H2N, Lane.N2H})
_MIN_FILE_BYTES, _MAX_FILE_BYTES = 1 << 20, 4 << 20


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
        notices: what the user should know, a sentence each; grows while it runs.

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
        self._is_cuda = is_cuda = self.device.type == "cuda"
        if is_cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.accounted_bytes: Callable[[], int] = lambda: 0
        self._notices: list[str] = []
        self._lanes = self._make_lanes()
        stage_bytes = 0 if nvme_dir is None else staging_bytes(host_bytes, options.staging_bytes)
        self._host_peak_bytes = 0
        self.host_budget_bytes, self._stage_bytes = host_bytes, 2 * stage_bytes
        page_lock = is_cuda if options.page_lock is None else options.page_lock
        # A builder's thread has no current device of its own.
        locker = CudaLocker(self.device) if is_cuda and not options.locker else options.locker
        self._node = host_node_of(self.device)
        self._slab = HostSlab(
            self.page_space_of(host_bytes),
            region_bytes=options.region_bytes,
            page_lock=page_lock,
            locker=locker,
            node=self._node,
        )
        self._make_staging = partial(Staging, page_lock=page_lock, locker=locker, node=self._node)
        self._routes = Routes(self._slab, self._make_staging(stage_bytes))
        self.host_capacity_bytes = self._slab.capacity_bytes
        self.nvme_capacity_bytes = 0
        self._file: SwapFile | None = None
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

    def release_device(
        self,
        memory: object,
        after: tuple[object, ...] = (),
        tickets: tuple[Ticket, ...] = (),
        executor: object | None = None,
    ) -> None:
        storage = _storage(memory)
        if not self._is_cuda:
            for ticket in tickets:
                ticket.wait()
            storage.resize_(0)
            return
        # The memory goes back to the pool of the stream that it came from, and whoever gets it next
        # starts on that stream: so it is that stream which waits for all the others.
        home = stream_of(self.current_executor() if executor is None else executor, self.device)
        for other in after:
            stream = stream_of(other, self.device)
            if stream.cuda_stream != home.cuda_stream:
                home.wait_stream(stream)
        for ticket in tickets:
            event = _lane_ticket(ticket).event
            if isinstance(event, torch.cuda.Event):
                home.wait_event(event)
        storage.resize_(0)

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
        return self._slab.mapped_bytes + self._routes.staging.slab.mapped_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The most host memory that was taken at a time, staging included."""
        return max(self._host_peak_bytes, self.host_mapped_bytes)

    @property
    def host_locked_bytes(self) -> int:
        """Page-locked memory so far, staging included."""
        return self._slab.locked_bytes + self._routes.staging.slab.locked_bytes

    @property
    def notices(self) -> list[str]:
        sources = (self._file, self._node)
        return sum((s.notices for s in sources if s is not None), self._notices)

    @property
    def engine(self) -> str:
        """Who moves bytes to and from NVMe; empty without that tier."""
        return "" if self._routes.store is None else self._routes.store.engine

    @property
    def engine_text(self) -> str:
        """Engine, path and measured speed of the NVMe tier, for people; empty without one."""
        store = self._routes.store
        if store is None:
            return ""
        measured = f", {store.measured}" if store.measured else ""
        route = ", device memory directly" if self._routes.direct is not None else ""
        return f"{store.engine} ({store.io}){measured}{route}"

    def host_border(self, nbytes: int) -> int:
        return self._slab.border_below(nbytes)

    def page_space_of(self, host_bytes: int) -> int:
        """What a host budget leaves for pages, beside the staging buffers. Bytes."""
        return host_bytes - self._stage_bytes

    def build_host(self, progress: Callable[[int, int], None]) -> None:
        """Maps and page-locks the whole slab in a thread; see `HostSlab.build_in_background`."""
        self._slab.build_in_background(self._slab.capacity_bytes, progress)

    def resize_host(self, nbytes: int) -> None:
        self._host_peak_bytes = self.host_peak_bytes
        if nbytes < self._slab.capacity_bytes:
            self._slab.shrink_capacity(nbytes)
        else:
            self._slab.grow_capacity(nbytes)
        self.host_capacity_bytes = self._slab.capacity_bytes
        self.host_budget_bytes = self.host_capacity_bytes + self._stage_bytes

    def grow_host(self, nbytes: int) -> None:
        """Maps and page-locks the first `nbytes` bytes of page space ahead of use. Blocks."""
        self._slab.grow(nbytes)

    def stage_files(self) -> None:
        """Makes sure that pages can be read from files, also where there is no NVMe tier.

        Then two staging buffers, together an eighth of the host budget and at most 8 MiB, come on
        top of it.
        """
        if not self._routes.staging.nbytes:
            size = staging_bytes(max(self.host_capacity_bytes, _MIN_FILE_BYTES))
            self._routes.staging = self._make_staging(min(size, _MAX_FILE_BYTES))

    def close(self) -> None:
        for _, lane in self._lanes.values():
            lane.close()
        if self._routes.store is not None:
            self._routes.store.close()
        if self._file is not None:
            self._file.close()
        try:
            self._slab.close()
        finally:
            self._routes.staging.slab.close()

    # --- transfers -------------------------------------------------------------------------------

    def submit(self, transfer: Transfer, priority: Priority = Priority.FAULT) -> LaneTicket:
        storage = None if transfer.lane in _NO_DEVICE else _storage(transfer.memory)
        check_pieces(
            transfer,
            device_bytes=None if storage is None else storage.nbytes(),
            host_bytes=self.host_capacity_bytes,
            nvme_bytes=self.nvme_capacity_bytes,
        )
        copier, lane = self._lanes[transfer.lane]
        behind: Copier = copier
        waits: list[torch.cuda.Event] = []
        if storage is not None and isinstance(copier, CudaCopier):
            after = transfer.after or (self.current_executor(),)
            waits = self._events(after, blocking=isinstance(lane, ThreadLane))
            behind = CopierBehind(copier, waits) if isinstance(lane, ThreadLane) else copier
        if isinstance(lane, StreamLane):
            filling = [_lane_ticket(ticket).event for ticket in transfer.behind]
            waits += [event for event in filling if isinstance(event, torch.cuda.Event)]
            steps = self._routes.steps(transfer, storage, copier, lane)
            return lane.submit(transfer, after_events(waits, lane.stream, steps), priority)
        strands = self._routes.strands(transfer, storage, behind)
        if transfer.behind:
            strands = [after_tickets(transfer.behind, steps) for steps in strands]
        return lane.submit(transfer, strands[0], priority, strands[1:])

    def order(self, ticket: Ticket, executors: tuple[object, ...]) -> None:
        ticket = _lane_ticket(ticket)
        self.promote(ticket, Priority.FAULT)
        event = ticket.event
        if not isinstance(event, torch.cuda.Event) or ticket.is_over:
            ticket.wait()
            return
        for executor in executors:
            if executor is not None:
                stream_of(executor, self.device).wait_event(event)
        # Where the page dies now, its memory's next user comes after the copy.
        ticket.transfer.memory = None

    def promote(self, ticket: Ticket, priority: Priority) -> None:
        self._lanes[ticket.transfer.lane][1].promote(_lane_ticket(ticket), priority)

    def cancel(self, ticket: Ticket) -> bool:
        return self._lanes[ticket.transfer.lane][1].cancel(_lane_ticket(ticket))

    def poll(self) -> None:
        for lane in (self._lanes[Lane.D2H][1], self._lanes[Lane.H2D][1]):
            if isinstance(lane, StreamLane):
                lane.pump()

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
            steps = self._routes.steps(transfer, storage, copier)
            queue = self._lanes[lane][1]
            if isinstance(queue, ThreadLane):  # fetches in flight use the same staging
                queue.submit(transfer, steps, Priority.FAULT).wait()
                continue
            for _ in steps:
                pass
        with torch.inference_mode(mode=False), RawDispatch():
            return raw_alias(storage, torch.device("cpu"))

    # --- start -----------------------------------------------------------------------------------

    def _make_lanes(self) -> dict[Lane, tuple[Copier, StreamLane | ThreadLane]]:
        """The lanes, each with what copies on it; see [Note: Lanes]."""
        down, up = (
            ThreadLane("to-nvme", runs_inline=False, num_workers=NUM_PLACES),
            ThreadLane("from-nvme", runs_inline=False, num_workers=NUM_PLACES),
        )
        copiers: Sequence[Copier] = [CpuCopier()] * 4
        direct: list[StreamLane | ThreadLane]
        if self._is_cuda:
            streams = StreamLane(self.device, "d2h"), StreamLane(self.device, "h2d")
            direct = list(streams)
            own = [torch.cuda.Stream(self.device) for _ in (down, up)]  # type: ignore[no-untyped-call]
            copiers = [CudaCopier(stream) for stream in (*(s.stream for s in streams), *own)]
        else:
            direct = [ThreadLane("d2h", runs_inline=True), ThreadLane("h2d", runs_inline=True)]
        return {
            Lane.D2H: (copiers[0], direct[0]),
            Lane.H2D: (copiers[1], direct[1]),
            Lane.D2N: (copiers[2], down),
            Lane.H2N: (copiers[2], down),
            Lane.N2D: (copiers[3], up),
            Lane.N2H: (copiers[3], up),
            Lane.R2D: (CpuCopier(), ThreadLane("recompute", runs_inline=True)),
        }

    def _events(self, executors: tuple[object, ...], *, blocking: bool) -> list[torch.cuda.Event]:
        """Marks what is queued on each executor now; a host that waits for it sleeps or spins."""
        events = []
        for executor in executors:
            event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
            event.record(stream_of(executor, self.device))
            events.append(event)
        return events

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
            self._routes.store = (
                options.wrap_store(store) if options.wrap_store is not None else store
            )
            self._notices += notices
            try:
                if options.measure:
                    size = min(self._routes.staging.nbytes, self._file.nbytes)
                    measure(self._routes.store, self._routes.staging.slab.buffers(0, size))
                break
            except TransferError as error:
                if engine != "auto" or store.engine == "posix":
                    raise
                self._routes.store.close()
                self._notices.append(f"NVMe engine posix instead of {store.engine}: {error}")
        if self._is_cuda and options.device_io != "staged":
            choose_direct(self._routes, self.device, is_forced=options.device_io == "direct")
        _LOGGER.info("NVMe tier: %s", self.engine_text)


def _storage(memory: object) -> torch.UntypedStorage:
    if not isinstance(memory, torch.UntypedStorage):
        raise AssertionError(f"{type(memory).__name__} is no torch.UntypedStorage")
    return memory


def _lane_ticket(ticket: object) -> LaneTicket:
    if not isinstance(ticket, LaneTicket):
        raise AssertionError(f"{type(ticket).__name__} is no LaneTicket")
    return ticket
