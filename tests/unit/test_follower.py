"""Following a recorded trace: what fits, what is passed over, what is another trace."""

from __future__ import annotations

import math
import random
from typing import Any

from tests.model.programs import Op, Recording, Rig, training
from tests.model.tiny_planner import TinyPlanner
from tvm_pager.memory import PageKind


def learned(*programs: list[Op], num_rounds: int = 3) -> Rig:
    """A rig that knows these programs, which have come one after the other."""
    rig = Rig(Recording)
    rig.weights()
    rig.iterate(programs[0])
    for _ in range(num_rounds):
        for program in programs:
            rig.iterate(program)
    return rig


def inference(num_layers: int = 6) -> list[Op]:
    ops = [Op("input", (), (), {"a0": 3000})]
    ops += [
        Op("forward", (f"w{i}", f"a{i}"), (), {f"a{i + 1}": 3000}, (f"a{i}",))
        for i in range(num_layers)
    ]
    ops.append(Op("logits", (f"a{num_layers}",), (), {"out": 100}, (f"a{num_layers}", "out")))
    return ops


def without(program: list[Op], layer: int) -> list[Op]:
    """The program with one layer skipped: the next one takes what that one was given."""
    ops = []
    for op in program:
        mine = {f"w{layer}", f"s{layer}"} & set(op.reads)
        if mine:
            continue
        names = {f"a{layer + 1}": f"a{layer}", f"d{layer}": f"d{layer + 1}"}
        frees = tuple(dict.fromkeys(names.get(name, name) for name in op.frees))
        reads = tuple(names.get(name, name) for name in op.reads)
        if op.name == "backward" and f"w{layer - 1}" in op.reads:
            frees = (*(name for name in frees if name != f"a{layer}"), f"a{layer}")
        ops.append(Op(op.name, reads, op.writes, op.creates, frees))
    return ops


def test_a_program_that_repeats_is_followed_from_its_fourth_iteration_on() -> None:
    rig = learned(training(), num_rounds=2)
    for _ in range(5):
        assert rig.pager.iterations.follower is not None
        rig.iterate(training())
    counts = rig.pager.iterations.outcomes.counts
    assert counts["complete"] == 5
    assert counts["recorded"] == 2
    assert not counts["left"]
    rig.end()


def test_each_page_has_its_number_also_when_sizes_differ() -> None:
    rig = learned(training())
    for nbytes in (1000, 2000, 2900):
        follower = rig.pager.iterations.follower
        assert follower is not None
        for op in training(nbytes=nbytes):
            index = follower.index
            names = dict(rig.pages)
            rig.run(op)
            assert follower.index == index + 1
            numbers = tuple(follower.number_of(names[name].id) for name in op.reads)
            assert numbers == follower.known.operands[index]
        assert follower.is_exact
        rig.boundary()
    rig.end()


def test_a_dead_page_is_not_kept_until_the_iteration_ends() -> None:
    rig = learned(training())
    follower = rig.pager.iterations.follower
    assert follower is not None
    num_dead = 0
    for op in training():
        dying = [rig.pages[name] for name in op.reads if name in op.frees]
        numbers = [follower.number_of(page.id) for page in dying]
        rig.run(op)
        with rig.pager.lock:
            rig.pager.drain()
        for page, number in zip(dying, numbers, strict=True):
            assert number is not None
            assert page not in follower.pages
            assert follower.pages[number] is None
            num_dead += 1
    assert num_dead > 5
    assert follower.is_exact
    rig.boundary()
    rig.end()


def test_a_trace_is_recorded_anew_once_the_program_has_grown() -> None:
    rig = learned(training(nbytes=1000))
    before = rig.pager.iterations.outcomes.counts["recorded"]
    for _ in range(3):
        rig.iterate(training(nbytes=2000))
    assert rig.pager.iterations.outcomes.counts["recorded"] == before + 1
    trace = rig.pager.iterations.latest
    assert trace is not None
    assert trace.pages[trace.ops[1].creates[0]].nbytes == 2000
    rig.end()


def test_a_trace_that_is_recorded_anew_moves_nothing_by_its_old_plan() -> None:
    """Scenario: what only looks on while a trace is recorded jumped, and began its plan."""
    rig = Rig(TinyPlanner, device=90 * 512)
    rig.weights()
    for nbytes in (1500, 1500, 1500, 1500, 2500):
        rig.iterate(training(nbytes=nbytes))
    assert rig.pager.recorder is not None
    for op in without(training(nbytes=2500), 3):
        rig.run(op)
        assert not rig.pager.iterations.is_planned
        assert not rig.pager.iterations.runner.leaving
        assert not rig.pager.iterations.runner.waiting
    rig.boundary()
    rig.iterate(training(nbytes=2500))
    rig.end()


def test_two_programs_that_alternate_have_a_trace_each() -> None:
    other = [Op("other", ("w1", "w2"), ("w2",), {"x": 2000}), *training(4, grads=False)[1:]]
    other.append(Op("end", ("x",), (), {}, ("x",)))
    rig = learned(training(grads=False), other, num_rounds=3)
    counts = rig.pager.iterations.outcomes.counts
    before = counts["complete"]
    for _ in range(3):
        rig.iterate(training(grads=False))
        rig.iterate(other)
    assert counts["complete"] == before + 6
    assert not counts["taken over"]  # each is expected after the other
    rig.end()


