"""Where one iteration of a program ends and the next one begins, without its help.

[Note: Boundaries]
    - `Pager.step()`, once it was called: nothing else from then on.
    - The end of `optimizer.step()`: the next entry of a whole model begins the next iteration, and
      what comes in between (a loss that is kept, a batch that is brought) belongs to the one
      before: so a step of training begins alike whatever came before it, and as evaluation does.
      In a program that enters none, the first operation after the step begins it that is neither
      in another optimizer's step nor in backward. So two optimizers for one model make one
      iteration, and so does an optimizer per parameter that steps inside backward; two that
      alternate (GAN) make two. One of which no parameter and no gradient is a page belongs to
      another model, and counts for nothing.
    - Where no optimizer steps in between, each entry without gradients of a whole model that was
      entered so before in the iteration (evaluation, generation), and the next entry with gradients
      after these. A single one, such as a teacher's, is part of its iteration; so are blocks that a
      program calls one after the other, each of them a whole model, also where reentrant
      checkpointing turns gradients off.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.runtime.context import PagingContext

__all__ = ["Boundaries"]

_MANY = 50  # pages: what is created between an update and the next model at most
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class Boundaries:
    """Tells one pager of its iterations; see [Note: Boundaries].

    Args:
        context: whose.
        after_update: called at the end of each `optimizer.step()`.
    """

    def __init__(self, context: PagingContext, after_update: Callable[[], None]) -> None:
        self._context = context
        self._after_update = after_update
        self._is_explicit = False
        # Whole models that were entered without gradients in this iteration, by id.
        self._quiet: set[int] = set()
        self._is_quiet = False  # such an entry has begun this iteration, and no other one came
        self._has_models = False  # whether the program enters whole models
        self._pages_at_end: int | None = None  # created until the update that waits for a model
        # By id, steps of our optimizers that have begun: some drop gradients on the way.
        self._num_stepping: Counter[int] = Counter()
        # Through weak references: hooks are global, and must not keep a forgotten pager's slab and
        # file.
        before, after = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *call: _call(before, call)),
            register_optimizer_step_post_hook(lambda *call: _call(after, call)),
        ]

    def mark(self) -> None:
        """The program says that an iteration is over."""
        self._is_explicit = True
        self._pass()

    def enter_model(self, model: torch.nn.Module) -> None:
        """A whole model is about to run, and not as a part of another one."""
        if self._is_explicit or not self._context.record.is_between():
            self._context.record.num_updating = 0  # a step that raised has no end
            return
        self._has_models = True
        is_quiet = not torch.is_grad_enabled()
        is_again = is_quiet and id(model) in self._quiet
        was_quiet = self._is_quiet and not is_quiet
        if self._pages_at_end is not None or is_again or was_quiet:
            self._pass()
        if is_quiet:
            self._quiet.add(id(model))
            self._is_quiet |= is_again

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _pass(self) -> None:
        self._pages_at_end = None
        self._quiet.clear()
        self._is_quiet = False
        with self._context.core.lock:
            self._context.core.iterations.pass_boundary()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_ours(optimizer):
            created = self._context.core.table.num_created
            if self._pages_at_end is not None and created > self._pages_at_end + _MANY:
                self._has_models = False  # it has done an iteration, and entered none
                self._pass()
            self._num_stepping[id(optimizer)] += 1
            self._context.record.num_updating += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        context = self._context
        if not self._num_stepping[id(optimizer)] and not self._is_ours(optimizer):
            return
        self._num_stepping[id(optimizer)] -= 1
        context.record.num_updating = max(0, context.record.num_updating - 1)
        if context.is_closed:  # it is, in a forked child
            return
        context.classify_optimizer(optimizer)
        self._after_update()
        self._quiet.clear()  # a teacher of the next step is not entered again
        # An optimizer that calls another, or its base class, has ended with the outermost.
        if not self._is_explicit and not context.record.num_updating:
            iterations = context.core.iterations
            with context.core.lock:
                if not self._has_models:
                    iterations.end_when(context.record.is_between)
                elif self._pages_at_end is None:
                    iterations.end_at_boundary()
                    self._pages_at_end = context.core.table.num_created

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a parameter or gradient is a page of this pager, or no plain tensor at all."""
        context = self._context
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for tensor in (parameter, parameter.grad):
                    page = None if tensor is None else page_of(tensor)
                    if page is not None and page.pager is context:
                        return True
                    if page is None and tensor is not None and type(tensor) not in _PLAIN:
                        return True
        return False


def _call(method: weakref.WeakMethod[Any], arguments: tuple[Any, ...]) -> None:
    found = method()
    if found is not None:
        found(*arguments)
