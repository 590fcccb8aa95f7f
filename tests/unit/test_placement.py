"""From absences to actions: what moves, in which order, and which absences there are."""

from __future__ import annotations

import pytest

from tests.unit.small_traces import ENDLESS, Program
from tvm_pager.planning import Evict, Fetch, Limits, PageKind, Trace, TraceOp, TracePage
from tvm_pager.planning.hardware.lane_times import LaneTimes
from tvm_pager.planning.rules.absences import Absence, absences
from tvm_pager.planning.rules.placement import Moves, place
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.testing.machines import example_profile

BIG = (64 << 20) // 512  # units of a page that takes about 1.5 ms each way, both at once
BYTES = BIG * 512
MS = 1_000_000
HARDWARE = example_profile()
LIMITS = Limits(ENDLESS, ENDLESS)


def waits(*uses: str, ns: int = 10 * MS) -> Trace:
    """A weight that some of the operations read ("r") or write ("w")."""
    program = Program()
    program.page("page", BIG)
    for use in uses:
        program.op("page" if use == "r" else "", writes="page" if use == "w" else "", ns=ns)
    return program.build()


def placed(trace: Trace, limits: Limits = LIMITS) -> Moves:
    index = TraceIndex(trace)
    return place(index, HARDWARE, limits, absences(index))


@pytest.mark.parametrize(
    ("uses", "num_in", "num_out"),
    [
        ("r....", 1, 0),  # written back in an iteration long ago
        ("w....", 1, 1),
        ("w....r....", 2, 1),  # clean the second time
        ("r....w....", 2, 1),
        ("w....w....", 2, 2),
        ("w....r....r....", 3, 1),
    ],
)
def test_what_was_not_written_since_moves_nothing_out(uses: str, num_in: int, num_out: int) -> None:
    moves = placed(waits(*uses))
    assert moves.prediction.lane_bytes.get("h2d", 0) == num_in * BYTES
    assert moves.prediction.lane_bytes.get("d2h", 0) == num_out * BYTES


def two_needs() -> Trace:
    """Two pages that are needed by one operation, the ninth of ten of 1 ms."""
    program = Program()
    for name in "xy":
        program.page(name, BIG)
    program.op("x y", ns=MS)
    for _ in range(7):
        program.op(ns=MS)
    program.op("x y", ns=MS)
    program.op(ns=MS)
    return program.build()


def test_fetches_follow_each_other_backwards_from_their_needs() -> None:
    moves = placed(two_needs())
    first, second = sorted(action.earliest for action in moves.actions if isinstance(action, Fetch))
    took = LaneTimes(HARDWARE, LIMITS).in_ns(BYTES, None)
    assert second * MS <= 8 * MS - took
    assert first * MS <= 8 * MS - 2 * took
    assert first >= 4, "no earlier than need be"


def test_an_absence_of_which_nothing_is_left_is_none() -> None:
    """`x` would have to be fetched before it has left; so `x` stays, and is dirty later."""
    program = Program()
    program.page("x", BIG)
    program.op(writes="x", ns=MS // 1000)
    program.op(ns=MS // 1000)
    program.op("x", ns=MS // 1000)
    for _ in range(10):
        program.op(ns=10 * MS)
    moves = placed(program.build())
    evictions = [action for action in moves.actions if isinstance(action, Evict)]
    assert [action.earliest for action in evictions] == [3]
    assert moves.prediction.lane_bytes == {"d2h": BYTES, "h2d": BYTES}


def test_fetches_wait_for_room_up_to_their_need() -> None:
    program = Program()
    program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=10 * MS)
    program.op(ns=10 * MS)
    program.op(creates={"b": (BIG, PageKind.ACTIVATION)}, ns=10 * MS)
    program.op("b", ns=MS // 10)
    program.free("b")
    program.op("a", ns=10 * MS)
    program.free("a")
    (fetch,) = (
        a
        for a in placed(program.build(), Limits(BYTES, ENDLESS)).actions
        if a[0] == 0 and isinstance(a, Fetch)
    )
    assert (fetch.earliest, fetch.deadline) == (4, 4)


def test_memory_is_given_up_where_the_next_operation_wants_it() -> None:
    """Else where the copy ends, which no operation waits for."""
    for size, deadline in ((BIG, 1), (BIG // 4, 9)):
        program = Program()
        program.op(creates={"a": (BIG, PageKind.ACTIVATION)}, ns=MS // 5)
        program.op(creates={"b": (size, PageKind.ACTIVATION)}, ns=MS // 5)
        for _ in range(40):
            program.op("b", ns=MS // 5)
        program.free("b")
        program.op("a", ns=MS // 5)
        program.free("a")
        moves = placed(program.build(), Limits(BYTES * 5 // 4, ENDLESS))
        evict = next(action for action in moves.actions if isinstance(action, Evict))
        assert (evict.page, evict.earliest) == (0, 1)
        assert evict.deadline == deadline


def test_absences_lie_between_uses_at_most_an_iteration_apart() -> None:
    """Page 1 is made in each iteration and used in the one after the next, as page 3."""
    ops = (
        TraceOp("use", (0, 3)),
        TraceOp("make", (), creates=(1,)),
        TraceOp("use", (0,)),
    )
    pages = (
        TracePage(4096, PageKind.PARAM, becomes=0),
        TracePage(4096, PageKind.GRAD, born=1, becomes=2),
        TracePage(4096, PageKind.GRAD, becomes=3),
        TracePage(4096, PageKind.GRAD, died=1),
    )
    index = TraceIndex(Trace(ops, pages))
    assert absences(index) == [Absence(0, 0, 2, is_dirty=False)]
