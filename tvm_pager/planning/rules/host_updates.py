"""The optimizer's operations by what they update, and what they take on the host. Pure.

[Note: Update groups]
    Operations of the update phase that share a parameter, gradient, state or temporary belong to
    one group: with a loop over the parameters a group is a parameter, with lists it is all of them.
    A group can run once the last other operation that uses any of its pages has ended.

[Note: Both ways]
    A plan that wants an update on the host says so by `RunOnHost`, and has the pages of the update
    come and go around it as well: where the update does run on the host, a fetch whose deadline is
    one of its operations has nothing to do and lapses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.memory import PageKind
from tvm_pager.planning.plan import RunOnHost
from tvm_pager.planning.traces.trace import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.traces.trace import Trace

__all__ = ["UpdateGroup", "run_on_host", "update_groups", "update_seconds"]

_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_SHARED = frozenset((PageKind.OTHER, PageKind.BUFFER))  # step counters and learning rates


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """Operations that belong together; see [Note: Update groups].

    Attributes:
        ops: in order.
        pages: that live beyond them: parameters, gradients, states.
        written: those of them that the operations change.
        ready: the first moment at which they can run.
        num_params: elements that are updated.
    """

    ops: tuple[int, ...]
    pages: tuple[int, ...]
    written: frozenset[int]
    ready: int
    num_params: int


def update_groups(trace: Trace) -> list[UpdateGroup]:
    """The groups of a trace in the order of their first operation; empty without an update."""
    roots: dict[int, int] = {}

    def root(page: int) -> int:
        while roots.setdefault(page, page) != page:
            roots[page] = roots[roots[page]]
            page = roots[page]
        return page

    updates = [i for i, op in enumerate(trace.ops) if op.phase is Phase.UPDATE]
    first_of: dict[int, int] = {}  # operation -> one of its pages
    for index in updates:
        op = trace.ops[index]
        pages = [p for p in (*op.reads, *op.creates) if trace.pages[p].kind not in _SHARED]
        for page in pages:
            roots[root(page)] = root(pages[0])
        if pages:
            first_of[index] = pages[0]
    members: dict[int, list[int]] = {}
    for index, page in first_of.items():
        members.setdefault(root(page), []).append(index)
    ready = _last_uses_before(trace)
    return [_group(trace, ops, ready) for ops in members.values()]


def _last_uses_before(trace: Trace) -> dict[int, int]:
    """Page -> moment after the last operation outside the update phase that uses it."""
    return {
        page: index + 1
        for index, op in enumerate(trace.ops)
        if op.phase is not Phase.UPDATE
        for page in (*op.reads, *op.creates)
    }


def _group(trace: Trace, ops: list[int], ready: dict[int, int]) -> UpdateGroup:
    used = dict.fromkeys(page for op in ops for page in trace.ops[op].reads)
    lasting = [p for p in used if trace.pages[p].kind is not PageKind.TEMPORARY]
    num_params = sum(
        trace.pages[p].nbytes // _ITEM_BYTES.get(trace.pages[p].dtype.removeprefix("torch."), 4)
        for p in lasting
        if trace.pages[p].kind is PageKind.PARAM
    )
    at = max((ready.get(page, 0) for page in used), default=0)
    written = frozenset(page for op in ops for page in trace.ops[op].writes).intersection(lasting)
    return UpdateGroup(tuple(ops), tuple(lasting), written, at, num_params)


def update_seconds(groups: Iterable[UpdateGroup], hardware: HardwareProfile) -> float:
    """Host time of the groups one after the other, at the measured rate of AdamW."""
    rates = hardware.host.adamw_params_per_s
    return sum(group.num_params for group in groups) / rates.at(rates.largest)


def run_on_host(trace: Trace, groups: Iterable[UpdateGroup]) -> list[RunOnHost]:
    """Runs each group on the host as soon as it can run, by the end of the iteration."""
    end = len(trace.ops)
    return [RunOnHost(op, group.ready, end) for group in groups for op in group.ops]
