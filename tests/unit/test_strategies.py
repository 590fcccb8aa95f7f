"""The random traces of the test kit: all of them possible, and between them everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tvm_pager.memory import PageKind
from tvm_pager.testing.machines import example_profile
from tvm_pager.testing.strategies import page_bytes, traces

if TYPE_CHECKING:
    from tvm_pager.planning import Trace

FIRST = settings(phases=[Phase.generate], max_examples=200, deadline=None)  # and no shrinking


@given(traces())
def test_a_steady_trace_ends_as_it_begins(trace: Trace) -> None:
    beginning = [number for number, page in enumerate(trace.pages) if page.born is None]
    at_end = [page for page in trace.pages if page.died is None]
    becomes = [page.becomes for page in at_end]
    assert None not in becomes
    assert sorted(number for number in becomes if number is not None) == beginning
    for page in at_end:
        assert page.becomes is not None
        following = trace.pages[page.becomes]
        assert (following.nbytes, following.kind) == (page.nbytes, page.kind)


@given(traces(max_ops=3, max_lasting=1, max_handed_on=0, max_passing=2, max_operands=1))
def test_limits_are_kept(trace: Trace) -> None:
    assert 1 <= len(trace.ops) <= 3
    assert len(trace.pages) <= 3
    assert all(len(op.reads) <= 1 for op in trace.ops)
    assert not any(page.kind is PageKind.GRAD for page in trace.pages)


@given(traces(sizes=st.just(7)))
def test_sizes_can_be_given(trace: Trace) -> None:
    assert {page.nbytes for page in trace.pages} <= {7}


@pytest.mark.parametrize(
    "condition",
    [
        lambda t: any(op.writes for op in t.ops),
        lambda t: any(op.is_replayable and op.creates for op in t.ops),
        lambda t: any(op.workspace_bytes for op in t.ops),
        lambda t: any(len(op.creates) > 1 for op in t.ops),
        lambda t: any(page.died == 0 for page in t.pages),
        lambda t: any(page.died == len(t.ops) for page in t.pages),
        lambda t: any(page.nbytes % 512 for page in t.pages),
        lambda t: any(page.becomes not in {None, n} for n, page in enumerate(t.pages)),
        lambda t: len({op.phase for op in t.ops}) > 2,
    ],
)
def test_each_feature_is_met_soon(condition: Callable[[Trace], bool]) -> None:
    assert condition(find(traces(), condition, settings=FIRST))


def test_what_is_not_steady_can_pile_up_and_vanish() -> None:
    unsteady = traces(is_steady=False)
    find(
        unsteady,
        lambda t: any(p.died is None and p.becomes is None for p in t.pages),
        settings=FIRST,
    )
    find(
        unsteady,
        lambda t: any(p.born is None and p.died is not None for p in t.pages),
        settings=FIRST,
    )


def test_the_smallest_example_is_one_operation_without_pages() -> None:
    smallest = find(traces(), lambda _: True)
    assert (len(smallest.ops), len(smallest.pages)) == (1, 0)
    assert find(page_bytes(), lambda _: True) == 512


def test_the_example_machine_moves_bytes_as_fast_as_it_says() -> None:
    profile = example_profile(link_gb_per_s=10, duplex_gb_per_s=5, latency_s=0)
    assert profile.h2d.seconds(10**9) == pytest.approx(0.1)
    assert profile.d2h.seconds(10**9, is_duplex=True) == pytest.approx(0.2)
