"""When a page could be away: the gaps between its uses in a steady iteration, as arrays.

[Note: Steady state]
    The trace repeats. A page that lives on is followed through its numbers, from birth to death or
    around the circle; a gap may lead from one iteration into the next, or over several. Each
    iteration has the same gaps, so a gap of more than one iteration lies several times over a
    moment. A page that is never used and never dies can be away for ever, and is left out.

[Note: Versions]
    What a write leaves has to be written down once, in the first of the gaps up to the next write;
    in the others the copy below is current. These gaps share a version. A page that nothing writes
    in a steady iteration was written down once, long ago.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tvm_pager.planning import Trace

__all__ = ["SteadyGaps"]

_BORN_BEFORE = -1  # the moment of what comes from outside


class _Use(NamedTuple):
    """A use, in operations from the beginning of the page's first iteration."""

    at: int
    is_write: bool


@dataclass(slots=True)
class SteadyGaps:
    """All gaps of a steady iteration.

    Attributes:
        num_ops: N; operation i of iteration k is at k N + i.
        alive_bytes: by operation: all pages that are alive while it runs.
        own_bytes: of them, its operands and results.
        workspace_bytes: what it wants besides.
        begins: by gap: the first operation during which the page may be away.
        ends: the first during which it may not.
        is_fetched: 1 if it is used again then, 0 if it dies.
        versions: which version of which page; see [Note: Versions].
        version_bytes: by version: the page's size on the device.
        is_dirty: by version: 1 if it must be written down to leave, 0 if it was.
    """

    num_ops: int
    alive_bytes: NDArray[np.int64]
    own_bytes: NDArray[np.int64]
    workspace_bytes: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_fetched: NDArray[np.int64]
    versions: NDArray[np.int64]
    version_bytes: NDArray[np.int64]
    is_dirty: NDArray[np.int64]

    @classmethod
    def of(cls, trace: Trace) -> SteadyGaps:
        """Finds the gaps of a trace. O(operations and operands)."""
        return _Finder(trace).find()

    def excess_bytes(self, device_bytes: int) -> NDArray[np.int64]:
        """By operation, how much must be away; below zero: how much is free.

        Where even its own pages leave no room for its workspace, an operation gets less of it.
        """
        room = np.maximum(device_bytes, self.own_bytes)
        return self.alive_bytes + np.minimum(self.workspace_bytes, room - self.own_bytes) - room


class _Finder:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._num_ops = len(trace.ops)
        self._uses: list[list[_Use]] = [[] for _ in trace.pages]
        for index, op in enumerate(trace.ops):
            for number in op.reads:
                self._uses[number].append(_Use(index, number in op.writes))
            for number in op.creates:
                self._uses[number].append(_Use(index, is_write=True))
        self._gaps: list[tuple[int, int, int, int]] = []
        self._versions: list[tuple[int, int]] = []

    def find(self) -> SteadyGaps:
        trace, pages = self._trace, self._trace.pages
        alive = self._alive_bytes()
        followed = {page.becomes for page in pages if page.becomes is not None}
        seen: set[int] = set()
        for number in range(len(pages)):
            if number not in followed:
                seen.update(self._follow_to_death(number))
        for number, page in enumerate(pages):
            if number not in seen and page.becomes is not None:
                numbers = list(self._chain(number))
                seen.update(numbers)
                if not self._follow_circle(numbers):
                    alive -= len(numbers) * page.frame_bytes
        gaps = np.array(self._gaps, dtype=np.int64).reshape(-1, 4)
        versions = np.array(self._versions, dtype=np.int64).reshape(-1, 2)
        own = [sum(pages[n].frame_bytes for n in {*op.reads, *op.creates}) for op in trace.ops]
        workspace = np.array([op.workspace_bytes for op in trace.ops], dtype=np.int64)
        own_bytes = np.array(own, dtype=np.int64)
        return SteadyGaps(self._num_ops, alive, own_bytes, workspace, *gaps.T, *versions.T)

    def _alive_bytes(self) -> NDArray[np.int64]:
        change = np.zeros(self._num_ops + 1, dtype=np.int64)
        for page in self._trace.pages:
            born = 0 if page.born is None else page.born
            died = self._num_ops if page.died is None else page.died
            if born < died:
                change[born] += page.frame_bytes
                change[died] -= page.frame_bytes
        return np.cumsum(change)[:-1]

    def _chain(self, number: int) -> Iterator[int]:
        """The numbers that a page has in one iteration after the other, until they repeat."""
        first, following = number, self._trace.pages[number].becomes
        yield first
        while following is not None and following != first:
            yield following
            following = self._trace.pages[following].becomes

    def _follow_to_death(self, number: int) -> list[int]:
        """The gaps of a page that is born in an iteration, or comes from outside."""
        pages, num_ops = self._trace.pages, self._num_ops
        numbers = list(self._chain(number))
        uses = [_Use(_BORN_BEFORE, is_write=True)] if pages[number].born is None else []
        uses += self._uses_of(numbers)
        died = pages[numbers[-1]].died
        end = (len(numbers) - 1) * num_ops + (num_ops if died is None else died)
        ends = [(use.at, 1) for use in uses[1:]] + [(end, 0)]
        self._add(pages[number].frame_bytes, uses, ends)
        return numbers

    def _follow_circle(self, numbers: list[int]) -> bool:
        """The gaps of a page that lives for ever; False if nothing uses it."""
        uses = self._uses_of(numbers)
        if not uses:
            return False
        length = len(numbers) * self._num_ops
        writes = [index for index, use in enumerate(uses) if use.is_write]
        first = writes[0] if writes else 0  # so that no version leads around the end
        uses = uses[first:] + [_Use(use.at + length, use.is_write) for use in uses[:first]]
        ends = [(use.at, 1) for use in (*uses[1:], _Use(uses[0].at + length, False))]
        nbytes = self._trace.pages[numbers[0]].frame_bytes
        self._add(nbytes, uses, ends, is_dirty=bool(writes))
        return True

    def _uses_of(self, numbers: list[int]) -> list[_Use]:
        return [
            _Use(lap * self._num_ops + use.at, use.is_write)
            for lap, number in enumerate(numbers)
            for use in self._uses[number]
        ]

    def _add(
        self, nbytes: int, uses: list[_Use], ends: list[tuple[int, int]], *, is_dirty: bool = True
    ) -> None:
        if not nbytes:
            return
        for index, (use, (end, is_fetched)) in enumerate(zip(uses, ends, strict=True)):
            if use.is_write or not index:
                self._versions.append((nbytes, int(is_dirty)))
            if end > use.at + 1:
                self._gaps.append((use.at + 1, end, is_fetched, len(self._versions) - 1))
