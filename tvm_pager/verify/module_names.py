"""Which module belongs to which model, so that tensors can be called by the names of the model.

A model is found when it, or a part of it, is called; a part knows its model from the moment at
which it was registered there. Nothing here keeps a module alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ModuleNames"]

_Ref = weakref.ref[torch.nn.Module]


class ModuleNames:
    """The models of a script, in the order in which they were first called."""

    def __init__(self) -> None:
        self._parents: weakref.WeakKeyDictionary[torch.nn.Module, _Ref] = (
            weakref.WeakKeyDictionary()
        )
        # With the label that goes before its names. The first model with parameters has none.
        self._models: list[tuple[_Ref, str]] = []
        self._num_by_class: dict[str, int] = {}
        self._has_main = False

    def note_child(self, module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        """Is told of each registration; a hook of torch's."""
        if isinstance(child, torch.nn.Module):
            self._parents[child] = weakref.ref(module)

    def note_call(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """Is told of an outermost call; gives the model that it belongs to if that is new."""
        model = self._model_of(module)
        if any(known() is model for known, _ in self._models):
            return None
        name = type(model).__name__
        number = self._num_by_class[name] = self._num_by_class.get(name, 0) + 1
        label = f"{name}:" if number == 1 else f"{name}#{number}:"
        if not self._has_main and next(model.parameters(), None) is not None:
            label, self._has_main = "", True
        self._models.append((weakref.ref(model), label))
        return model

    def path(self, module: torch.nn.Module) -> str:
        """The path of a module in its model; for a model itself the name of its class."""
        model = self._model_of(module)
        label = self._label(model)
        if model is module:
            return label.removesuffix(":") or type(module).__name__
        names: Iterator[tuple[str, torch.nn.Module]] = model.named_modules()
        return label + next((name for name, other in names if other is module), "")

    def parameters(self) -> dict[int, str]:
        """Names by id, of this moment's parameters of all models that are still alive."""
        named = (pair for model in self._alive() for pair in self.parameters_of(model))
        return {id(parameter): name for name, parameter in named}

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of all models that are still alive."""
        for model in self._alive():
            yield from self.buffers_of(model)

    def parameters_of(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of one model, a shared one under its first name."""
        label = self._label(model)
        return ((label + name, tensor) for name, tensor in model.named_parameters())

    def buffers_of(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of one model."""
        label = self._label(model)
        return ((label + name, tensor) for name, tensor in model.named_buffers())

    def _alive(self) -> list[torch.nn.Module]:
        return [model for known, _ in self._models if (model := known()) is not None]

    def _label(self, model: torch.nn.Module) -> str:
        for known, label in self._models:
            if known() is model:
                return label
        return ""

    def _model_of(self, module: torch.nn.Module) -> torch.nn.Module:
        seen = {module}
        while (known := self._parents.get(module)) is not None:
            parent = known()
            if parent is None or parent in seen:
                break
            seen.add(parent)
            module = parent
        return module
