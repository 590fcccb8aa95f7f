"""What all that record traces have in common: how pages are numbered, and what they are. Pure.

[Note: Numbering]
    Numbers go by first mention: operation by operation, its operands in order, then what it
    creates. So two iterations in which a program does the same have the same numbers, and the same
    first operations have the same numbers whatever follows. Pages that no operation mentions come
    last, in the order of their birth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tvm_pager.memory import PageKind
from tvm_pager.planning.traces.trace import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tvm_pager.planning.traces.trace import TraceOp, TracePage

__all__ = ["in_order_of_mention", "with_learned_kinds"]

T = TypeVar("T")


def in_order_of_mention(
    ops: Iterable[tuple[Sequence[T], Sequence[T]]], others: Iterable[T]
) -> dict[T, int]:
    """Gives all pages their numbers; see [Note: Numbering].

    Args:
        ops: operands of each operation, as often as they are named, and what it creates.
        others: more pages, the older ones first; those that are mentioned keep their places.
    """
    mentioned = dict.fromkeys(page for pages in ops for some in pages for page in some)
    return {page: number for number, page in enumerate(mentioned | dict.fromkeys(others))}


def with_learned_kinds(pages: Iterable[TracePage], ops: Sequence[TraceOp]) -> tuple[TracePage, ...]:
    """The pages, with a kind where nothing was known of them.

    What has a name is a buffer. Of what is born and dies in the iteration, an activation is what
    backward reads of the forward pass; the rest is temporary.
    """
    in_backward = {page for op in ops if op.phase is Phase.BACKWARD for page in op.reads}

    def kind(number: int, page: TracePage) -> PageKind:
        if page.kind is not PageKind.OTHER:
            return page.kind
        if page.name:
            return PageKind.BUFFER
        if page.born is None or page.died is None:
            return PageKind.OTHER
        is_saved = ops[page.born].phase is Phase.FORWARD and number in in_backward
        return PageKind.ACTIVATION if is_saved else PageKind.TEMPORARY

    return tuple(page._replace(kind=kind(number, page)) for number, page in enumerate(pages))
