"""What it takes to compute a page again instead of keeping or moving it. Pure.

[Note: Replays]
    A page can be computed again at a moment if the operation that created it is replayable, nothing
    has written the page since, and each operand of the operation still has the bytes that it had.
    An operand that is alive then is taken as it is, wherever it lies; one that is dead is computed
    again itself, so a replay is a chain of operations. Chains are short in practice and are cut off
    at `MAX_CHAIN` operations.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tvm_pager.planning.traces.trace import Trace

__all__ = ["MAX_CHAIN", "Replay", "Replays"]

MAX_CHAIN = 64


class Replay(NamedTuple):
    """How a page is computed again.

    Attributes:
        ops: operations to run, in order.
        compute_ns: their device time.
        sources: pages that must be alive and are read.
        new_bytes: device bytes of what the operations create, the page itself included.
    """

    ops: tuple[int, ...]
    compute_ns: int
    sources: tuple[int, ...]
    new_bytes: int


class Replays:
    """Answers for one trace. Building it is one pass; an answer takes as long as its chain."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._writes: dict[int, list[int]] = {}  # page -> operations that write it, rising
        for index, op in enumerate(trace.ops):
            for page in op.writes:
                self._writes.setdefault(page, []).append(index)

    def of(self, page: int, moment: int, lost: Collection[int] = ()) -> Replay | None:
        """How to have the page's bytes at `moment` again; None if they cannot be computed.

        Args:
            page: its number.
            moment: when; a moment after its creation.
            lost: pages that are alive then and cannot be read either.
        """
        order: dict[int, None] = {}
        sources: dict[int, None] = {}
        if not self._visit(page, moment, lost, order, sources):
            return None
        ops = tuple(sorted(order))
        pages, all_ops = self._trace.pages, self._trace.ops
        return Replay(
            ops,
            sum(all_ops[op].compute_ns for op in ops),
            tuple(sources),
            sum(pages[made].frame_bytes for op in ops for made in all_ops[op].creates),
        )

    def is_direct(self, page: int, moment: int, is_there: Callable[[int], bool]) -> bool:
        """Whether the operation that created the page can do so again at `moment`, by itself.

        Args:
            page: its number.
            moment: when; a moment after its creation.
            is_there: whether an operand is alive, by number.
        """
        born = self._maker_of(page)
        return born is not None and all(
            is_there(operand) and not self._is_written_between(operand, born, moment)
            for operand in self._trace.ops[born].reads
        )

    def _visit(
        self,
        page: int,
        moment: int,
        lost: Collection[int],
        order: dict[int, None],
        sources: dict[int, None],
    ) -> bool:
        waiting = [page]
        while waiting:
            wanted = waiting.pop()
            born = self._maker_of(wanted)
            if born is None or len(order) >= MAX_CHAIN:
                return False
            if born in order:
                continue
            order[born] = None
            for operand in self._trace.ops[born].reads:
                if not self._is_alive(operand, moment) or operand in lost:
                    waiting.append(operand)
                elif self._is_written_between(operand, born, moment):
                    return False
                else:
                    sources[operand] = None
        return True

    def _maker_of(self, page: int) -> int | None:
        """The operation that gives the page's bytes whenever it runs; None: there is none."""
        born = self._trace.pages[page].born
        if born is None or page in self._writes or not self._trace.ops[born].is_replayable:
            return None
        return born

    def _is_alive(self, page: int, moment: int) -> bool:
        died = self._trace.pages[page].died
        return died is None or moment < died

    def _is_written_between(self, page: int, after: int, moment: int) -> bool:
        writes = self._writes.get(page)
        if not writes:
            return False
        at = bisect_left(writes, after)
        return at < len(writes) and writes[at] < moment
