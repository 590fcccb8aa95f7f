"""The index of a trace says what walking through the trace, iteration by iteration, would say."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pager.memory import PageKind
from tvm_pager.planning import Trace, TraceOp, TracePage
from tvm_pager.planning.traces.trace_index import ALWAYS, NEVER, TraceIndex
from tvm_pager.testing.strategies import device_budgets, traces

MANY = traces(min_ops=0, is_steady=False)


def named(op: TraceOp) -> list[int]:
    return [*op.reads, *op.creates]


def walk_forward(trace: Trace, page: int, moment: int) -> int:
    """The next use, by going from operation to operation and over boundaries."""
    number: int | None = page
    for iteration in range(len(trace.pages) + 2):
        for index, op in enumerate(trace.ops):
            if (iteration or index >= moment) and number in named(op):
                return iteration * len(trace.ops) + index
        if number is None or trace.pages[number].died is not None:
            return NEVER
        number = trace.pages[number].becomes
    return NEVER


def walk_back(trace: Trace, page: int, moment: int) -> int:
    """The use before, likewise."""
    number: int | None = page
    for iteration in range(len(trace.pages) + 2):
        for index, op in reversed(list(enumerate(trace.ops))):
            if (iteration or index < moment) and number in named(op):
                return index - iteration * len(trace.ops)
        if number is None or trace.pages[number].born is not None:
            return ALWAYS
        here = number
        number = next((n for n, p in enumerate(trace.pages) if p.becomes == here), None)
    return ALWAYS


@given(MANY)
def test_uses_and_their_neighbours_are_those_of_a_walk(trace: Trace) -> None:
    index = TraceIndex(trace)
    expected = [(i, page) for i, op in enumerate(trace.ops) for page in named(op)]
    assert list(zip(index.use_op.tolist(), index.use_page.tolist(), strict=True)) == expected
    for use, (op, page) in enumerate(expected):
        assert index.next_use[use] == walk_forward(trace, page, op + 1)
        assert index.previous_use[use] == walk_back(trace, page, op)
        changed = page in trace.ops[op].writes or page in trace.ops[op].creates
        assert index.use_writes[use] == changed
    for page in range(len(trace.pages)):
        assert index.uses(page).tolist() == [op for op, used in expected if used == page]
        for moment in range(len(trace.ops) + 1):
            assert index.next_use_from(page, moment) == walk_forward(trace, page, moment)
            assert index.last_use_before(page, moment) == walk_back(trace, page, moment)


@given(MANY)
def test_a_page_is_dirty_after_a_write_since_its_copy_was_made(trace: Trace) -> None:
    index = TraceIndex(trace)
    for page in range(len(trace.pages)):
        changes = [i for i, op in enumerate(trace.ops) if page in op.writes or page in op.creates]
        for written_back in range(len(trace.ops) + 1):
            for moment in range(written_back, len(trace.ops) + 1):
                expected = any(written_back <= change < moment for change in changes)
                assert index.is_dirty(page, written_back, moment) == expected
    for use, (op, page) in enumerate(zip(index.use_op, index.use_page, strict=True)):
        assert index.use_is_dirty[use] == index.is_dirty(int(page), 0, int(op) + 1)


@given(MANY)
def test_occupancy_counts_what_is_alive_when_each_operation_runs(trace: Trace) -> None:
    index = TraceIndex(trace)
    num_ops = len(trace.ops)
    for moment in range(num_ops + 1):
        alive = [
            page.frame_bytes
            for page in trace.pages
            if (page.born is None or page.born < moment)
            and (page.died is None or page.died > moment)
        ]
        assert index.alive_bytes[moment] == sum(alive)
    for i, op in enumerate(trace.ops):
        created = sum(trace.pages[page].frame_bytes for page in op.creates)
        operands = sum(trace.pages[page].frame_bytes for page in op.reads)
        assert index.created_bytes[i] == created
        assert index.named_bytes[i] == operands + created + op.workspace_bytes
        assert index.resident_bytes[i] == index.alive_bytes[i] + created + op.workspace_bytes
    everything = [*index.resident_bytes.tolist(), *index.alive_bytes.tolist()]
    assert index.peak_bytes == max(everything) + trace.overhead_bytes


@given(MANY)
def test_reuse_bytes_are_the_distinct_pages_used_in_between(trace: Trace) -> None:
    index = TraceIndex(trace)
    # Two iterations under names that hold in both: what becomes a page has that page's number.
    first = [
        ("next", page.becomes) if page.becomes is not None else ("old", number)
        for number, page in enumerate(trace.pages)
    ]
    uses = [first[page] for page in index.use_page]
    uses += [("next", int(page)) for page in index.use_page]
    nbytes = index.frame_bytes[index.use_page].tolist() * 2
    for use in range(len(index.use_page)):
        place = use + len(index.use_page)
        between: dict[object, int] = {}
        before = place - 1
        while before >= 0 and uses[before] != uses[place]:
            between[uses[before]] = nbytes[before]
            before -= 1
        expected = sum(between.values()) if before >= 0 else -1
        assert index.use_reuse_bytes[use] == expected


def test_a_gradient_is_used_next_where_the_next_iteration_frees_it() -> None:
    """Made by operation 1, it is page 1 of the next iteration, whose operation 0 reads it."""
    trace = Trace(
        ops=(TraceOp("clear", (1,)), TraceOp("make", (0,), (), (2,)), TraceOp("update", (0,))),
        pages=(
            TracePage(512, PageKind.PARAM, becomes=0),
            TracePage(512, PageKind.GRAD, died=1),
            TracePage(512, PageKind.GRAD, born=1, becomes=1),
        ),
    )
    index = TraceIndex(trace)
    assert index.next_use_from(2, 2) == 3
    assert index.last_use_before(1, 0) == -2
    assert index.next_use_from(1, 1) == NEVER
    assert index.comes_from.tolist() == [0, 2, -1]


@given(st.data())
def test_budgets_lie_between_the_largest_operation_and_the_peak(data: st.DataObject) -> None:
    trace = data.draw(traces())
    budget = data.draw(device_budgets(trace))
    index = TraceIndex(trace)
    assert max(index.named_bytes) <= budget <= max(index.peak_bytes, max(index.named_bytes))


@pytest.mark.bench
def test_thirty_thousand_operations_are_indexed_in_less_than_a_second() -> None:
    num_layers, per_layer = 1000, 30
    ops, pages = [], [TracePage(512, PageKind.PARAM, becomes=n) for n in range(num_layers)]
    for i in range(num_layers * per_layer):
        before = (len(pages) - 1,) if i % per_layer else ()
        ops.append(TraceOp("op", (i // per_layer, *before), (), (len(pages),)))
        pages.append(TracePage(1024, PageKind.TEMPORARY, born=i, died=min(i + 2, 30_000)))
    trace = Trace(tuple(ops), tuple(pages))

    def seconds() -> float:
        started_s = time.process_time()
        index = TraceIndex(trace)
        assert index.peak_bytes == num_layers * 512 + 2 * 1024
        assert len(index.use_is_dirty) == len(index.use_reuse_bytes)
        return time.process_time() - started_s

    assert min(seconds() for _ in range(3)) < 0.9, "0.15 s on an idle core; more on a shared one"
