"""The entry points: `Pager`, `page`, `unpage`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_pager.errors import ConfigError
from tvm_pager.pager import Pager, active_pager
from tvm_pager.runtime import adoption

if TYPE_CHECKING:
    import torch

__all__ = ["Pager", "page", "unpage"]


def page(
    model: torch.nn.Module,
    *others: Any,
    pager: Pager | None = None,
    copy: bool = False,
    **options: Any,
) -> Pager:
    """Makes pages of a model's parameters, buffers and gradients, and of an optimizer's states.

    Uses `pager`, else the open context, else a new pager with `options` (those of `Pager`), which
    the caller closes. `copy` also takes storages that cannot be resized, such as those of CPU
    weights from safetensors; see `Pager.page`. The objects stay the same: optimizers made before,
    tied weights, hooks and `isinstance` keep working.

    Raises:
        PagerError: a parameter is held by a graph that is alive.
    """
    if pager is None:
        pager = active_pager()
    if pager is None:
        pager = Pager(**options)
    elif options:
        raise ConfigError(
            f"options {sorted(options)} were given along with an open pager; give them to Pager()"
        )
    pager.page(model, *others, copy=copy)
    return pager


def unpage(model: torch.nn.Module, *others: Any) -> None:
    """Makes plain tensors of everything paged in a model and its optimizer, under the same objects.

    Blocks for the faults. The pager stays open.
    """
    adoption.restore(None, (model, *others))
