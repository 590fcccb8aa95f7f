"""A trace: one iteration of a program as operations on numbered pages. Pure values.

[Note: Numbers]
    Within a trace a page is its position in `pages`. A page that lives through the iteration
    (a weight, an optimizer state) keeps its number from one iteration to the next. One that is born
    in an iteration gets the number of the operation that creates it and of its place among what
    that creates, so it has the same number whenever the program does the same. What is alive at
    the end is known to the next iteration as `becomes`: itself for what lives on, another number
    for a gradient that the next iteration frees before it makes its own.

[Note: Times]
    Operation i is what runs between moment i and moment i + 1; an iteration of N operations has the
    moments 0 to N. A page is alive at the moments from `born + 1` (0 if it was there before) to
    `died`, and dead from there on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.errors import TraceError
from tvm_pager.memory import PageKind

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Phase", "Trace", "TraceOp", "TracePage"]


class Phase(enum.IntEnum):
    """Which part of an iteration an operation belongs to."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3  # inside `optimizer.step()`


class TracePage(NamedTuple):
    """One page.

    Attributes:
        nbytes: its size; it takes `frame_bytes` on the device.
        kind: what it holds, as far as it was learned.
        dtype: of the first tensor seen on it, as torch calls it; "" if unknown.
        name: the parameter's or buffer's name in its model; "" for what has none.
        born: the operation that creates it; None: alive when the iteration begins.
        died: the first moment at which it is dead; None: alive when the iteration ends.
        becomes: its number in the next iteration; None: dead by then, or unknown.
    """

    nbytes: int
    kind: PageKind = PageKind.OTHER
    dtype: str = ""
    name: str = ""
    born: int | None = None
    died: int | None = None
    becomes: int | None = None

    @property
    def frame_bytes(self) -> int:
        """Device bytes: `nbytes` in units of the allocator."""
        return -(-self.nbytes // 512) * 512


class TraceOp(NamedTuple):
    """One operation.

    Attributes:
        name: as torch calls it, "aten::mm.default".
        reads: its operands' pages, each once, in the order of the arguments; those that it writes
            are among them.
        writes: those of `reads` whose bytes it changes.
        creates: pages that are born in it, in that order.
        compute_ns: device time of its kernels, without waiting for bytes.
        workspace_bytes: device memory beside operands and results, free again when it ends.
        phase: part of the iteration.
        module: index in `Trace.modules`, or -1.
        is_replayable: whether running it again on the same operands gives the same bytes: it writes
            no operand and draws no random numbers.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()
    creates: tuple[int, ...] = ()
    compute_ns: int = 0
    workspace_bytes: int = 0
    phase: Phase = Phase.OTHER
    module: int = -1
    is_replayable: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """One iteration; see [Note: Numbers] and [Note: Times].

    Attributes:
        ops: in the order of issue.
        pages: by number.
        modules: dotted paths, for people and for policies that go by layers.
        launch_ns: what one operation costs the launching thread, on average.
        overhead_bytes: device bytes beside pages and workspaces, at most.
        facts: for people: model, device, versions, how it was recorded.

    Raises:
        TraceError: it contradicts itself.
    """

    ops: tuple[TraceOp, ...]
    pages: tuple[TracePage, ...]
    modules: tuple[str, ...] = ()
    launch_ns: int = 0
    overhead_bytes: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_pages(self)
        _check_ops(self)

    @property
    def compute_ns(self) -> int:
        """Device time of all kernels: what the iteration takes where nothing moves."""
        return sum(op.compute_ns for op in self.ops)


def _check_pages(trace: Trace) -> None:
    num_ops, num_pages = len(trace.ops), len(trace.pages)
    for number, page in enumerate(trace.pages):
        first = 0 if page.born is None else page.born + 1
        last = num_ops if page.died is None else page.died
        if page.nbytes < 0 or not 0 <= first <= last <= num_ops:
            raise TraceError(
                f"page {number} of the trace lives from {first} to {last} of {num_ops} with "
                f"{page.nbytes} B; record the trace again"
            )
        if page.becomes is not None and not (
            page.died is None
            and 0 <= page.becomes < num_pages
            and trace.pages[page.becomes].born is None
        ):
            raise TraceError(
                f"page {number} of the trace becomes page {page.becomes}, which is not alive when "
                "an iteration begins; record the trace again"
            )


def _check_ops(trace: Trace) -> None:
    pages = trace.pages
    for index, op in enumerate(trace.ops):
        for number in (*op.reads, *op.creates):
            if not 0 <= number < len(pages):
                raise TraceError(
                    f"operation {index} of the trace ({op.name}) names page {number} of "
                    f"{len(pages)}; record the trace again"
                )
        for number in op.creates:
            if pages[number].born != index:
                raise TraceError(
                    f"operation {index} of the trace ({op.name}) creates page {number}, which was "
                    f"born in {pages[number].born}; record the trace again"
                )
        for number in op.reads:
            born, died = pages[number].born, pages[number].died
            if (born is not None and born >= index) or (died is not None and died <= index):
                raise TraceError(
                    f"operation {index} of the trace ({op.name}) reads page {number}, which is not "
                    "alive then; record the trace again"
                )
        if not set(op.writes) <= set(op.reads):
            raise TraceError(
                f"operation {index} of the trace ({op.name}) writes pages {op.writes} that are not "
                "among its operands; record the trace again"
            )
