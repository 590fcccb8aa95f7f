"""A trace, prepared for being run over and over: what each operation asks of the pager."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.memory import PageKind

if TYPE_CHECKING:
    from tvm_pager.planning import Trace, TraceOp

__all__ = ["Birth", "Program", "Step"]


class Birth(NamedTuple):
    """A page that an operation creates, or that is there when the iteration begins.

    Attributes:
        number: in the trace.
        nbytes: its size.
        kind: what is known of it then: of what an operation creates, nothing.
    """

    number: int
    nbytes: int
    kind: PageKind


class Step(NamedTuple):
    """One operation.

    Attributes:
        name: of the operation.
        reads: numbers of its operands' pages.
        writes: those whose bytes it changes.
        creates: what it creates.
        deaths: numbers of the pages that have died when it begins.
        new_bytes: device bytes that it wants besides its operands: results and workspace.
        least_bytes: those without which it cannot run: its results.
        compute_ns: device time here; what is recorded has that of `op`.
        op: as in the trace.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[Birth, ...]
    deaths: tuple[int, ...]
    new_bytes: int
    least_bytes: int
    compute_ns: int
    op: TraceOp


class Program:
    """The steps of an iteration, and how it hands its pages to the next one.

    Args:
        trace: the iteration.
        compute_factor: device times over the trace's.

    Attributes:
        trace: what it was made of.
        steps: in order.
        num_pages: numbers are below it.
        first: pages that are there before the first iteration, by number.
        anew: those of them that each iteration finds without the one before having left them
            (an input batch).
        deaths_at_end: numbers of the pages that die after the last operation.
        becomes: (number, number in the next iteration) of what lives on.
        gone: numbers of the pages that are alive at the end and not in the next iteration.
    """

    def __init__(self, trace: Trace, compute_factor: float = 1.0) -> None:
        self.trace = trace
        pages = trace.pages
        self.num_pages = len(pages)
        deaths: list[list[int]] = [[] for _ in range(len(trace.ops) + 1)]
        for number, page in enumerate(pages):
            if page.died is not None:
                deaths[page.died].append(number)
        births = [
            Birth(number, page.nbytes, page.kind if page.born is None else PageKind.OTHER)
            for number, page in enumerate(pages)
        ]
        self.first = [births[number] for number, page in enumerate(pages) if page.born is None]
        self.becomes = [
            (number, page.becomes) for number, page in enumerate(pages) if page.becomes is not None
        ]
        self.gone = [
            number
            for number, page in enumerate(pages)
            if page.died is None and page.becomes is None
        ]
        kept = {number for _, number in self.becomes}
        self.anew = [birth for birth in self.first if birth.number not in kept]
        self.deaths_at_end = tuple(deaths[-1])
        self.steps = []
        for index, op in enumerate(trace.ops):
            least_bytes = sum(pages[number].frame_bytes for number in op.creates)
            self.steps.append(
                Step(
                    op.name,
                    op.reads,
                    op.writes,
                    tuple(births[number] for number in op.creates),
                    tuple(deaths[index]),
                    least_bytes + op.workspace_bytes,
                    least_bytes,
                    round(op.compute_ns * compute_factor),
                    op,
                )
            )
