"""Layers of a model as its trace shows them. Pure.

[Note: Layers]
    A layer is what has a number in its module path: "model.layers.3.mlp.up" belongs to the layer
    "model.layers.3". Modules outside of numbered ones are layers of their own. An operation of
    which no module is known, or only the model itself, belongs to the layer before it. Where no
    module is known at all, layers are groups of parameters in the order of their first use, of 1/16
    of all parameters each, and an operation belongs to the layer of the parameter that it reads.

    A call is a run of operations of one layer in one phase: forward and backward visit a layer in a
    call each, and shared layers are called more often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.memory import PageKind

if TYPE_CHECKING:
    from tvm_pager.planning.traces.trace import Trace

__all__ = ["Layers", "find_layers"]

_NUM_GROUPS = 16


@dataclass(frozen=True, slots=True)
class Layers:
    """See [Note: Layers].

    Attributes:
        of_op: layer of each operation; numbers are in the order of first use.
        call_of_op: call of each operation.
        call_starts: first operation of each call.
    """

    of_op: tuple[int, ...]
    call_of_op: tuple[int, ...]
    call_starts: tuple[int, ...]

    def crosses(self, after: int, until: int) -> bool:
        """Whether two operations belong to different calls; the later one may be past the end."""
        num_ops = len(self.of_op)
        return until >= num_ops or self.call_of_op[after] != self.call_of_op[until]

    def start_before(self, op: int, num_calls: int = 1) -> int:
        """Where the call begins that is so many calls before that of `op`.

        Both may be past the end, and the result negative.
        """
        num_ops = len(self.of_op)
        turns, op = divmod(op, num_ops)
        more, call = divmod(self.call_of_op[op] - num_calls, len(self.call_starts))
        return self.call_starts[call] + (turns + more) * num_ops


def find_layers(trace: Trace) -> Layers:
    """The layers of a trace."""
    names = _by_module(trace)
    if len(set(names)) <= 1:
        names = _by_parameter(trace)
    numbers: dict[object, int] = {}
    of_op, call_of_op, call_starts = [], [], []
    before: object = None
    for index, name in enumerate(names):
        layer = numbers.setdefault(name, len(numbers))
        call = (layer, trace.ops[index].phase)
        if call != before:
            call_starts.append(index)
            before = call
        of_op.append(layer)
        call_of_op.append(len(call_starts) - 1)
    return Layers(tuple(of_op), tuple(call_of_op), tuple(call_starts))


def _by_module(trace: Trace) -> list[object]:
    holders = {"", *(path.rpartition(".")[0] for path in trace.modules)}
    keys = [_layer_name(path, holders) for path in trace.modules]
    names: list[object] = []
    last: object = None
    for op in trace.ops:
        if op.module >= 0 and keys[op.module] is not None:
            last = keys[op.module]
        names.append(last)
    return names


def _layer_name(path: str, holders: set[str]) -> str | None:
    """None for the model itself and for what is only there to hold layers."""
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return None if path in holders else path


def _by_parameter(trace: Trace) -> list[object]:
    pages = trace.pages
    total = sum(page.nbytes for page in pages if page.kind is PageKind.PARAM)
    groups: dict[int, int] = {}
    seen = 0
    names: list[object] = []
    last = 0
    for op in trace.ops:
        for page in op.reads:
            if pages[page].kind is PageKind.PARAM and page not in groups:
                groups[page] = seen * _NUM_GROUPS // max(1, total)
                seen += pages[page].nbytes
        last = next((groups[page] for page in op.reads if page in groups), last)
        names.append(last)
    return names
