"""Layers: by module path, by parameters where no module is known, and calls of them."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.small_traces import Program, training
from tvm_pager.planning.traces.layers import find_layers


def test_numbered_modules_are_layers_and_others_stand_for_themselves() -> None:
    layers = find_layers(training(3).build())
    assert layers.of_op[:7] == (0, 1, 1, 2, 2, 3, 3)
    assert layers.of_op[7:14] == (4, 3, 3, 2, 2, 1, 1)
    assert layers.call_starts == (0, 1, 3, 5, 7, 8, 10, 12, 14, 15, 16)


def test_operations_of_no_layer_belong_to_the_one_before() -> None:
    program = Program()
    program.page("w", 1)
    for module in ("", "model.layers.0.up", "model.layers", "model.layers.1", "head"):
        program.op("w", module=module)
    assert find_layers(program.build()).of_op == (0, 1, 1, 2, 3)


def test_without_modules_parameters_make_the_layers() -> None:
    num_layers = 32
    trace = training(num_layers).build()
    bare = replace(trace, modules=(), ops=tuple(op._replace(module=-1) for op in trace.ops))
    layers = find_layers(bare)
    assert len(set(layers.of_op)) == 16
    # A parameter is used in its layer, forward and backward.
    for i in range(num_layers):
        forward, backward = 1 + 2 * i, 2 + 2 * num_layers + 2 * (num_layers - 1 - i)
        assert layers.of_op[forward] == layers.of_op[backward]


def test_calls_are_counted_around_the_boundary() -> None:
    layers = find_layers(training(3).build())
    num_ops = 17
    assert not layers.crosses(1, 2)
    assert layers.crosses(2, 3)
    assert layers.crosses(16, num_ops)
    assert layers.start_before(4, 1) == 1
    assert layers.start_before(num_ops + 4, 1) == num_ops + 1
    assert layers.start_before(0, 1) == 16 - num_ops
