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
from tvm_pager.runtime.schema import tensor_arguments
from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import Page
    from tvm_pager.paging.recorder import Entry
    from tvm_pager.runtime.call import Call

__all__ = ["CallRecord", "OpTimer"]

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
        return entry

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


class OpTimer:
    """Measures what an operation takes on its device, from its making to `stop`.

    On CUDA two events are put around it, and looked at when the time is asked for.
    """

    def __init__(self, *, is_cpu: bool) -> None:
        self._start_ns = 0
        self._events: list[torch.cuda.Event] = []
        if is_cpu:
            self._start_ns = time.perf_counter_ns()
        else:
            self._mark()

    def stop(self) -> int | Callable[[], int]:
        """The nanoseconds; on CUDA a function that waits for them."""
        if not self._events:
            return time.perf_counter_ns() - self._start_ns
        self._mark()
        return self._device_ns

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def _device_ns(self) -> int:
        start, end = self._events
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)
