"""What all that record traces have in common: numbers and kinds of pages."""

from __future__ import annotations

import pytest

from tvm_pager.planning import PageKind, Phase, TraceOp, TracePage
from tvm_pager.planning.traces.recorded import in_order_of_mention, with_learned_kinds


def test_numbers_go_by_first_mention_and_the_rest_by_age() -> None:
    ops = [("ba", "c"), ("cca", "d"), ("", "")]
    numbers = in_order_of_mention(ops, "xadb")
    assert numbers == {"b": 0, "a": 1, "c": 2, "d": 3, "x": 4}
    assert list(numbers) == ["b", "a", "c", "d", "x"]


@pytest.mark.parametrize(
    ("page", "maker", "reader", "kind"),
    [
        (TracePage(1, born=0, died=2), Phase.FORWARD, Phase.BACKWARD, PageKind.ACTIVATION),
        (TracePage(1, born=0, died=2), Phase.FORWARD, Phase.FORWARD, PageKind.TEMPORARY),
        (TracePage(1, born=0, died=2), Phase.BACKWARD, Phase.BACKWARD, PageKind.TEMPORARY),
        (TracePage(1, born=0), Phase.FORWARD, Phase.BACKWARD, PageKind.OTHER),
        (TracePage(1, name="mask"), Phase.FORWARD, Phase.BACKWARD, PageKind.BUFFER),
        (TracePage(1, PageKind.PARAM, name="w"), Phase.FORWARD, Phase.BACKWARD, PageKind.PARAM),
    ],
)
def test_kinds_are_learned_where_nothing_is_known(
    page: TracePage, maker: Phase, reader: Phase, kind: PageKind
) -> None:
    creates = () if page.born is None else (0,)
    ops = (TraceOp("make", (), creates=creates, phase=maker), TraceOp("read", (0,), phase=reader))
    (learned,) = with_learned_kinds([page], ops)
    assert learned == page._replace(kind=kind)
