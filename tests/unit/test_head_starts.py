"""How long an idle device waits, so that an operation is launched before it is timed."""

from __future__ import annotations

from tvm_pager.runtime.op_timer import HeadStarts

US = 1_000


def test_an_unknown_operator_gets_more_than_a_launch_takes() -> None:
    assert HeadStarts().ns("aten::add.Tensor") == 50 * US


def test_an_operator_gets_more_than_its_longest_call_of_late() -> None:
    starts = HeadStarts()
    for called_ns in (100 * US, 300 * US, 40 * US):
        starts.called("aten::mm.default", called_ns)
    assert 300 * US < starts.ns("aten::mm.default") < 600 * US
    assert starts.ns("aten::add.Tensor") == 50 * US


def test_one_long_call_is_forgotten_and_costs_no_more_than_a_millisecond() -> None:
    starts = HeadStarts()
    starts.called("aten::mm.default", 10**9)  # which compiled a kernel
    assert starts.ns("aten::mm.default") == 1_000 * US
    for _ in range(40):
        starts.called("aten::mm.default", 20 * US)
    assert starts.ns("aten::mm.default") == 50 * US
