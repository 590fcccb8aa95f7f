"""What part of an iteration runs, in which module, and what tensors turn out to hold.

[Note: Module of a backward operation]
    Autograd numbers its nodes in the order in which the forward pass makes them, each before its
    operation is dispatched. So the number of the node that runs in backward names the forward
    operation, and that one's module. `AccumulateGrad` has no such number: it belongs to the module
    of the node before it, which made the gradient.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tvm_pager.memory import PageKind
from tvm_pager.planning import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ProgramHooks"]

_graph_task = torch._C._current_graph_task_id  # -1 outside of backward
_current_node = torch._C._current_autograd_node
_next_number = torch._C._autograd._get_sequence_nr


class ProgramHooks:
    """Watches all modules and optimizers of the process while it is entered.

    Args:
        classify: told of each tensor whose kind became known: the tensor, its kind, the name of the
            parameter or buffer ("" for others), and the index of its module.
        after_update: called at the end of each `optimizer.step()`.
    """

    def __init__(
        self,
        classify: Callable[[torch.Tensor, PageKind, str, int], None],
        after_update: Callable[[], None],
    ) -> None:
        self.modules: list[str] = []
        self._classify = classify
        self._after_update = after_update
        self._indices: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._owners: dict[int, int] = {}  # module of a parameter, by the parameter's id
        self._num_models = 0
        self._stack: list[int] = []
        self._by_number: dict[int, int] = {}
        self._last = -1
        self._num_updating = 0
        self._handles: list[Any] = []

    def __enter__(self) -> ProgramHooks:
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._end_update),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def place(self) -> tuple[Phase, int]:
        """Phase and module, as an index in `modules` or -1, of the operation that runs now."""
        if self._num_updating:
            return Phase.UPDATE, -1
        if _graph_task() != -1:
            return Phase.BACKWARD, self._module_in_backward()
        if not self._stack and not torch.is_grad_enabled():
            return Phase.OTHER, -1
        return Phase.FORWARD, self._module_in_forward()

    def begin_iteration(self) -> None:
        """The graph of the iteration before is gone."""
        self._by_number.clear()
        self._last = -1

    def _module_in_forward(self) -> int:
        module = self._stack[-1] if self._stack else -1
        # The first operation after a node was numbered is the node's own.
        self._by_number.setdefault(_next_number() - 1, module)
        return module

    def _module_in_backward(self) -> int:
        if self._stack:  # a checkpointed part of the forward pass runs again
            return self._module_in_forward()
        node = _current_node()
        number = -1 if node is None else node._sequence_nr()
        self._last = self._by_number.get(number, self._last)
        return self._last

    # --- hooks -----------------------------------------------------------------------------------

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if module not in self._indices:
            self._meet(module)
        self._stack.append(self._indices[module])

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _meet(self, model: torch.nn.Module) -> None:
        """Learns the names of a model's modules, parameters and buffers at its first call."""
        prefix = f"model{self._num_models}." if self._num_models else ""
        self._num_models += not self._stack  # a module that was added to a known model later
        for path, module in model.named_modules():
            if module in self._indices:
                continue
            index = self._indices[module] = len(self.modules)
            path = (prefix + path).removesuffix(".")
            self.modules.append(path)
            label = path + "." if path else ""
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in self._owners:  # a shared one has its first name
                    self._owners[id(parameter)] = index
                    self._classify(parameter, PageKind.PARAM, label + name, index)
            for name, buffer in module.named_buffers(recurse=False):
                self._classify(buffer, PageKind.BUFFER, label + name, index)

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._num_updating += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    module = self._owners.get(id(parameter), -1)
                    self._classify(parameter.grad, PageKind.GRAD, "", module)

    def _end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._num_updating -= 1
        for parameter, state in optimizer.state.items():
            module = self._owners.get(id(parameter), -1)
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._classify(value, PageKind.OPT_STATE, "", module)
        self._after_update()
