"""A backend without bytes: everything takes the time that a hardware profile says.

Standard library only. The pager that runs on it is the real one; see [Note: Two clocks].

[Note: Two clocks]
    `host_ns` is the clock of the launching thread: it moves when an operation is launched, a copy
    is submitted, or something is waited for. The device runs behind it: operations on one compute
    stream, copies on one stream for each direction, as in torch_backend.py. What the device has
    done is known up to the host's clock, since the host decides what comes next; a host that waits
    moves it. So a transfer between device and DRAM is certain when it is on its stream, `order` and
    `release_device` let the compute stream wait, and whatever touches the disk makes the host wait.

[Note: What is not modelled]
    Kernels and copies do not slow each other down, nor do disk and link; a copy through staging
    takes no time of the link's lanes. Device memory never fails. Fragments of the allocator are not
    seen. Work on the host has no lane.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.transfer.pieces import (
    CHUNK_BYTES,
    HOST_ALIGNMENT,
    NVME_ALIGNMENT,
    check_pieces,
)
from tvm_pager.transfer.protocol import Lane, Priority
from tvm_pager.transfer.virtual_compute import ComputeStream, Mark
from tvm_pager.transfer.virtual_lane import Chunk, VirtualLane, VirtualTicket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tvm_pager.planning import HardwareProfile
    from tvm_pager.planning.hardware.rates import LinkRate
    from tvm_pager.transfer.lane_queue import LaneTicket
    from tvm_pager.transfer.protocol import Ticket, Transfer

__all__ = ["VirtualBackend", "VirtualMemory", "VirtualOptions"]

_WINDOW_BYTES = 2 * CHUNK_BYTES  # as in stream_lane.py at first; here nobody has to wake up
_QUEUE_LENGTH = 1024  # launches that CUDA takes before a launch waits for the oldest
_MARK_EVERY = 64  # of them
# Python's work for a fault or an eviction goes with the speed of the processor, as a dispatch does.
_DISPATCHES_PER_COPY = 20


class VirtualMemory:
    """A page's device memory: its size. Called, it gives itself, as a page's reference does."""

    __slots__ = ("nbytes", "page")

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.page: object = None  # by whoever owns it, for the pager's queue of the dead

    def __call__(self) -> VirtualMemory:
        return self


@dataclass(frozen=True, slots=True)
class VirtualOptions:
    """How a virtual machine differs from the profile's.

    Attributes:
        disk_engine: which of the profile's disks; only where there is NVMe.
        staging_bytes: of one direction.
        submit_ns: host time of a submitted copy, with all that the pager does for it; None: that
            of twenty dispatched operations, as measured.
        overhead_bytes: device bytes beside pages.
        is_launch_bounded: whether a launch waits while 1024 others have not begun to run.
    """

    disk_engine: str = "raw"
    staging_bytes: int = 32 << 20
    submit_ns: int | None = None
    overhead_bytes: int = 0
    is_launch_bounded: bool = True


class VirtualBackend:
    """`Backend` on a virtual clock. Not thread-safe.

    Args:
        hardware: rates and latencies.
        host_capacity: bytes of page space.
        nvme_capacity: bytes of the swap file; 0: there is none.
        options: everything else.
        on_kernel: takes name, begin and end of each operation.
        on_copy: takes each chunk that has moved, with its begin and end.

    Attributes:
        host_ns: the clock of the launching thread.
        stream: the compute stream.
        lanes: those that exist, by direction; what shares a thread shares a lane.

    Raises:
        ConfigError: the profile has no such disk.
    """

    host_alignment = HOST_ALIGNMENT
    nvme_alignment = NVME_ALIGNMENT

    def __init__(
        self,
        hardware: HardwareProfile,
        host_capacity: int,
        nvme_capacity: int = 0,
        *,
        options: VirtualOptions | None = None,
        on_kernel: Callable[[str, int, int], None] | None = None,
        on_copy: Callable[[Chunk, int, int], None] | None = None,
    ) -> None:
        options = options or VirtualOptions()
        self.host_capacity_bytes = host_capacity
        self.nvme_capacity_bytes = nvme_capacity
        self.host_ns = 0
        self.stream = ComputeStream(on_kernel)
        self._options = options
        self._on_copy = on_copy
        self._hardware = hardware
        self._rates = {Lane.D2H: hardware.d2h, Lane.H2D: hardware.h2d}
        down, up = self._pair("d2h", "h2d", _WINDOW_BYTES)
        self.lanes = {Lane.D2H: down, Lane.H2D: up}
        if nvme_capacity:
            disk = hardware.disk(options.disk_engine)
            down, up = self._pair("to-nvme", "from-nvme", None)
            self.lanes |= {Lane.D2N: down, Lane.H2N: down, Lane.N2D: up, Lane.N2H: up}
            for lane in (Lane.D2N, Lane.H2N):
                self._rates[lane] = disk.write
            for lane in (Lane.N2D, Lane.N2H):
                self._rates[lane] = disk.read
        # What a copy of a size takes alone, and how much slower it is beside the other direction.
        self._costs: dict[Lane, dict[int, tuple[float, float]]] = {lane: {} for lane in Lane}
        self._distinct = list(dict.fromkeys(self.lanes.values()))
        submit_ns = options.submit_ns
        if submit_ns is None:
            submit_ns = round(_DISPATCHES_PER_COPY * hardware.overheads.dispatched_ns.median)
        self._submit_ns = submit_ns
        self._num_until_mark = _MARK_EVERY
        self._marks: deque[Mark] = deque()

    # --- operations ------------------------------------------------------------------------------

    def run(self, name: str, launch_ns: int, compute_ns: int) -> None:
        """Launches an operation, and waits while too many others have not begun."""
        self.host_ns = now_ns = self.host_ns + launch_ns
        if not compute_ns:
            return
        self.stream.launch(name, now_ns, compute_ns)
        self._num_until_mark -= 1
        if not self._num_until_mark:
            self._num_until_mark = _MARK_EVERY
            if self._options.is_launch_bounded:
                self._marks.append(self.stream.mark())
                if len(self._marks) > _QUEUE_LENGTH // _MARK_EVERY:
                    self.host_ns = max(self.host_ns, self.reach(self._marks.popleft()))

    def reach(self, mark: Mark) -> int:
        """Finds out when a place in the compute stream is reached. The host's clock stands still.

        Raises:
            AssertionError: never: the stream waits for something that cannot end.
        """
        while mark.ns is None:
            if not self._step():
                raise AssertionError("the compute stream waits for what nobody moves")
        return mark.ns

    def synchronize(self) -> int:
        """Lets the host wait for all that is on the compute stream; gives the time of its end."""
        end_ns = self.reach(self.stream.mark())
        self.host_ns = max(self.host_ns, end_ns)
        self._advance()
        return end_ns

    def clock(self) -> int:
        """The host's clock: what the pager is given as its own."""
        return self.host_ns

    # --- device memory ---------------------------------------------------------------------------

    def allocate_device(self, memory: object, nbytes: int, executor: object | None = None) -> None:
        _virtual(memory).nbytes = nbytes

    def release_device(
        self,
        memory: object,
        after: tuple[object, ...] = (),
        tickets: tuple[Ticket, ...] = (),
        executor: object | None = None,
    ) -> None:
        for ticket in tickets:
            self._stream_wait(_virtual_ticket(ticket))
        _virtual(memory).nbytes = 0

    def device_overhead_bytes(self) -> int:
        return self._options.overhead_bytes

    # --- transfers -------------------------------------------------------------------------------

    def submit(self, transfer: Transfer, priority: Priority = Priority.FAULT) -> VirtualTicket:
        lane = transfer.lane
        has_device = "d" in lane.value
        check_pieces(
            transfer,
            device_bytes=_virtual(transfer.memory).nbytes if has_device else None,
            host_bytes=self.host_capacity_bytes,
            nvme_bytes=self.nvme_capacity_bytes,
        )
        self.host_ns += self._submit_ns
        if lane is Lane.R2D:
            return self._compute_again(transfer)
        self._advance()
        # What comes before it in `behind` is something that the stream waits for.
        after = self.stream.mark() if has_device or transfer.behind else None
        if after is not None and after.ns is not None and after.ns <= self.host_ns:
            after = None

        def chunks(ticket: VirtualTicket) -> Iterator[Chunk]:
            return self._chunks(ticket, after)

        return self.lanes[lane].submit(transfer, chunks, priority, self.host_ns)

    def order(self, ticket: Ticket, executors: tuple[object, ...]) -> None:
        ticket = _virtual_ticket(ticket)
        self.promote(ticket, Priority.FAULT)
        if ticket.event is None or ticket.is_over:
            ticket.wait()
        self._stream_wait(ticket)

    def promote(self, ticket: Ticket, priority: Priority) -> None:
        self._advance()
        lane = self.lanes.get(ticket.transfer.lane)
        if lane is not None:
            lane.promote(_virtual_ticket(ticket), priority, self.host_ns)

    def cancel(self, ticket: Ticket) -> bool:
        self._advance()
        lane = self.lanes.get(ticket.transfer.lane)
        return lane is not None and lane.cancel(_virtual_ticket(ticket))

    def poll(self) -> None:
        self._advance()

    # What tickets ask of their lane.

    def look(self, ticket: LaneTicket) -> bool:
        self._advance()
        return ticket.is_over

    def join(self, ticket: LaneTicket) -> None:
        while not ticket.is_over:
            if not self._step():
                raise AssertionError(f"{ticket.transfer} waits for what nobody moves")
        end_ns = _virtual_ticket(ticket).end_ns or 0
        if end_ns > self.host_ns:
            self.stream.host_waited(end_ns - self.host_ns)
            self.host_ns = end_ns

    # --- the host --------------------------------------------------------------------------------

    def host_border(self, nbytes: int) -> int:
        return min(nbytes, self.host_capacity_bytes) // HOST_ALIGNMENT * HOST_ALIGNMENT

    def resize_host(self, nbytes: int) -> None:
        self.host_capacity_bytes = nbytes

    def close(self) -> None:
        for lane in self._distinct:
            lane.close()
        self.reach(self.stream.mark())
        while any(lane.has_work for lane in self._distinct):
            if not self._step():
                raise AssertionError("a lane waits for what nobody moves")
        self.host_ns = max(self.host_ns, *(lane.free_ns for lane in self._distinct))

    # --- time ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Lets happen what happens up to the host's clock."""
        while self._step(self.host_ns):
            pass

    def _step(self, limit_ns: int | None = None) -> bool:
        """Lets the next thing happen, if it does by `limit_ns`; None: whenever."""
        first, first_ns = None, limit_ns
        for lane in self._distinct:
            at_ns = lane.next_ns()
            if at_ns is not None and (first_ns is None or at_ns <= first_ns):
                first, first_ns = lane, at_ns
        if first is None or first_ns is None:
            return False
        ended = first.move_on(first_ns)
        if ended is not None:
            if ended.is_last:
                self.stream.resolve()
            if self._on_copy is not None:
                self._on_copy(ended, first.begun_ns, first_ns)
        return True

    def _stream_wait(self, ticket: VirtualTicket) -> None:
        if ticket.end_ns is None or ticket.end_ns > self.host_ns:
            self.stream.wait_for(ticket)

    # --- inside ----------------------------------------------------------------------------------

    def _pair(self, down: str, up: str, window_bytes: int | None) -> tuple[VirtualLane, ...]:
        lanes = VirtualLane(down, self, window_bytes), VirtualLane(up, self, window_bytes)
        lanes[0].other, lanes[1].other = lanes[1], lanes[0]
        return lanes

    def _chunks(self, ticket: VirtualTicket, after: Mark | None) -> Iterator[Chunk]:
        """Cuts a transfer as the real lanes do: in pieces of the page, gathered to chunks."""
        transfer = ticket.transfer
        lane = transfer.lane
        room_bytes = self._options.staging_bytes if lane in (Lane.D2N, Lane.N2D) else CHUNK_BYTES
        left = transfer.nbytes
        chunk_bytes, alone_s, slowdown = 0, 0.0, 1.0
        for piece in transfer.pieces:
            rest = piece.nbytes
            while rest:
                take = min(rest, room_bytes - chunk_bytes)
                copy_s, copy_slowdown = self._cost(lane, take)
                rest, left, chunk_bytes = rest - take, left - take, chunk_bytes + take
                # That of its copies which has most of the bytes so far.
                slowdown = copy_slowdown if 2 * take >= chunk_bytes else slowdown
                alone_s += copy_s
                if chunk_bytes == room_bytes or not left:
                    alone_s += self._staged_s(lane, chunk_bytes)
                    yield Chunk(ticket, chunk_bytes, alone_s * 1e9, slowdown, after, 0, not left)
                    chunk_bytes, alone_s, slowdown = 0, 0.0, 1.0

    def _cost(self, lane: Lane, nbytes: int) -> tuple[float, float]:
        known = self._costs[lane]
        cost = known.get(nbytes)
        if cost is None:
            rate = self._rates[lane]
            cost = known[nbytes] = _seconds(rate, nbytes), rate.duplex_slowdown(nbytes)
        return cost

    def _staged_s(self, lane: Lane, nbytes: int) -> float:
        """What a chunk through staging takes beside the disk, which one half of it overlaps."""
        if lane is Lane.D2N:
            return _seconds(self._hardware.d2h, nbytes // 2)
        return _seconds(self._hardware.h2d, nbytes // 2) if lane is Lane.N2D else 0.0

    def _compute_again(self, transfer: Transfer) -> VirtualTicket:
        """A page that is computed again is there in stream order."""
        ticket = VirtualTicket(transfer, self)
        source = transfer.source
        self.stream.launch("recompute", self.host_ns, int(getattr(source, "compute_ns", 0)))
        source.fill(transfer.memory)
        ticket.begin_ns = ticket.end_ns = self.host_ns
        ticket.end()
        return ticket


def _seconds(rate: LinkRate, nbytes: int) -> float:
    """How long one copy takes alone: as measured for its size, by the fit where it is smaller.

    The fit over all sizes is some percent off for the large ones, which move most of the bytes.
    """
    if nbytes < rate.by_chunk.points[0].x:
        return rate.seconds(nbytes)
    return nbytes / rate.by_chunk.at(nbytes)


def _virtual(memory: object) -> VirtualMemory:
    if not isinstance(memory, VirtualMemory):
        raise AssertionError(f"{type(memory).__name__} is no VirtualMemory")
    return memory


def _virtual_ticket(ticket: object) -> VirtualTicket:
    if not isinstance(ticket, VirtualTicket):
        raise AssertionError(f"{type(ticket).__name__} is no VirtualTicket")
    return ticket
