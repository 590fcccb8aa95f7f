"""What is taken down of an operation beside its pages: phase, module, dtypes, device time.

[Note: Modules in backward]
    Autograd numbers its nodes in the order of the forward pass. The first operation after a node
    was numbered is the node's own, so the module that it ran in is kept under that number; in
    backward the node that runs tells its number.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tvm_pager.planning import Phase
from tvm_pager.runtime.op_timer import HeadStarts, OpTimer
from tvm_pager.runtime.schema import tensor_arguments
from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import Page
    from tvm_pager.paging.recorder import Entry
    from tvm_pager.runtime.call import Call

__all__ = ["CallRecord"]

# Private, for want of a public query of any of the three; a profiler's annotations come from them.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of backward
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class CallRecord:
    """Where the program is, for one pager's recordings.

    Attributes:
        num_updating: optimizers whose `step()` is running.
        paths: gives the dotted paths of modules, by `id`.
    """

    def __init__(self) -> None:
        self.num_updating = 0
        self.paths: Callable[[], dict[int, str]] = dict
        self._handles: list[Any] = []
        self._known: dict[int, str] = {}
        self._stack: list[Any] = []
        self._by_number: dict[int, str] = {}
        self._last = ""
        self._timer: OpTimer | None = None  # of the operation before
        self._head_starts = HeadStarts()

    def watch_modules(self, is_on: bool) -> None:
        """Follows modules in and out while something is recorded; else it costs nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()
        self._by_number.clear()
        self._last = ""
        if is_on:
            self._known = self.paths()
            enter, leave = weakref.WeakMethod(self._enter), weakref.WeakMethod(self._leave)
            self._handles = [  # global: through weak references, as in reentry.py
                register_module_forward_pre_hook(
                    lambda module, _: None if (method := enter()) is None else method(module)
                ),
                register_module_forward_hook(
                    lambda module, *_: None if (method := leave()) is None else method(module),
                    always_call=True,
                ),
            ]

    def phase(self) -> Phase:
        """Which part of an iteration the calling thread is in."""
        if self.num_updating:
            return Phase.UPDATE
        return Phase.FORWARD if _graph_task() == -1 else Phase.BACKWARD

    def is_between(self) -> bool:
        """Whether the program is neither in an update nor in backward."""
        return not self.num_updating and _graph_task() == -1

    def begin(self, call: Call) -> Entry | None:
        """An operation is about to run: follows it, and begins its entry where one is written."""
        core = call.context.core
        iterations = core.iterations
        written = [page for tensor in call.written() if (page := page_of(tensor)) is not None]
        entry = iterations.enter(call.plan.name, call.pages, written, is_told=call.is_told)
        if entry is None:
            return None
        started_ns = time.perf_counter_ns()
        entry.phase = self.phase()
        entry.module = self._module(entry.phase)
        entry.is_replayable = not call.plan.writes and not call.plan.is_seeded
        dtypes: dict[Page, str] = {}
        for tensor in tensor_arguments(call.plan, call.args, call.kwargs):
            page = page_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if page is not None:
                dtypes.setdefault(page, str(tensor.dtype).removeprefix("torch."))
        for record in entry.operands:
            if not record.dtype and record.page is not None:
                record.dtype = dtypes.get(record.page, "")
        entry.excess_ns += time.perf_counter_ns() - started_ns
        return entry

    def start_timer(self, call: Call) -> OpTimer | None:
        """The operation that has begun is about to be executed; None: nobody wants its time."""
        if call.entry is None or call.plan.is_view:
            return None
        head_start_ns = self._head_starts.ns(call.plan.name)
        self._timer = OpTimer(call.context.device, self._timer, head_start_ns)
        return self._timer

    def stop_timer(self, call: Call, timer: OpTimer) -> None:
        """It was executed."""
        if call.entry is not None:
            call.entry.compute_ns = timer.stop()
            call.entry.excess_ns += timer.cost_ns
            self._head_starts.called(call.plan.name, timer.called_ns)

    def _module(self, phase: Phase) -> str:
        if phase is Phase.UPDATE:
            return ""
        if phase is Phase.FORWARD or self._stack:  # else a checkpointed part runs again
            module = self._known.get(id(self._stack[-1]), "") if self._stack else ""
            self._by_number.setdefault(_next_number() - 1, module)
            return module
        node = _current_node()
        if node is not None:
            self._last = self._by_number.get(node._sequence_nr(), self._last)
        return self._last

    def _enter(self, module: torch.nn.Module) -> None:
        if self._handles:  # else the hook before this one, at the same entry, has ended recording
            self._stack.append(module)

    def _leave(self, module: torch.nn.Module) -> None:
        if module in self._stack:  # else recording began inside of it
            del self._stack[len(self._stack) - 1 - self._stack[::-1].index(module) :]