def test_where_another_trace_has_the_same_beginning_it_is_taken_over() -> None:
    short = [*training(grads=False)[:5], Op("early", ("a3",), (), {}, ("a0", "a1", "a2", "a3"))]
    rig = learned(training(grads=False), short, num_rounds=3)
    counts = rig.pager.iterations.outcomes.counts
    before = counts["complete"]
    random.seed(1)
    for _ in range(10):
        rig.iterate(random.choice([training(grads=False), short]))
    assert counts["complete"] == before + 10
    assert counts["taken over"] > 0
    assert counts["recorded"] == 4
    rig.end()


def test_skipped_layers_are_passed_over() -> None:
    rig = learned(training())
    counts = rig.pager.iterations.outcomes.counts
    for layer in (2, 4, 3, 1):
        rig.iterate(without(training(), layer))
        rig.iterate(training())
    assert not counts["left"]
    assert counts["resyncs"] >= 8
    assert counts["recorded"] == 2
    rig.end()


def test_inserted_operations_are_passed_over() -> None:
    rig = learned(training())
    counts = rig.pager.iterations.outcomes.counts
    for place in (0, 3, 9, len(training())):
        program = training()
        extra = [
            Op("log", ("w3",), (), {"t": 100}, ("t",)),
            Op("print", ("w3", "w5"), (), {"u": 100}, ("u",)),
        ]
        program[place:place] = extra
        rig.iterate(program)
    assert not counts["left"]
    assert counts["complete"] >= 4
    assert counts["recorded"] == 2
    rig.end()


def test_another_model_of_the_same_structure_is_not_followed_as_this_one() -> None:
    rig = learned(inference())
    for i in range(6):
        with rig.pager.lock:
            rig.pager.admit([], 3072, "create")
        rig.create(f"v{i}", 3000, PageKind.PARAM)
    others = [
        Op(op.name, tuple(n.replace("w", "v") for n in op.reads), (), op.creates, op.frees)
        for op in inference()
    ]
    counts = rig.pager.iterations.outcomes.counts
    for _ in range(4):
        rig.iterate(others)
    before = counts["complete"]
    for _ in range(3):
        rig.iterate(others)
        rig.iterate(inference())
    assert counts["complete"] == before + 6
    rig.end()


def test_an_iteration_that_left_its_trace_is_recorded_whole() -> None:
    rig = learned(training())
    longer = training()[:5]
    longer += [Op(f"other{i}", ("w5",), ("w5",), {f"x{i}": 512}, (f"x{i - 3}",)) for i in range(60)]
    longer.append(Op("end", (), (), {}, tuple(rig.pages)))
    rig.iterate(longer)
    trace = rig.pager.iterations.latest
    assert trace is not None
    assert [op.name for op in trace.ops] == [op.name for op in longer]
    assert [len(op.reads) for op in trace.ops] == [len(op.reads) for op in longer]
    assert [len(op.writes) for op in trace.ops] == [len(op.writes) for op in longer]
    rig.end()


def test_a_program_that_never_repeats_is_recorded_ever_less_often() -> None:
    rig = Rig(Recording)
    rig.weights()
    for number in range(60):
        ops = [Op(f"op{number}.{i}", (f"w{i}",), (f"w{i}",), {"t": 3000}, ("t",)) for i in range(6)]
        rig.iterate(ops)
    assert rig.pager.iterations.outcomes.counts["recorded"] <= 10
    assert rig.pager.iterations.outcomes.counts["recorded"] >= 5
    rig.end()


def test_at_most_sixteen_traces_are_kept() -> None:
    rig = Rig(Recording)
    rig.weights()
    for number in range(20):
        ops = [Op(f"op{number}.{i}", (f"w{i}",), (), {"t": 3000}, ("t",)) for i in range(6)]
        for _ in range(12):
            rig.iterate(ops)
    assert len(list(rig.pager.iterations._known)) <= 16
    rig.end()


def test_one_line_at_the_end_says_what_became_of_the_iterations() -> None:
    rig = learned(training())
    for layer in (2, 3, 4):
        rig.iterate(without(training(), layer))
    rig.end()
    lines = [text for text in rig.notices if text.startswith("plans: ")]
    assert len(lines) == 1
    assert "iterations followed to the end, 1 traces" in lines[0]


def test_next_use_counts_operations_also_past_the_end() -> None:
    rig = learned(training())
    program = training()
    for index, op in enumerate(program):
        rig.run(op)
        for name, page in rig.pages.items():
            distance = rig.pager.view.next_use(page.id)
            coming = [
                i + 1
                for i, other in enumerate((program + program)[index + 1 :])
                if name in other.reads or name in other.frees or name in other.creates
            ]
            first = (program + program)[index + coming[0]] if coming else None
            if first is None or name in first.creates or name not in first.reads:
                assert distance == math.inf, (name, index)
            else:
                assert distance == coming[0], (name, index)
    rig.end()


def test_nobody_knows_the_next_use_where_nothing_is_followed() -> None:
    rig: Any = Rig()
    rig.weights()
    assert rig.pager.view.next_use(rig.pages["w0"].id) is None
    rig.end()
