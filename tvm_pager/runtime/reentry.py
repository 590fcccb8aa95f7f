"""Parameters that left paging without a word come back at their module's entry.

`load_state_dict(assign=True)` and lazy modules put other tensors under the same names. A forward
pre-hook on all modules looks at the entering module's own tensors, costs a look-up per tensor, and
adopts those that could be pages.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tvm_pager.errors import PagerError
from tvm_pager.interrupts import renew
from tvm_pager.runtime.adoption import adopt, is_adoptable
from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tvm_pager.memory import Page
    from tvm_pager.runtime.context import PagingContext

__all__ = ["ModuleEntry"]


class ModuleEntry:
    """Watches the modules that were paged and, while `watches_all`, every module that is called."""

    def __init__(self, context: PagingContext) -> None:
        self.watches_all = False
        # Told when a whole model is called.
        self.on_model: Callable[[torch.nn.Module], None] | None = None
        self._context = context
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # Whole models, in the order in which they were met.
        self._roots: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        enter = weakref.WeakMethod(self._enter)
        # Through a weak reference: the hook is global, and must not keep a forgotten pager alive.
        self._hook = register_module_forward_pre_hook(
            lambda module, inputs: None if (method := enter()) is None else method(module)
        )

    def watch(self, owners: Iterable[Any]) -> None:
        """From now on modules among `owners`, and theirs, are looked at when called."""
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                inner = set(owner.modules())
                self._modules.update(inner)
                for root in inner & set(self._roots):
                    del self._roots[root]
                if not any(owner in root.modules() for root in list(self._roots)):
                    self._roots[owner] = None

    def forget(self, owners: Iterable[Any]) -> None:
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                for module in owner.modules():
                    self._modules.discard(module)
                    self._roots.pop(module, None)

    def names(self) -> dict[int, str]:
        """Gives the pages of all these modules, by id: dotted name and shape.

        O(modules and tensors).
        """
        return {page.id: f"{label} {tuple(part.shape)}" for page, label, part in self._tensors()}

    def page_names(self) -> dict[int, str]:
        """Gives parameters and buffers, by page id: the dotted name. O(modules and tensors)."""
        return {page.id: label for page, label, _ in self._tensors() if not label.endswith(".grad")}

    def paths(self) -> dict[int, str]:
        """Gives the dotted paths of all modules, by `id`. O(modules)."""
        found: dict[int, str] = {}
        for number, root in enumerate(list(self._roots)):
            prefix = f"model{number}." if number else ""
            for path, module in root.named_modules():
                found.setdefault(id(module), (prefix + path).removesuffix("."))
        return found

    def _tensors(self) -> Iterator[tuple[Page, str, torch.Tensor]]:
        seen: set[int] = set()
        for root in list(self._roots):
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                grad = tensor.grad if tensor.is_leaf else None
                for label, part in ((name, tensor), (f"{name}.grad", grad)):
                    page = None if part is None else page_of(part)
                    if page is not None and part is not None and page.id not in seen:
                        seen.add(page.id)
                        yield page, label, part

    def close(self) -> None:
        self._hook.remove()

    def _enter(self, module: torch.nn.Module) -> None:
        if self._context.is_closed:
            return
        renew()
        if module not in self._modules:
            if not self.watches_all:
                return
            self.watch([module])  # for its names
        if self.on_model is not None and module in self._roots:
            self.on_model(module)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and is_adoptable(self._context, tensor):
                    self._adopt(name, tensor)

    def _adopt(self, name: str, tensor: torch.Tensor) -> None:
        try:
            if adopt(self._context, [tensor]) and not self.watches_all:
                self._context.notice_once(
                    "parameters that had left paging (load_state_dict(assign=True), lazy modules) "
                    f"were adopted again (first seen: {name})"
                )
        except PagerError:
            return  # a live graph holds it: it is right where it is, and there is a next time
