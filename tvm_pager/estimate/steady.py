"""From a log of several iterations to the trace of a steady one."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from tvm_pager.planning import Phase, TraceOp, TracePage
from tvm_pager.planning.traces.recorded import in_order_of_mention, with_learned_kinds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.estimate.fake_log import FakePage, LoggedOp

__all__ = ["Iteration", "difference", "steady_iteration"]


class Iteration:
    """The operations between two boundaries, and the pages that were alive there.

    Args:
        ops: the whole log.
        pages: all pages of the log, the older ones first.
        begin: tick of the boundary before it.
        end: tick of the boundary behind it.

    Attributes:
        births: operation, and place among what that creates, of each page born in it.
        at_begin: pages that are alive when it begins.
        staying: those of `births` that are alive at its end.
    """

    def __init__(
        self, ops: Sequence[LoggedOp], pages: Sequence[FakePage], begin: int, end: int
    ) -> None:
        ticks = [op.tick for op in ops]
        self.ops = ops[bisect_left(ticks, begin) : bisect_left(ticks, end)]
        self._ticks = [op.tick for op in self.ops]
        self.births = {
            page: (index, place)
            for index, op in enumerate(self.ops)
            for place, page in enumerate(op.creates)
        }
        self.end = end
        self.at_begin = [
            page
            for page in pages
            if page.born < end
            and page not in self.births
            and (page.died is None or page.died > begin)
        ]
        self.staying = [page for page in self.births if self.moment_of_death(page) is None]

    def moment_of_death(self, page: FakePage) -> int | None:
        """The first moment at which the page is dead; None: it is alive at the end."""
        if page.died is None or page.died > self.end:
            return None
        return bisect_left(self._ticks, page.died)


def steady_iteration(
    before: Iteration, steady: Iteration
) -> tuple[tuple[TraceOp, ...], tuple[TracePage, ...]]:
    """Operations and pages of `steady`; the iteration before it says what its pages become.

    Between the two there must be no `difference`.
    """
    numbers = in_order_of_mention(((op.reads, op.creates) for op in steady.ops), steady.at_begin)
    becomes = _continuations(before, steady, numbers)
    pages = [
        TracePage(
            page.nbytes,
            page.kind,
            str(page.dtype).removeprefix("torch."),
            page.name,
            steady.births[page][0] if page in steady.births else None,
            steady.moment_of_death(page),
            becomes.get(page),
        )
        for page in numbers
    ]
    ops, module = [], -1
    for op in steady.ops:
        # An update runs outside of all modules; its operands belong to one, temporaries to the last
        in_update = (page.module for page in op.reads if page.module >= 0)
        module = next(in_update, module) if op.phase is Phase.UPDATE else op.module
        ops.append(_trace_op(op, numbers, module))
    return tuple(ops), with_learned_kinds(pages, ops)


def _trace_op(op: LoggedOp, numbers: dict[FakePage, int], module: int) -> TraceOp:
    return TraceOp(
        op.name,
        tuple(numbers[page] for page in op.reads),
        tuple(numbers[page] for page in op.writes),
        tuple(numbers[page] for page in op.creates),
        op.compute_ns,
        0,
        op.phase,
        module,
        op.is_replayable,
    )


def difference(before: Iteration, steady: Iteration) -> str | None:
    """What the two iterations did differently; None: nothing.

    Compares them as far as the later one makes pages that outlive it. Behind that the first
    iteration of all may go its own way: there optimizers make their states.
    """
    num_compared = max((steady.births[page][0] for page in steady.staying), default=-1) + 1
    old_ops, new_ops = before.ops[:num_compared], steady.ops[:num_compared]
    for index, (old, new) in enumerate(zip(old_ops, new_ops, strict=False)):
        if _signature(old) != _signature(new):
            return f"operation {index} was {_describe(old)} and then {_describe(new)}"
    if len(old_ops) < len(new_ops):
        return f"there were {len(old_ops):,} operations and then {len(steady.ops):,}"
    return None


def _signature(op: LoggedOp) -> tuple[object, ...]:
    return op.name, len(op.reads), tuple(page.nbytes for page in op.creates)


def _describe(op: LoggedOp) -> str:
    made = sum(page.nbytes for page in op.creates)
    return f"{op.name} (page operands: {len(op.reads)}, bytes made: {made:,})"


def _continuations(
    before: Iteration, steady: Iteration, numbers: dict[FakePage, int]
) -> dict[FakePage, int]:
    """Numbers in the next iteration of the pages that are alive at the end of this one.

    A page that was born in this iteration continues as the one that was born in the iteration
    before at the same place. Two never continue as one: then the program holds on to more each
    time, and what the second becomes is not known.
    """
    becomes = {page: numbers[page] for page in steady.at_begin}
    becomes = {page: n for page, n in becomes.items() if steady.moment_of_death(page) is None}
    taken = set(becomes.values())
    born_before = {place: page for page, place in before.births.items()}
    for page in steady.staying:
        number = numbers.get(born_before[steady.births[page]])
        if number is not None and number not in taken:
            becomes[page] = number
            taken.add(number)
    return becomes
