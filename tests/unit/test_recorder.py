"""Recording an iteration: numbers, births, deaths, what pages become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.model.programs import Op, Recording, Rig, training
from tvm_pager.paging.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.planning import Trace


def recorded(num: int = 4, **options: int) -> tuple[Rig, Trace]:
    rig = Rig(Recording)
    rig.weights()
    for _ in range(num):
        rig.iterate(training(**options))
    trace = rig.pager.iterations.latest
    assert trace is not None
    return rig, trace


def test_nothing_is_recorded_while_everything_fits() -> None:
    rig = Rig(Recording, device=1 << 20)
    rig.weights()
    for _ in range(4):
        rig.iterate(training())
        assert rig.pager.watch is None
    assert rig.pager.iterations.latest is None
    rig.end()


def test_an_iteration_is_recorded_on_request_though_everything_fits() -> None:
    rig = Rig(device=1 << 20)
    rig.weights()
    rig.iterate(training())
    rig.pager.iterations.record()
    for _ in range(3):
        rig.iterate(training())
    trace = rig.pager.iterations.latest
    assert trace is not None
    assert [op.name for op in trace.ops] == [op.name for op in training()]
    assert rig.pager.watch is None
    rig.end()


def test_operations_pages_births_and_deaths_are_those_of_the_program() -> None:
    rig, trace = recorded()
    program = training()
    assert [op.name for op in trace.ops] == [op.name for op in program]
    for op, wanted in zip(trace.ops, program, strict=True):
        assert len(op.reads) == len(wanted.reads)
        assert len(op.writes) == len(wanted.writes)
        assert [trace.pages[n].nbytes for n in op.creates] == list(wanted.creates.values())
        assert op.compute_ns == 1000
    names = {op.name: i for i, op in enumerate(program)}
    last_backward = names["backward"]
    for number in trace.ops[2].creates:  # a1 dies after the last backward
        assert trace.pages[number].died == last_backward + 1
    rig.end()


def test_numbers_go_by_first_mention_and_are_the_same_each_time() -> None:
    rig, trace = recorded()
    rig.pager.iterations.record()
    rig.iterate(training())
    rig.iterate(training())
    again = rig.pager.iterations.latest
    assert again is not None
    assert [op[:4] for op in again.ops] == [op[:4] for op in trace.ops]
    mentioned = [n for op in trace.ops for n in (*op.reads, *op.creates)]
    assert list(dict.fromkeys(mentioned)) == list(range(len(set(mentioned))))
    rig.end()


def test_what_lives_on_becomes_itself_and_a_gradient_becomes_the_one_that_is_freed() -> None:
    rig, trace = recorded()
    update = next(i for i, op in enumerate(trace.ops) if op.name == "update")
    weight, grad, state = trace.ops[update].reads
    assert trace.pages[weight].becomes == weight
    assert trace.pages[state].becomes == state
    assert trace.pages[grad].born is not None
    assert trace.pages[grad].died is None
    old = trace.pages[grad].becomes
    assert old is not None
    assert trace.pages[old].born is None
    assert trace.pages[old].died == 1  # after the first operation
    assert len({page.becomes for page in trace.pages if page.becomes is not None}) == sum(
        page.becomes is not None for page in trace.pages
    )
    rig.end()


def test_what_is_born_between_operations_counts_as_created_by_the_first() -> None:
    rig = Rig(Recording)
    rig.weights()
    program = training()

    def iterate() -> None:
        for index, op in enumerate(program):
            rig.run(op)
            if index == 3:
                with rig.pager.lock:
                    rig.pager.admit([], 512, "outside")
                rig.create("outside", 100)
            if index == 5:
                rig.free("outside")
        rig.boundary()

    for _ in range(4):
        iterate()
    trace = rig.pager.iterations.latest
    assert trace is not None
    outside = trace.ops[3].creates[-1]
    assert trace.pages[outside].nbytes == 100
    assert trace.pages[outside].died == 6
    rig.end()


def test_a_page_that_dies_within_its_operation_has_a_number_too() -> None:
    rig = Rig(Recording)
    rig.weights()
    program = training()
    program.insert(4, Op("scratch", ("w0",), (), {"t": 700, "u": 100}, ("t", "u")))
    for _ in range(4):
        rig.iterate(program)
    trace = rig.pager.iterations.latest
    assert trace is not None
    first, second = trace.ops[4].creates
    assert [trace.pages[first].nbytes, trace.pages[second].nbytes] == [700, 100]
    assert trace.pages[first].died == trace.pages[second].died == 5
    rig.end()


@pytest.mark.parametrize(("compute_ns", "launch_ns"), [(10, 35), (lambda: 10, 45)])
def test_a_launch_takes_neither_the_recording_nor_what_runs_meanwhile(
    compute_ns: int | Callable[[], int], launch_ns: int
) -> None:
    """A device that runs beside the host is asked for its time later."""
    times = iter((10, 15, 110, 115))
    recorder = Recorder(Rig().pager.table, lambda: next(times), {})
    first = recorder.begin("first", [])  # which takes 5 to write down
    first.excess_ns += 20  # and more than that
    first.compute_ns = compute_ns
    recorder.waited(30)
    recorder.begin("second", [])
    assert recorder.finish().trace.launch_ns == launch_ns


def test_activations_and_temporaries_are_told_by_their_lives() -> None:
    rig, trace = recorded()
    kinds = {trace.pages[n].kind.value for op in trace.ops for n in op.creates}
    assert "temporary" in kinds
    rig.end()
