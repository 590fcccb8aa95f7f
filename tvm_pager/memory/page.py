"""A page: one tensor storage, its state, its segments below the device.

Fields are written by `PageTable` alone, with the exceptions that their comments name.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_pager.memory.frames import Extent

__all__ = ["Backing", "Page", "PageKind", "PageState", "Segment", "Tier"]


class Tier(enum.IntEnum):
    """Where bytes can be. Promote means toward 0, demote away from it."""

    DEVICE = 0
    HOST = 1
    NVME = 2


class PageKind(enum.Enum):
    """What a page holds; learned by the runtime, used by policies and reports."""

    PARAM = "param"
    GRAD = "grad"
    OPT_STATE = "opt_state"
    ACTIVATION = "activation"
    BUFFER = "buffer"
    TEMPORARY = "temporary"
    OTHER = "other"


class PageState(enum.Enum):
    """Who owns the page's memory; docs/states.md has the diagram and the transitions."""

    # Members are singletons, and Enum's own hash is a Python call per look-up.
    __hash__ = object.__hash__

    RESIDENT = "resident"  # device memory holds the current bytes
    WRITING_BACK = "writing_back"  # as RESIDENT; a copy down is in flight
    LEAVING = "leaving"  # device memory released in stream order; the frames below are being filled
    EVICTED = "evicted"  # no device memory; every segment has a frame below
    DEMOTING = "demoting"  # as EVICTED; a copy from host to NVMe is in flight
    FETCHING = "fetching"  # device memory is being filled from the frames below
    FAILED = "failed"  # a fetch failed: as EVICTED, the next access tries again
    DEAD = "dead"  # no tensor is left; frames are free or wait for a ticket


class Backing(enum.Enum):
    """What stands behind a page that leaves the device; `PageTable.back` sets it."""

    __hash__ = object.__hash__

    SWAP = "swap"  # written back to the tiers below
    FILE = "file"  # `source` reads them from a file; takes no frame and no commit; a write ends it
    RECIPE = "recipe"  # `source` computes them again; commits until dropped; a write ends it
    NONE = "none"  # can never leave the device


class Segment:
    """A part of a page below the device. A frame in a tier means: that tier's copy is current."""

    __slots__ = ("host", "nbytes", "nvme", "page_offset")

    def __init__(self, page_offset: int, nbytes: int) -> None:
        self.page_offset = page_offset
        self.nbytes = nbytes
        self.host: tuple[Extent, ...] | None = None
        self.nvme: tuple[Extent, ...] | None = None

    @property
    def is_dirty(self) -> bool:
        """Whether no tier below the device holds the current bytes."""
        return self.host is None and self.nvme is None


class _BirthFields:
    """What each page is born with: slots, written by `PageTable.create`.

    [Note: Fields of a page]
        A page is born and dies with every tensor. A slot that is assigned where the page is made
        costs 4 ns to write or read, a key of an instance dictionary 35 and 5 to 20, an `__init__`
        with that many arguments 300. What is seldom written is a class attribute of `Page`, its
        default, until it is.
    """

    __slots__ = (
        "executors",
        "frame_bytes",
        "has_copies",
        "id",
        "known_to",
        "last_use",
        "memory",
        "nbytes",
        "pager",
        "state",
        "tickets",
    )

    id: int
    nbytes: int
    frame_bytes: int  # bytes taken on the device, `nbytes` rounded up to its granularity
    # The backend's device memory, called to get it: a weak reference where it belongs to others
    memory: Any
    state: PageState
    # Whether any segment has a frame, or a source stands behind it; False = writes need no books.
    has_copies: bool
    tickets: tuple[Any, ...]  # transfers in flight, which `state` tells the direction of
    known_to: int  # bit per tier whose policy has been told of this page; written by the pager
    # Index of the last operation that used it, as of the last replay of the device's journal;
    # written by `TierPolicy`.
    last_use: int
    # Streams other than the allocating one that used it; written by the runtime.
    executors: set[Any] | None
    pager: Any  # the pager that owns the page, for the runtime's look-up


class Page(_BirthFields):
    """One storage. See [Note: Fields of a page]."""

    # Start of its range in the address space; 0 until `PageTable.address_of` is asked for it.
    va: int = 0
    kind: PageKind = PageKind.OTHER  # written by the runtime
    backing: Backing = Backing.SWAP
    source: Any = None  # of FILE and RECIPE: who gives the bytes, opaque to all but the backend
    segments: tuple[Segment, ...] = ()  # made at the first write-back
    is_superseded: bool = False  # written while WRITING_BACK: the copy in flight will be stale
    is_lost: bool = False  # the device failed while its only copy was on the way down
    pins: int = 0
    # Copies that are over in stream order, and still read or fill the frames below.
    readers: tuple[Any, ...] = ()
    # The executor whose memory pool its device memory comes from; None = the owner. By the runtime.
    home: Any = None
    # Iteration in which a raw pointer escaped; -1 = none; written by the runtime.
    exposed_at: int = -1
    kept: Any = None  # a copy in host memory, where `close` found no room on the device

    @property
    def is_on_device(self) -> bool:
        """Whether device memory is allocated (the bytes are there, or arriving)."""
        state = self.state
        return (
            state is PageState.RESIDENT
            or state is PageState.WRITING_BACK
            or state is PageState.FETCHING
        )

    @property
    def can_be_fetched(self) -> bool:
        """Whether a fetch may begin: it is off the device, and no copy beside it is in the way."""
        state = self.state
        return state is PageState.EVICTED or state is PageState.LEAVING or state is PageState.FAILED

    @property
    def has_source(self) -> bool:
        """Whether its bytes can be had again without any frame."""
        return self.backing is Backing.FILE or self.backing is Backing.RECIPE

    @property
    def is_clean(self) -> bool:
        """Whether the device's copy could be dropped without a write-back."""
        return self.has_source or (
            self.has_copies and not any(segment.is_dirty for segment in self.segments)
        )

    def __repr__(self) -> str:
        return (
            f"Page {self.id} ({self.kind.value}, {self.nbytes} B, {self.state.value}, "
            f"pins={self.pins})"
        )
