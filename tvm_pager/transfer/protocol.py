"""What the pager asks of whatever moves bytes: lanes, transfers, tickets, backends.

Pure: standard library only, so that the pager runs unchanged on torch storages, on the simulator's
virtual clock and on the delayed, failing backend of the tests. Every backend lives in a file of its
own.

[Note: Order]
    A transfer reads its source and writes its destination at some moment between `submit` and the
    completion of its ticket. Neither range may be reused, released or written before the ticket is
    done, also when nobody wants the result any more. Tickets complete in any order: a lane serves
    the most urgent transfer first, in chunks. A backend may complete a ticket inside `submit`.

[Note: Stream order]
    Where executors are queues of a device (CUDA streams), host and device are ordered apart. A
    ticket is *certain* when all its copies are queued on the device, so that nothing but the loss
    of the device can make it fail. Device memory that a certain ticket reads may be released in
    stream order (`release_device`), and device memory that it fills may be used in stream order
    (`order`): neither blocks the host. What lies on the host is not in that order: host frames may
    be reused only when the ticket is done. Where there is no such queue both block until the ticket
    is done, and the pager cannot tell.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tvm_pager.errors import TransferError

__all__ = ["Backend", "Checker", "Lane", "Piece", "Priority", "Recipe", "Ticket", "Transfer"]


class Lane(enum.Enum):
    """One direction between two tiers."""

    # Members are singletons, and Enum's own hash is a Python call per look-up.
    __hash__ = object.__hash__

    D2H = "d2h"
    H2D = "h2d"
    H2N = "h2n"
    N2H = "n2h"
    D2N = "d2n"
    N2D = "n2d"
    R2D = "r2d"  # computed again on the device; moves nothing


class Priority(enum.IntEnum):
    """How urgent a transfer is; the smaller goes first. Of one, the older begins first."""

    FAULT = 0  # an operation waits for it
    WRITE_BACK = 1  # makes room that will be wanted
    PREFETCH = 2  # may be wanted later


class Recipe(Protocol):
    """The source of a recomputable page."""

    def fill(self, memory: object) -> None:
        """Computes the page's bytes into its device memory. Blocks.

        Raises:
            TransferError: it cannot be computed now.
        """


class Piece(NamedTuple):
    """One contiguous run of bytes of a transfer. All fields in bytes.

    On the device side of a lane the offset equals `page_offset`; on the host side it counts from
    the start of the slab's page space; on the NVMe side from the start of the swap file, or of
    the page's bytes in a `source`.
    """

    page_offset: int
    src_offset: int
    dst_offset: int
    nbytes: int


@dataclass(slots=True)
class Transfer:
    """A copy of part of one page along one lane."""

    page_id: int
    lane: Lane
    pieces: tuple[Piece, ...]
    # The page's device memory, opaque to the pager; None on H2N and N2H. Its ticket lets go of it
    # as soon as memory that dies could no longer be reused too early.
    memory: object | None
    # Executors (CUDA streams) whose queued work on `memory` comes first; none: the caller's.
    after: tuple[object, ...] = ()
    # On N2D: the backend's name for a file that stands in for the swap file. On R2D: a `Recipe`.
    source: Any = None
    # Certain tickets that are still filling what this one reads: their copies come first.
    behind: tuple[Ticket, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@runtime_checkable
class Ticket(Protocol):
    """A submitted transfer. It keeps source, destination and file alive until it is done."""

    transfer: Transfer
    error: TransferError | None

    @property
    def is_certain(self) -> bool:
        """Whether it can fail no more; see [Note: Stream order]. Never blocks."""

    def done(self) -> bool:
        """Whether the transfer has ended, well or not. Never blocks."""

    def wait(self) -> None:
        """Blocks until the transfer has ended, which a waiting fault makes urgent.

        Raises:
            TransferError: if it failed or was cancelled, at each call.
        """


class Checker(Protocol):
    """Compares what comes back with what left; check level 1."""

    def seal(self, memory: object) -> None:
        """Device memory is about to be released; its bytes are below the device."""

    def is_intact(self, memory: object) -> bool:
        """Whether fetched device memory holds what `seal` saw."""


class Backend(Protocol):
    """Owns the bytes of all tiers. Decides nothing."""

    host_capacity_bytes: int  # page space of the slab; staging is not part of it
    nvme_capacity_bytes: int  # 0 without a swap file
    host_alignment: int
    nvme_alignment: int

    def allocate_device(self, memory: object, nbytes: int, executor: object | None = None) -> None:
        """Gives `memory` its `nbytes` bytes of device memory back, contents undefined.

        It comes from the pool of `executor`: who drops its last tensor there must find it there.

        Raises:
            MemoryError: the device has no room (CUDA out of memory included); `memory` is
                unchanged.
        """

    def release_device(
        self,
        memory: object,
        after: tuple[object, ...] = (),
        tickets: tuple[Ticket, ...] = (),
        executor: object | None = None,
    ) -> None:
        """Takes the device memory away once its last users have ended.

        Args:
            memory: what `allocate_device` or an operation allocated, in the pool of `executor`.
            after: executors whose queued work uses it.
            tickets: transfers that read it, all of them certain.
            executor: see `allocate_device`.
        """

    def submit(self, transfer: Transfer, priority: Priority = Priority.FAULT) -> Ticket:
        """Queues a copy and returns at once or when it is done.

        Failures surface in the ticket, never here.
        """

    def order(self, ticket: Ticket, executors: tuple[object, ...]) -> None:
        """Lets work that is queued on `executors` from now on find the ticket done.

        Blocks until the ticket is certain, or done where there is no stream order.

        Raises:
            TransferError: it has failed.
        """

    def promote(self, ticket: Ticket, priority: Priority) -> None:
        """Makes a queued transfer more urgent; it never becomes less so. Never blocks."""

    def cancel(self, ticket: Ticket) -> bool:
        """Stops a transfer that has not begun: True, and it ends with `errno.ECANCELED`.

        Never blocks. What has begun goes on: bytes in flight cannot be called back.
        """

    def poll(self) -> None:
        """Lets queued transfers go on. Cheap, never blocks; to be called often."""

    def device_overhead_bytes(self) -> int:
        """Device bytes in use that are not pages (workspaces, unpaged tensors); 0 where unknown."""

    def host_border(self, nbytes: int) -> int:
        """The largest capacity not above `nbytes` that gives all memory beyond it back. Bytes."""

    def resize_host(self, nbytes: int) -> None:
        """Changes `host_capacity_bytes`. The caller has emptied what lies beyond.

        Raises:
            TransferError: the system refuses memory, or to unlock it.
        """

    def close(self) -> None:
        """Waits for all tickets, then frees slab, file and threads. Idempotent."""
