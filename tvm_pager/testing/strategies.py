"""Hypothesis strategies for traces that can be true, and for budgets that they can run in.

[Note: What a random trace is like]
    Lifetimes are drawn first and operations over them: pages that live throughout (weights,
    states), pages that are handed on (one dies, and another of its size is born and becomes it,
    like gradients), and pages that come and go. By default a trace is steady: the pages at its end
    become the pages at its beginning, one each. Sizes are a few frames, so that budgets bind;
    examples shrink to fewer pages, operations and uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

from tvm_pager.memory import PageKind
from tvm_pager.planning import Phase, Trace, TraceOp, TracePage

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["device_budgets", "page_bytes", "traces"]

_LASTING: Final = (PageKind.PARAM, PageKind.OPT_STATE, PageKind.BUFFER)
_PASSING: Final = (PageKind.ACTIVATION, PageKind.TEMPORARY, PageKind.OTHER)
_DTYPES: Final = ("bfloat16", "float32", "")
_COMPUTE_NS: Final = (0, 1000, 20_000, 1_000_000)
_MODULES: Final = ("layers.0", "layers.1")


def page_bytes() -> SearchStrategy[int]:
    """Sizes of pages: mostly whole frames of 512 bytes, up to eight of them; seldom none."""
    frames = st.integers(1, 8).map(lambda num_frames: num_frames * 512)
    return frames | st.integers(0, 4096)


@st.composite
def traces(
    draw: DrawFn,
    *,
    min_ops: int = 1,
    max_ops: int = 10,
    max_lasting: int = 4,
    max_handed_on: int = 2,
    max_passing: int = 6,
    max_operands: int = 3,
    sizes: SearchStrategy[int] | None = None,
    is_steady: bool = True,
) -> Trace:
    """Traces; see [Note: What a random trace is like].

    Args:
        draw: Hypothesis's.
        min_ops: operations at least; 0 gives empty iterations too.
        max_ops: operations at most.
        max_lasting: pages that live throughout, at most.
        max_handed_on: pairs of pages of which one becomes the other, at most.
        max_passing: pages that are born and die, at most.
        max_operands: operands of an operation, at most.
        sizes: of pages, in bytes; None: `page_bytes`.
        is_steady: whether the end is always like the beginning. Otherwise pages may also stay for
            good, or be there at the beginning and come from nowhere.
    """
    num_ops = draw(st.integers(min_ops, max_ops))
    sizes = page_bytes() if sizes is None else sizes
    pages = _lasting(draw, num_ops, max_lasting, sizes, is_steady)
    if num_ops:
        _add_handed_on(draw, num_ops, max_handed_on, sizes, pages)
        _add_passing(draw, num_ops, max_passing, sizes, is_steady, pages)
    phases = sorted(draw(st.lists(st.sampled_from(Phase), min_size=num_ops, max_size=num_ops)))
    ops = [_op(draw, index, phases[index], pages, max_operands) for index in range(num_ops)]
    launch_ns = draw(st.sampled_from((0, 5000)))
    return Trace(tuple(ops), tuple(pages), _MODULES, launch_ns)


@st.composite
def device_budgets(draw: DrawFn, trace: Trace) -> int:
    """Device budgets that the trace can run in: from its largest operation to all of its pages.

    The smallest come first; the trace needs numpy to be looked at.
    """
    from tvm_pager.planning.traces.trace_index import TraceIndex

    index = TraceIndex(trace)
    least = int(index.named_bytes.max(initial=0)) + trace.overhead_bytes
    return least + 512 * draw(st.integers(0, max(0, index.peak_bytes - least) // 512))


def _lasting(
    draw: DrawFn, num_ops: int, most: int, sizes: SearchStrategy[int], is_steady: bool
) -> list[TracePage]:
    pages: list[TracePage] = []
    for number in range(draw(st.integers(0, most))):
        kind = draw(st.sampled_from(_LASTING))
        name = f"layers.{number % 2}.p{number}" if kind is not PageKind.OPT_STATE else ""
        page = TracePage(
            draw(sizes), kind, draw(st.sampled_from(_DTYPES)), name, None, None, number
        )
        if not is_steady and draw(st.booleans()):
            died = draw(st.none() | st.integers(0, num_ops))
            page = page._replace(died=died, becomes=None)
        pages.append(page)
    return pages


def _add_handed_on(
    draw: DrawFn, num_ops: int, most: int, sizes: SearchStrategy[int], pages: list[TracePage]
) -> None:
    for _ in range(draw(st.integers(0, most))):
        old = len(pages)
        nbytes, died = draw(sizes), draw(st.integers(0, num_ops))
        born = draw(st.integers(0, num_ops - 1))
        pages.append(TracePage(nbytes, PageKind.GRAD, "bfloat16", died=died))
        pages.append(TracePage(nbytes, PageKind.GRAD, "bfloat16", born=born, becomes=old))


def _add_passing(
    draw: DrawFn,
    num_ops: int,
    most: int,
    sizes: SearchStrategy[int],
    is_steady: bool,
    pages: list[TracePage],
) -> None:
    for _ in range(draw(st.integers(0, most))):
        born = draw(st.integers(0, num_ops - 1))
        died: int | None = draw(st.integers(born + 1, num_ops))
        if not is_steady and draw(st.booleans()):
            died = None
        kind = draw(st.sampled_from(_PASSING))
        pages.append(TracePage(draw(sizes), kind, "float32", born=born, died=died))


def _op(
    draw: DrawFn, index: int, phase: Phase, pages: list[TracePage], max_operands: int
) -> TraceOp:
    alive = [
        number
        for number, page in enumerate(pages)
        if (page.born is None or page.born < index) and (page.died is None or page.died > index)
    ]
    reads: list[int] = []
    if alive:
        operands = st.lists(st.sampled_from(alive), unique=True, max_size=max_operands)
        reads = draw(operands)
    writes = [number for number in reads if draw(st.booleans())]
    return TraceOp(
        f"test::op{index % 3}",
        tuple(reads),
        tuple(writes),
        tuple(number for number, page in enumerate(pages) if page.born == index),
        draw(st.sampled_from(_COMPUTE_NS)),
        draw(st.sampled_from((0, 512))),
        phase,
        draw(st.integers(-1, len(_MODULES) - 1)),
        is_replayable=not writes and draw(st.booleans()),
    )
