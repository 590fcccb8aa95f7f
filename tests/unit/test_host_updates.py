"""Updates by group: what belongs together, when it can run, what it takes."""

from __future__ import annotations

import pytest

from tests.unit.small_traces import Program, training
from tvm_pager.planning import PageKind, Phase, RunOnHost
from tvm_pager.planning.rules.host_updates import run_on_host, update_groups, update_seconds
from tvm_pager.testing.machines import example_profile


def test_each_parameter_of_a_loop_is_a_group_that_can_run_during_backward() -> None:
    program = training(3, weight=8)
    trace = program.build()
    groups = update_groups(trace)
    assert [group.ops for group in groups] == [(14,), (15,), (16,)]
    # Layer 2 comes first in backward: its weight is used last in operations 9, 11, 13.
    assert [group.ready for group in groups] == [14, 12, 10]
    names = {number: name for name, number in program.numbers.items()}
    assert {names[page] for page in groups[0].pages} == {"w0", "m0", "v0", "g0"}
    assert {names[page] for page in groups[0].written} == {"w0", "m0", "v0"}
    assert update_seconds(groups, example_profile()) == pytest.approx(3 * 8 * 128 / 4e9)
    assert run_on_host(trace, groups)[1] == RunOnHost(15, 12, 17)


def test_lists_and_what_temporaries_join_are_one_group() -> None:
    program = Program()
    for name in ("w0", "w1"):
        program.page(name, 1)
    program.page("step", 1, PageKind.OTHER)
    temporary = (1, PageKind.TEMPORARY)
    program.op("w0 step", {"t": temporary}, phase=Phase.UPDATE)
    program.op("t", writes="w0", phase=Phase.UPDATE)
    program.free("t")
    program.op("step", writes="w1", phase=Phase.UPDATE)  # a shared counter joins nothing
    assert [group.ops for group in update_groups(program.build())] == [(0, 1), (2,)]
    program.op(writes="w0 w1", phase=Phase.UPDATE)
    assert [group.ops for group in update_groups(program.build())] == [(0, 1, 2, 3)]


def test_without_an_update_there_are_no_groups() -> None:
    program = Program()
    program.page("w", 1)
    program.op("w")
    assert update_groups(program.build()) == []
