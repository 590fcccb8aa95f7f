"""Which pages can be computed again, by which chain, and what forbids it."""

from __future__ import annotations

from tests.unit.small_traces import Program
from tvm_pager.planning import PageKind
from tvm_pager.planning.rules.replays import MAX_CHAIN, Replays

ACT = PageKind.ACTIVATION


def made(size: int = 1) -> tuple[int, PageKind]:
    return size, ACT


def test_a_dead_operand_is_computed_again_and_a_living_one_is_read() -> None:
    program = Program()
    program.page("w", 1)
    program.op("w", {"a": made(4)}, ns=10)
    program.op("a w", {"b": made(2)}, ns=20)
    program.free("a")
    program.op("b", {"c": made(1)}, ns=40)
    program.op("b c")
    replays, number = Replays(program.build()), program.numbers
    replay = replays.of(number["b"], 3)
    assert replay is not None
    assert replay.ops == (0, 1)
    assert replay.compute_ns == 30
    assert replay.sources == (number["w"],)
    assert replay.new_bytes == 6 * 512
    # `c` needs `b`, which is alive; unless it is lost too.
    assert replays.of(number["c"], 3) == ((2,), 40, (number["b"],), 512)
    again = replays.of(number["c"], 3, {number["b"]})
    assert again is not None
    assert again.ops == (0, 1, 2)


def test_bytes_that_were_changed_cannot_be_had_again() -> None:
    program = Program()
    program.page("w", 1)
    program.op("w", {"a": made(), "b": made()})
    program.op("a", {"c": made()})
    program.op(writes="a")
    program.op(writes="w")
    program.op("a b c")
    replays, number = Replays(program.build()), program.numbers
    assert replays.of(number["a"], 4) is None  # written since its birth
    assert replays.of(number["b"], 4) is None  # its weight was updated
    assert replays.of(number["b"], 3) is not None
    assert replays.of(number["c"], 2) is not None
    assert replays.of(number["c"], 4) is None  # its operand was written


def test_random_numbers_and_what_was_there_before_cannot_be_had_again() -> None:
    program = Program()
    program.page("w", 1)
    program.op("w", {"noise": made()}, is_replayable=False)
    program.op("noise", {"a": made()})
    program.op("a noise")
    replays, number = Replays(program.build()), program.numbers
    assert replays.of(number["w"], 2) is None
    assert replays.of(number["noise"], 2) is None
    assert replays.of(number["a"], 2) is not None
    assert replays.of(number["a"], 2, {number["noise"]}) is None


def test_chains_end_somewhere() -> None:
    program = Program()
    program.page("x0", 1)
    for i in range(MAX_CHAIN + 1):
        program.op(f"x{i}", {f"x{i + 1}": made()})
        if i:
            program.free(f"x{i}")
    replays = Replays(program.build())
    assert replays.of(program.numbers[f"x{MAX_CHAIN + 1}"], MAX_CHAIN + 1) is None
