"""A backend of bytearrays: late, out of order between lanes, failing on request. For tests.

Standard library only. Where the torch backend would corrupt memory, this one does it on purpose and
at once, so that a test which compares bytes sees what a rule of [Note: Order] was worth.

[Note: How it corrupts]
    Each transfer copies its bytes in two halves at random moments between `submit` and completion;
    one that fails stops in between. Device memory is taken from a pool: a released block is
    poisoned and given to the next allocation of its size, while a late transfer goes on using it.
    Behind the end of each run written to NVMe, the rest of the 4096-byte block is overwritten with
    poison, as engines do that pad. `hazards` says what was done wrong, for a test's message;
    nothing is refused.

[Note: Time]
    The clock moves by one at each `tick`, at each `done` and, as often as needed, in `wait`.
    Everything follows from the seed.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter, deque
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.transfer.pieces import HOST_ALIGNMENT, NVME_ALIGNMENT, check_pieces, nvme_runs
from tvm_pager.transfer.protocol import Lane, Priority
from tvm_pager.transfer.ram_ticket import RamTicket, ram_ticket
from tvm_pager.units import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tvm_pager.transfer.protocol import Ticket, Transfer

__all__ = ["POISON", "RamBackend", "RamMemory", "RamTicket"]

POISON = 0xDB


class RamMemory:
    """A page's device memory. `data` is its block, another one after each allocation."""

    __slots__ = ("data",)

    def __init__(self, nbytes: int = 0) -> None:
        self.data = bytearray([POISON]) * nbytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class RamBackend:
    """`Backend` for property and model tests; see the notes above. Not thread-safe.

    Args:
        host_capacity: bytes of the host tier.
        nvme_capacity: bytes of the NVMe tier.
        seed: decides all moments.
        max_delay: most ticks that a transfer takes; 0 completes each in `submit`, if its lane is
            empty.
        fail: gives the errno with which a transfer shall fail, or None.
        device_capacity: bytes of device memory; None for no limit.
        in_order: whether device memory is released and used in stream order, as on CUDA, or only
            when tickets are done; see [Note: Stream order] in protocol.py.

    Attributes:
        host: the host tier's bytes.
        nvme: the NVMe tier's bytes.
        hazards: what broke [Note: Order], a sentence each.
        num_submitted: transfers by lane.
        num_failed: transfers by lane.
        bytes_by_lane: bytes of the transfers submitted.
        device_bytes: device memory given out now.
    """

    host_alignment = HOST_ALIGNMENT
    nvme_alignment = NVME_ALIGNMENT

    def __init__(
        self,
        host_capacity: int,
        nvme_capacity: int,
        *,
        seed: int = 0,
        max_delay: int = 4,
        fail: Callable[[Transfer], int | None] | None = None,
        device_capacity: int | None = None,
        in_order: bool = False,
    ) -> None:
        self.host_capacity_bytes = host_capacity
        self.nvme_capacity_bytes = nvme_capacity
        self.host = bytearray([POISON]) * host_capacity
        self.nvme = bytearray([POISON]) * nvme_capacity
        self.hazards: list[str] = []
        self.num_submitted: Counter[Lane] = Counter()
        self.num_failed: Counter[Lane] = Counter()
        self.bytes_by_lane: Counter[Lane] = Counter()
        self.device_bytes = 0
        self.is_closed = False
        self._device_capacity = device_capacity
        self._in_order = in_order
        self._leaving: list[tuple[bytearray, list[RamTicket]]] = []  # released, still being read
        self._fail = fail
        self._failures: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        self._num_refusals = 0
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._queues: dict[Lane, deque[RamTicket]] = {lane: deque() for lane in Lane}
        self._pool: dict[int, list[bytearray]] = {}

    # --- what tests ask for ----------------------------------------------------------------------

    @property
    def pending(self) -> tuple[RamTicket, ...]:
        """The tickets that are not done, by lane, oldest first."""
        return tuple(ticket for queue in self._queues.values() for ticket in queue)

    def fail_next(
        self, num: int = 1, *, lane: Lane | None = None, code: int = errno.ENOSPC
    ) -> None:
        """Lets the next `num` transfers of a lane, or of each lane, fail with errno `code`."""
        for chosen in Lane if lane is None else (lane,):
            self._failures[chosen].extend([code] * num)

    def refuse_next_allocations(self, num: int = 1) -> None:
        """Lets the next `num` calls of `allocate_device` raise MemoryError."""
        self._num_refusals += num

    def tick(self) -> None:
        """Lets one moment pass for every transfer."""
        for ticket in self.pending:
            ticket.advance()
        for queue in self._queues.values():
            for ticket in [ticket for ticket in queue if ticket.is_due]:
                queue.remove(ticket)
                ticket.end()
        for block, tickets in list(self._leaving):
            if not any(ticket in queue for queue in self._queues.values() for ticket in tickets):
                self._leaving.remove((block, tickets))
                self._recycle(block)

    # --- Backend ---------------------------------------------------------------------------------

    def allocate_device(self, memory: object, nbytes: int, executor: object | None = None) -> None:
        memory = _ram(memory)
        if self._num_refusals:
            self._num_refusals -= 1
            raise MemoryError(f"{nbytes} bytes of device memory refused, as the test asked for")
        capacity, growth = self._device_capacity, nbytes - memory.nbytes
        if capacity is not None and self.device_bytes + growth > capacity:
            raise MemoryError(f"{nbytes} bytes: {self.device_bytes} of {capacity} are in use")
        if memory.nbytes:
            self.release_device(memory)
        blocks = self._pool.get(nbytes)
        memory.data = blocks.pop() if blocks else bytearray([POISON]) * nbytes
        _poison(memory.data)
        self.device_bytes += nbytes

    def release_device(
        self,
        memory: object,
        after: tuple[object, ...] = (),
        tickets: tuple[Ticket, ...] = (),
        executor: object | None = None,
    ) -> None:
        memory = _ram(memory)
        block = memory.data
        known = [ticket for ticket in map(ram_ticket, tickets) if not ticket.done()]
        if not self._in_order:
            for ticket in known:
                ticket.wait()
        for ticket in self.pending:
            if ticket.block is block and block and ticket not in known:
                self.hazards.append(f"device memory of {ticket.transfer} released in flight")
        self.device_bytes -= len(block)
        memory.data = bytearray()
        if known and self._in_order:
            self._leaving.append((block, known))
        else:
            self._recycle(block)

    def _recycle(self, block: bytearray) -> None:
        _poison(block)
        if block:
            self._pool.setdefault(len(block), []).append(block)

    def submit(self, transfer: Transfer, priority: Priority = Priority.FAULT) -> RamTicket:
        block = None
        if "d" in transfer.lane.value:
            block = _ram(transfer.memory).data
        check_pieces(
            transfer,
            device_bytes=None if block is None else len(block),
            host_bytes=self.host_capacity_bytes,
            nvme_bytes=self.nvme_capacity_bytes,
        )
        self._check_alignment(transfer)
        self._note_overlaps(transfer, block)
        lane = transfer.lane
        self.num_submitted[lane] += 1
        self.bytes_by_lane[lane] += transfer.nbytes
        moments = sorted(self._random.randint(0, self._max_delay) for _ in range(3))
        ticket = RamTicket(self, transfer, block, moments, self._failure_of(transfer))
        self._queues[lane].append(ticket)
        if moments[-1] == 0:
            self.tick()
        return ticket

    def order(self, ticket: Ticket, executors: tuple[object, ...]) -> None:
        ticket = ram_ticket(ticket)
        if self._in_order and ticket.is_certain:
            ticket.deliver()
        else:
            ticket.wait()

    def promote(self, ticket: Ticket, priority: Priority) -> None:
        """Does nothing: moments are random, and a test may not count on them."""

    def cancel(self, ticket: Ticket) -> bool:
        ticket = ram_ticket(ticket)
        if not ticket.cancel():
            return False
        self._queues[ticket.transfer.lane].remove(ticket)
        return True

    def poll(self) -> None:
        """Does nothing: the clock moves elsewhere."""

    def host_border(self, nbytes: int) -> int:
        return min(nbytes, self.host_capacity_bytes) // 4096 * 4096

    def resize_host(self, nbytes: int) -> None:
        nbytes = nbytes // 4096 * 4096
        del self.host[nbytes:]
        self.host.extend(bytes([POISON]) * (nbytes - len(self.host)))
        self.host_capacity_bytes = nbytes

    def device_overhead_bytes(self) -> int:
        return 0

    def close(self) -> None:
        while self.pending:
            self.tick()
        self.is_closed = True

    def _failure_of(self, transfer: Transfer) -> TransferError | None:
        lane = transfer.lane
        code = self._failures[lane].popleft() if self._failures[lane] else None
        if code is None and self._fail is not None:
            code = self._fail(transfer)
        if self.is_closed:
            code = errno.EBADF
        if code is None:
            return None
        self.num_failed[lane] += 1
        return TransferError(
            f"{transfer.nbytes} bytes of page {transfer.page_id} on lane {lane.value}: "
            f"{os.strerror(code)}, as the test asked for",
            code,
        )

    # --- bytes -----------------------------------------------------------------------------------

    def copy_half(self, ticket: RamTicket, *, is_second: bool) -> None:
        """Moves one half of a ticket's bytes, and in the second half what an engine pads."""
        transfer = ticket.transfer
        source, target = self._ends(transfer, ticket.block)
        half = transfer.nbytes // 2
        begin, end = (half, transfer.nbytes) if is_second else (0, half)
        at = 0
        for piece in transfer.pieces:
            low, high = max(begin - at, 0), min(end - at, piece.nbytes)
            if low < high:
                data = source[piece.src_offset + low : piece.src_offset + high]
                target[piece.dst_offset + low : piece.dst_offset + high] = data
            at += piece.nbytes
        if is_second and transfer.lane.value[2] == "n":
            for run in nvme_runs(transfer):
                stop = run.nvme_offset + run.nbytes
                padded = min(align_up(stop, NVME_ALIGNMENT), self.nvme_capacity_bytes)
                target[stop:padded] = bytes([POISON]) * (padded - stop)

    def source_of(self, ticket: RamTicket) -> bytes:
        """The bytes that a ticket has to move, as they are now."""
        source, _ = self._ends(ticket.transfer, None)
        return b"".join(
            source[piece.src_offset : piece.src_offset + piece.nbytes]
            for piece in ticket.transfer.pieces
        )

    def _ends(
        self, transfer: Transfer, block: bytearray | None
    ) -> tuple[bytes | bytearray, bytearray]:
        lane = transfer.lane.value
        sides = {"d": block if block is not None else bytearray(), "h": self.host, "n": self.nvme}
        if transfer.source is not None:  # here the bytes themselves
            return transfer.source, sides[lane[2]]
        return sides[lane[0]], sides[lane[2]]

    # --- checks ----------------------------------------------------------------------------------

    def _check_alignment(self, transfer: Transfer) -> None:
        if "n" in transfer.lane.value:
            nvme_runs(transfer)  # raises where a run starts off the alignment
        for side, index in ((0, 1), (2, 2)):
            if transfer.lane.value[side] == "h":
                for piece in transfer.pieces:
                    if piece[index] % HOST_ALIGNMENT:
                        raise AssertionError(f"{piece} on {transfer.lane} is off {HOST_ALIGNMENT}")

    def _note_overlaps(self, transfer: Transfer, block: bytearray | None) -> None:
        """Records ranges that another transfer in flight writes, or reads while this one writes."""
        for ticket in self.pending:
            if ticket in transfer.behind:
                continue  # over before this one begins
            for key, begin, end, is_write in _ranges(transfer, block):
                for other_key, other_begin, other_end, other_write in _ranges(
                    ticket.transfer, ticket.block
                ):
                    if key != other_key or end <= other_begin or other_end <= begin:
                        continue
                    if is_write or other_write:
                        self.hazards.append(f"{transfer} overlaps {ticket.transfer} in flight")


def _ranges(transfer: Transfer, block: bytearray | None) -> Iterator[tuple[object, int, int, bool]]:
    """Gives (place, begin, end, is written) for both ends of each piece."""
    for piece in transfer.pieces:
        for side, offset in (
            (transfer.lane.value[0], piece.src_offset),
            (transfer.lane.value[2], piece.dst_offset),
        ):
            is_source = side in "nr" and transfer.source is not None
            place: object = id(block) if side == "d" else id(transfer.source) if is_source else side
            if side == "d" and block is None:
                continue  # delivered: from here on the device's own order counts
            is_write = side == transfer.lane.value[2]
            yield place, offset, offset + piece.nbytes, is_write


def _poison(block: bytearray) -> None:
    block[:] = bytes([POISON]) * len(block)


def _ram(memory: object) -> RamMemory:
    if not isinstance(memory, RamMemory):
        raise AssertionError(f"{type(memory).__name__} is no RamMemory")
    return memory
