"""Finds the steps and the tensors of a script that knows nothing of it, through torch's own hooks.

[Note: What a step is]
    A call of `optimizer.step()`; its gradients are taken just before, weights and states just
    after. A script that makes no optimizer has inference steps: the outermost calls of modules that
    have parameters. Forward outputs belong to the step that is under way.

[Note: What is not looked at]
    Threads other than the first that computes, child processes, and modules called in the middle of
    backward (recomputation), which are parts of a step that was looked at before.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch.nn.modules import module as _hooks
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tvm_pager.verify.module_names import ModuleNames
from tvm_pager.verify.record import BUFFER, GRADIENT, INITIAL, LOSS, OUTPUT, STATE, WEIGHT
from tvm_pager.verify.tensor_bytes import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["StopRun", "Watch"]


class StopRun(BaseException):
    """Ends the script: enough was seen. No `Exception`, so that the script does not handle it."""


class Sink(Protocol):
    """Takes what the watch finds."""

    def record(self, step: int, phase: str, name: str, value: Any) -> None:
        """Is given a tensor, or a number, at the moment at which it is to be read."""


class Watch:
    """Watches one script while the context is open, and ends it after `num_steps` steps.

    Args:
        sink: is given every tensor.
        num_steps: `StopRun` is raised in the script when so many are complete.
    """

    def __init__(self, sink: Sink, num_steps: int) -> None:
        self.num_steps = 0  # complete
        self.is_recording = False  # operations are then the sink's, not the script's
        self.names = ModuleNames()
        self._sink = sink
        self._limit = num_steps
        self._has_optimizer = False
        self._calls: list[torch.nn.Module] = []  # modules whose forward is under way
        self._stepping: list[int] = []  # ids of optimizers; a wrapper's step calls another's
        self._thread: int | None = None
        self._process = os.getpid()
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        handles = [
            _hooks.register_module_module_registration_hook(self.names.note_child),
            _hooks.register_module_forward_pre_hook(self._before_forward),
            _hooks.register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._undo = [handle.remove for handle in handles]
        # No hooks of torch's tell of these two.
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.optim.Optimizer, "__init__", self._init_optimizer)
        return self

    def __exit__(self, *error: object) -> None:
        for undo in self._undo:
            undo()

    @property
    def step(self) -> int:
        """The step that is under way, counted from 1."""
        return self.num_steps + 1

    def innermost_call(self) -> str:
        """The path of the module whose forward is under way; empty outside."""
        return self.names.path(self._calls[-1]) if self._calls else ""

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(functools.partial(setattr, owner, name, original))

    # --- hooks -----------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self._is_here():
            return
        self._calls.append(module)
        if len(self._calls) == 1 and (model := self.names.note_call(module)) is not None:
            self._record(INITIAL, self.names.parameters_of(model))
            self._record(INITIAL, self.names.buffers_of(model))

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not self._is_here():
            return
        while self._calls and self._calls.pop() is not module:
            pass  # a call that a BaseException ended
        if self._calls or output is None:  # None: it raised
            return
        self._record(OUTPUT, leaves(self.names.path(module), output))
        if not self._has_optimizer and next(module.parameters(), None) is not None:
            self._finish_step()

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_here():
            self._record(LOSS, leaves("loss", args[0] if args else kwargs.get("tensors")))
        return original(*args, **kwargs)

    def _init_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._has_optimizer = True
        original(*args, **kwargs)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here():
            return
        self._has_optimizer = True
        if id(optimizer) in self._stepping:  # its last step raised
            del self._stepping[self._stepping.index(id(optimizer)) :]
        self._stepping.append(id(optimizer))
        if len(self._stepping) == 1:
            self._record(BUFFER, self.names.buffers())
            self._record(GRADIENT, _gradients(self._parameters(optimizer)))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_here() or id(optimizer) not in self._stepping:
            return
        del self._stepping[self._stepping.index(id(optimizer)) :]
        if not self._stepping:
            parameters = self._parameters(optimizer)
            self._record(WEIGHT, iter(parameters))
            self._record(STATE, _states(optimizer, parameters))
            self._finish_step()

    # --- what they share -------------------------------------------------------------------------

    def _is_here(self) -> bool:
        """Whether this is a place to look at; see [Note: What is not looked at].

        Raises:
            StopRun: the script has caught the one before, and goes on.
        """
        if torch._C._current_graph_task_id() != -1 or os.getpid() != self._process:
            return False
        if self._thread is None:
            self._thread = threading.get_ident()
        is_here = self._thread == threading.get_ident()
        if is_here and self.num_steps >= self._limit:
            raise StopRun
        return is_here

    def _record(self, phase: str, named: Iterator[tuple[str, Any]]) -> None:
        self.is_recording = True
        try:
            for name, value in named:
                self._sink.record(self.step, phase, name, value)
        finally:
            self.is_recording = False

    def _finish_step(self) -> None:
        self.num_steps += 1
        if self.num_steps >= self._limit:
            raise StopRun

    def _parameters(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        """What the optimizer updates, by the model's names where a model has been called."""
        names = self.names.parameters()
        return [
            (names.get(id(parameter), f"parameter {index} of group {number}"), parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]


def _gradients(parameters: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters:
        if parameter.grad is not None:
            yield name, parameter.grad


def _states(
    optimizer: torch.optim.Optimizer, parameters: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, Any]]:
    for name, parameter in parameters:
        # `get`, because a look-up would make an entry.
        state: dict[str, Any] = optimizer.state.get(parameter) or {}
        for key, value in state.items():
            for path, leaf in leaves(str(key), value):
                yield f"{path} of {name}", leaf
