"""Which pages come back to the device again and again: counts of fetches, and when they thrash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tvm_pager.events import Event
    from tvm_pager.memory import PageTable

__all__ = ["FetchCounts", "FetchedPage", "Thrashing"]

_LANES = frozenset({"h2d", "n2d"})
_LIMIT = 4096  # pages that are counted; then the half that was fetched least is forgotten
_MANY = 3
_NUM_SHOWN = 10


@dataclass(frozen=True, slots=True)
class FetchedPage:
    """One page that was fetched often. Sizes in bytes."""

    page_id: int
    name: str  # with the shape; empty where no module has it
    kind: str
    nbytes: int
    num_fetches: int
    fetched_bytes: int
    operation: str  # the last that waited for it


@dataclass(frozen=True, slots=True)
class Thrashing:
    """What moves over and over. Sizes in bytes."""

    fetched_bytes: int  # of all pages
    alive_bytes: int  # of all tensors that were alive at a time, at most
    enough_bytes: int  # a device budget that would hold them
    pages: tuple[FetchedPage, ...]  # the most fetched first


class _Count:
    __slots__ = ("kind", "moved_bytes", "nbytes", "num", "operation", "start_ns")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.num = self.moved_bytes = 0
        self.start_ns = -1
        self.kind = self.operation = ""


class FetchCounts:
    """Counts fetches by page, a bounded number of them. Called under the pager's lock; 1 us each.

    Attributes:
        table: whose pages; set by whoever wires the pager. None: nothing is counted by page.
    """

    def __init__(self) -> None:
        self.table: PageTable | None = None
        self._fetched_bytes = 0
        self._again_bytes = 0  # of that, beyond the first `_MANY` fetches of a page
        self._alive_bytes = 0
        self._num_fetches = self._next_look = 0
        self._counts: dict[int, _Count] = {}

    def fetched(self, event: Event) -> None:
        """Takes the end of a transfer to the device."""
        if self.table is None or event.lane not in _LANES:
            return
        self._fetched_bytes += event.nbytes
        page = self.table.pages.get(event.page_id)
        if page is None:  # it has died meanwhile
            return
        count = self._counts.get(event.page_id)
        if count is None:
            count = self._counts[event.page_id] = _Count(page.nbytes)
        if count.start_ns != event.start_ns:  # else it came over two lanes
            count.start_ns = event.start_ns
            count.num += 1
            self._num_fetches += 1
        count.kind = page.kind.value  # it is learned, and better known now
        count.moved_bytes += event.nbytes
        if count.num > _MANY:
            self._again_bytes += event.nbytes
        if self._num_fetches >= self._next_look:
            self._look()
        if len(self._counts) > _LIMIT:
            self._forget_half()

    def waited(self, event: Event) -> None:
        """Takes a fault: an operation has waited for a page."""
        count = self._counts.get(event.page_id)
        if count is not None:
            count.operation = event.detail

    def thrashing(
        self, budget_bytes: int, beside_bytes: int, names: Callable[[], Mapping[int, str]]
    ) -> Thrashing | None:
        """What thrashes, or None: more than three budgets fetched, a third of them over and over.

        Args:
            budget_bytes: of the device.
            beside_bytes: what of that is taken by others than pages.
            names: gives pages' names by id; called only where something thrashes.
        """
        is_thrashing = (
            self._fetched_bytes > _MANY * budget_bytes
            and self._again_bytes * _MANY >= self._fetched_bytes
        )
        if not is_thrashing:
            return None
        self._look()
        known = names()
        most = sorted(self._counts.items(), key=lambda item: (-item[1].num, -item[1].moved_bytes))
        pages = tuple(
            FetchedPage(
                page_id,
                known.get(page_id, ""),
                count.kind,
                count.nbytes,
                count.num,
                count.moved_bytes,
                count.operation,
            )
            for page_id, count in most[:_NUM_SHOWN]
        )
        alive_bytes = self._alive_bytes
        # A tenth more: it is looked at now and then, and an operation's outputs come on top.
        enough_bytes = alive_bytes + alive_bytes // 10 + beside_bytes
        return Thrashing(self._fetched_bytes, alive_bytes, enough_bytes, pages)

    def _look(self) -> None:
        """Adds up what is alive. O(pages), and so rarely that it is O(1) for each fetch."""
        if self.table is not None:
            pages = self.table.pages
            alive_bytes = sum(page.nbytes for page in pages.values())
            self._alive_bytes = max(self._alive_bytes, alive_bytes)
            self._next_look = self._num_fetches + max(16, len(pages) // 4)

    def _forget_half(self) -> None:
        most = sorted(self._counts.items(), key=lambda item: -item[1].num)
        self._counts = dict(most[: _LIMIT // 2])
