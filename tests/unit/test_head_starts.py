"""How long an idle device waits, so that an operation is launched before it is timed."""

from __future__ import annotations

from tvm_pager.runtime.op_timer import HeadStarts

US = 1_000


def test_an_unknown_operator_gets_more_than_a_launch_takes() -> None:
    assert HeadStarts().ns("aten::add.Tensor") == 50 * US


def test_an_operator_gets_more_than_its_calls_take() -> None:
    starts = HeadStarts()
    for called_ns in (200 * US, 300 * US, 250 * US):
        starts.called("aten::mm.default", called_ns)
    assert 300 * US < starts.ns("aten::mm.default") < 450 * US
    assert starts.ns("aten::add.Tensor") == 50 * US


def test_one_long_call_is_forgotten_and_costs_no_more_than_a_millisecond() -> None:
    starts = HeadStarts()
    starts.called("aten::mm.default", 10**9)  # which compiled a kernel
    assert starts.ns("aten::mm.default") == 1_000 * US
    for _ in range(20):
        starts.called("aten::mm.default", 20 * US)
    assert starts.ns("aten::mm.default") == 50 * US


def test_a_long_call_among_short_ones_changes_little() -> None:
    """A lane's thread had the interpreter, say."""
    starts = HeadStarts()
    for called_ns in (*[30 * US] * 9, 200 * US):
        starts.called("aten::add.Tensor", called_ns)
    assert starts.ns("aten::add.Tensor") < 120 * US
