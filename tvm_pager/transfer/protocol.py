"""What the pager asks of whatever moves bytes: lanes, transfers, tickets, backends.

Pure: standard library only, so that the pager runs unchanged on torch storages, on the simulator's
virtual clock and on the delayed, failing backend of the tests. Every backend lives in a file of its
own.

[Note: Order]
    A transfer reads its source and writes its destination at some moment between `submit` and the
    completion of its ticket. Neither range may be reused, released or written before the ticket is
    done, also when nobody wants the result any more. Tickets of one lane complete in the order in
    which they were submitted; tickets of different lanes are not ordered. A backend may complete a
    ticket inside `submit`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tvm_pager.errors import TransferError

__all__ = ["Backend", "Checker", "Lane", "Piece", "Recipe", "Ticket", "Transfer"]


class Lane(enum.Enum):
    """One direction between two tiers."""

    D2H = "d2h"
    H2D = "h2d"
    H2N = "h2n"
    N2H = "n2h"
    D2N = "d2n"
    N2D = "n2d"
    R2D = "r2d"  # computed again on the device; moves nothing


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


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of part of one page along one lane."""

    page_id: int
    lane: Lane
    pieces: tuple[Piece, ...]
    memory: object | None  # the page's device memory, opaque to the pager; None on H2N and N2H
    # Executors (CUDA streams) whose queued work on `memory` comes first.
    after: tuple[object, ...] = ()
    # On N2D: the backend's name for a file that stands in for the swap file. On R2D: a `Recipe`.
    source: Any = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@runtime_checkable
class Ticket(Protocol):
    """A submitted transfer. It keeps source, destination and file alive until it is done."""

    transfer: Transfer
    error: TransferError | None

    def done(self) -> bool:
        """Whether the transfer has ended, well or not. Never blocks."""

    def wait(self) -> None:
        """Blocks until the transfer has ended.

        Raises:
            TransferError: if it failed, at each call.
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

    def release_device(self, memory: object, after: tuple[object, ...] = ()) -> None:
        """Takes the device memory away once all work queued on executors in `after` has used it."""

    def submit(self, transfer: Transfer) -> Ticket:
        """Queues a copy and returns at once or when it is done.

        Failures surface in the ticket, never here.
        """

    def device_overhead_bytes(self) -> int:
        """Device bytes in use that are not pages (workspaces, unpaged tensors); 0 where unknown."""

    def close(self) -> None:
        """Waits for all tickets, then frees slab, file and threads. Idempotent."""
