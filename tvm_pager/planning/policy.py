"""The policy API: what a researcher writes.

A policy is a deterministic object. It keeps no tensors and no reference to a `View`, reads no
clock, does no I/O and imports neither torch nor the pager; randomness comes from a seed of its own.
One instance serves one tier.

[Note: Insert, access, remove]
    Between two decisions the pager batches what happened and replays it in order: `on_insert` once
    when a page becomes resident in the policy's tier, `on_access` for each later use, `on_remove`
    when it leaves, by eviction or because its last tensor died. Pages that are born and die between
    two decisions may never be mentioned. So a policy knows exactly the resident pages whenever
    `choose_victims` is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tvm_pager.memory import PageKind, Tier

__all__ = ["Eviction", "PageView", "Policy", "View"]


class Eviction(NamedTuple):
    """Move a page off the policy's tier. `to` None lets the pager take the next tier with room."""

    page_id: int
    to: Tier | None = None


class PageView(NamedTuple):
    """What a policy may know of a page."""

    page_id: int
    kind: PageKind
    nbytes: int
    residency: Tier  # the highest tier that holds all its current bytes
    is_clean: bool  # a tier below the device holds the current bytes too: eviction moves nothing
    pins: int
    last_use: int  # index of the last operation that used it; compare `View.operation_index`


class View(Protocol):
    """Read-only, and valid only during the call it is passed to."""

    operation_index: int

    def page(self, page_id: int) -> PageView:
        """Raises KeyError for an id that is not a live page."""

    def evictable(self, page_id: int) -> bool:
        """Whether the page could leave the tier now: neither pinned, nor in use, nor in flight."""

    def frame_bytes(self, page_id: int) -> int:
        """Bytes that its eviction would free in the tier of the call. O(1)."""


class Policy(ABC):
    """On-demand victim choice. Subclasses need `choose_victims` only; `on_*` default to nothing."""

    name = ""

    def on_insert(self, page_id: int) -> None:  # noqa: B027
        """The page became resident in this policy's tier."""

    def on_access(self, page_id: int) -> None:  # noqa: B027
        """The resident page was used."""

    def on_remove(self, page_id: int) -> None:  # noqa: B027
        """The page left the tier or died; its id never comes back as another page."""

    @abstractmethod
    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        """Names pages whose eviction frees at least `need_bytes` bytes of `tier`.

        Atomic: a policy that returns None (not enough evictable bytes) has changed nothing. The
        pager re-checks each victim and tells the policy of each removal through `on_remove`.
        """
