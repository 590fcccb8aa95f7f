"""What a program does by turns is learned once, planned once, and expected when it is likely."""

from __future__ import annotations

import pytest

from tests.model.programs import Op, Recording, Rig, training
from tests.model.tiny_planner import TinyPlanner
from tests.unit.test_follower import inference, learned, without
from tvm_pager.paging.known_trace import UNKNOWN, KnownTrace


def known_traces(rig: Rig) -> list[KnownTrace]:
    return list(rig.pager.iterations._known)


def planned() -> tuple[Rig, KnownTrace]:
    """A rig that follows the plan of the one trace that it knows."""
    rig = Rig(TinyPlanner, device=90 * 512)
    rig.weights()
    for _ in range(5):
        rig.iterate(training())
    (known,) = known_traces(rig)
    return rig, known


def test_one_other_iteration_after_many_equal_ones_is_not_expected_after_each() -> None:
    rig = learned(inference(), training(grads=False), num_rounds=3)
    first, other = sorted(known_traces(rig), key=lambda known: known.id)
    for _ in range(12):
        first.followed_by(first)
    assert first.successor == first.id
    first.followed_by(other)
    assert first.successor == first.id
    for _ in range(2):
        first.followed_by(other)
    assert first.successor == other.id
    rig.end()


def test_what_nobody_knew_twice_in_a_row_is_worth_a_recording() -> None:
    rig = learned(training(grads=False))
    (known,) = known_traces(rig)
    known.followed_by(None)
    assert known.successor == known.id
    known.followed_by(None)
    assert known.successor == UNKNOWN
    known.followed_by(known)
    assert known.successor == known.id
    rig.end()


def test_a_trace_that_is_gone_is_nobodys_successor() -> None:
    rig = learned(training(grads=False))
    (known,) = known_traces(rig)
    known.forget(known.id)
    assert known.successor is None
    rig.end()


def test_a_recording_of_what_is_known_keeps_trace_and_plan() -> None:
    rig, known = planned()
    book, trace = known.book, known.trace
    assert book is not None
    rig.pager.iterations.record()
    num_before = rig.pager.iterations.outcomes.counts["recorded"]
    for _ in range(4):
        rig.iterate(training())
    assert rig.pager.iterations.outcomes.counts["recorded"] == num_before + 2
    assert known_traces(rig) == [known]
    assert known.book is book
    assert known.trace is trace
    rig.end()


def test_a_recording_of_another_size_brings_another_plan() -> None:
    rig, known = planned()
    book = known.book
    rig.pager.iterations.record()
    for _ in range(4):
        rig.iterate(training(nbytes=2000))
    assert known.book is not book
    assert max(page.nbytes for page in known.trace.pages if page.born is not None) == 2000
    rig.end()


def long_program(num_ops: int = 60) -> list[Op]:
    """Enough operations for a few at the end not to matter."""
    return [Op("forward", (f"w{i % 6}",), (), {f"x{i}": 1000}, (f"x{i}",)) for i in range(num_ops)]


def test_an_iteration_that_ends_a_little_early_was_followed_to_its_end() -> None:
    rig = learned(long_program())
    counts = rig.pager.iterations.outcomes.counts
    before = counts["complete"]
    for _ in range(3):
        rig.iterate(long_program()[:-3])  # 5 % of sixty
        rig.iterate(long_program())
    assert counts["complete"] == before + 6
    assert not counts["left"]
    assert counts["recorded"] == 2
    rig.end()


def test_an_iteration_that_ends_much_earlier_was_not() -> None:
    rig = learned(long_program())
    counts = rig.pager.iterations.outcomes.counts
    rig.iterate(long_program()[:-4])
    assert counts["left"] == 1
    assert counts["recorded"] == 3
    rig.end()


@pytest.mark.parametrize("turns", ["XXX", "AXAX", "AAXX", "AXX", "AAAAAXX"])
def test_what_leaves_a_trace_in_the_same_way_again_and_again_has_one_of_its_own(turns: str) -> None:
    rig = learned(training())
    programs = {"A": training(), "X": without(training(), 3)}
    for turn in (turns * 8)[:40]:
        rig.iterate(programs[turn])
    counts = rig.pager.iterations.outcomes.counts
    assert counts["recorded"] <= 2 + 3  # once more what comes after one that came once
    assert {len(known.names) for known in known_traces(rig)} == set(map(len, programs.values()))
    assert not counts["left"]
    before, resyncs = counts["complete"], counts["resyncs"]
    for turn in turns:
        rig.iterate(programs[turn])
    assert counts["complete"] == before + len(turns)
    assert counts["resyncs"] == resyncs
    rig.end()


def test_what_leaves_a_trace_in_another_way_each_time_has_none() -> None:
    rig = learned(training())
    for layer in (1, 2, 3, 4):
        rig.iterate(without(training(), layer))
    for number in range(8):  # the same layer, and then something new
        program = without(training(), 5)
        program.insert(-2, Op(f"log{number}", ("w0",), (), {"t": 100}, ("t",)))
        rig.iterate(program)
    assert rig.pager.iterations.outcomes.counts["recorded"] == 2
    rig.end()


def test_what_comes_behind_the_end_of_a_trace_makes_no_other_one() -> None:
    rig = learned(training())
    extra = [Op("log", ("w3",), (), {"t": 100}, ("t",))]
    for _ in range(6):
        rig.iterate([*training(), *extra])
    assert rig.pager.iterations.outcomes.counts["recorded"] == 2
    rig.end()


def test_inputs_that_the_program_keeps_do_not_stand_for_the_next_ones() -> None:
    """Scenario: tokens in a list. The first iteration's looked like a page that lives for ever."""
    rig = Rig(Recording)
    rig.weights()
    with rig.pager.lock:
        rig.pager.admit([], 512, "create")
    rig.create("token0", 100)
    for number in range(12):
        ops = [Op("embed", ("w0", f"token{number}"), (), {"a0": 3000})]
        ops += inference()[1:-1]
        ops.append(Op("choose", ("a6",), (), {f"token{number + 1}": 100}, ("a6",)))
        rig.iterate(ops)
        follower = rig.pager.iterations.follower
        if follower is not None:
            assert follower.is_exact
    counts = rig.pager.iterations.outcomes.counts
    assert counts["complete"] == 12 - 3
    assert not counts["resyncs"]
    assert counts["recorded"] == 2
    rig.end()


def test_an_input_that_is_replaced_has_no_number_any_more() -> None:
    rig = Rig(Recording)
    rig.weights()
    read = Op("read", ("w0", "batch"), (), {"a": 1000}, ("a",))
    for number in range(8):
        with rig.pager.lock:
            rig.pager.admit([], 1024, "create")
        rig.create(f"kept{number}", 1000)
        rig.pages["batch"], rig.memory["batch"] = (
            rig.pages[f"kept{number}"],
            rig.memory[f"kept{number}"],
        )
        rig.wanted["batch"] = rig.wanted[f"kept{number}"]
        rig.run(read)
        follower = rig.pager.iterations.follower
        if follower is not None:
            numbers = [follower.number_of(rig.pages[f"kept{i}"].id) for i in range(number + 1)]
            assert numbers[-1] == follower.known.operands[0][1]
            assert numbers[:-1].count(numbers[-1]) == 0
        rig.iterate(long_program(10))
    for names in (rig.pages, rig.memory, rig.wanted):
        del names["batch"]
    assert rig.pager.iterations.outcomes.counts["complete"] >= 4
    rig.end()
