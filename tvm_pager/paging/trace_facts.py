"""What a trace says of its pages beside when they are used next: for policies that ask."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING

from tvm_pager.memory import PageState
from tvm_pager.planning import Lineage
from tvm_pager.planning.rules.replays import Replays
from tvm_pager.planning.traces.layers import find_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.memory import Page
    from tvm_pager.planning import Trace

__all__ = ["TraceFacts"]


class TraceFacts:
    """Answers for one trace. Each kind of question costs a pass over it once, and then O(1).

    Args:
        trace: which.
        uses: of each page, the operations that name it, rising.
    """

    def __init__(self, trace: Trace, uses: Sequence[Sequence[int]]) -> None:
        self.trace = trace
        self._uses = uses

    def lineage(self, number: int, moment: int, pages: Sequence[Page | None]) -> Lineage | None:
        """See `planning.View.lineage`. O(operands).

        Args:
            number: of a page.
            moment: the operation that comes next.
            pages: what stands for the trace's pages now, by number.
        """
        born = self.trace.pages[number].born
        if born is None:
            return None

        def is_there(operand: int) -> bool:
            page = pages[operand]
            return page is not None and page.state is not PageState.DEAD

        op = self.trace.ops[born]
        inputs = tuple(
            page.id if (page := pages[n]) is not None and is_there(n) else None for n in op.reads
        )
        is_recomputable = self._replays.is_direct(number, moment, is_there)
        return Lineage(op.name, born, op.compute_ns, inputs, is_recomputable)

    def unused_ns(self, number: int, now: int) -> int | None:
        """Device time of what runs between the page's last use and the operation `now`.

        Where the page was not used in this iteration it goes on in the one before, which is taken
        to have been the same. None: the trace has no times, or does not use the page.

        Args:
            number: of a page.
            now: the operation that runs, or has run last; -1: none has.
        """
        starts = self._starts_ns
        whole_ns = starts[-1]
        if not whole_ns:
            return None
        waited_ns = starts[max(now, 0)]
        last = self._last_use(number, now)
        seen: set[int] = set()
        while last is None:
            before = self._before.get(number)
            if before is None or before in seen:
                return None
            seen.add(before)
            number = before
            waited_ns += whole_ns
            last = self._last_use(number, len(self.trace.ops))
        return max(0, waited_ns - starts[last + 1])  # it may be in use

    def module(self, number: int) -> str:
        """See `planning.View.module`."""
        home = self._home_of(number)
        module = -1 if home is None else self.trace.ops[home].module
        return self.trace.modules[module] if module >= 0 else ""

    def layer(self, number: int) -> int | None:
        """See `planning.View.layer`."""
        home = self._home_of(number)
        return None if home is None or not self._layers else self._layers[home]

    def _home_of(self, number: int) -> int | None:
        """The operation that creates the page, if the trace knows it, or else uses it first."""
        for page in (number, self._before.get(number, number)):
            born = self.trace.pages[page].born
            if born is not None:
                return born
        uses = self._uses[number]
        return uses[0] if uses else None

    def _last_use(self, number: int, until: int) -> int | None:
        uses = self._uses[number]
        at = bisect_right(uses, until)
        if at:
            return uses[at - 1]
        born = self.trace.pages[number].born
        return born if born is not None and born <= until else None

    @cached_property
    def _starts_ns(self) -> list[int]:
        """By moment: device time of the operations before."""
        return list(itertools.accumulate((op.compute_ns for op in self.trace.ops), initial=0))

    @cached_property
    def _before(self) -> dict[int, int]:
        """What a page was in the iteration before, by its number in this one."""
        return {
            page.becomes: number
            for number, page in enumerate(self.trace.pages)
            if page.becomes is not None
        }

    @cached_property
    def _replays(self) -> Replays:
        return Replays(self.trace)

    @cached_property
    def _layers(self) -> tuple[int, ...]:
        """Layer by operation; empty where there is but one."""
        layers = find_layers(self.trace).of_op
        return layers if len(set(layers)) > 1 else ()
