"""The page on the storage object.

[Note: A page is a storage]
    The page hangs on the Python object of the `UntypedStorage`, which torch preserves while only
    C++ holds the storage (an autograd graph, say). Every view, alias and dtype of it finds the page
    there, at each access; nothing is cached on tensors, because `.data =`, `set_` and
    `module.half()` exchange the storage under a tensor. The page refers back weakly, so it keeps no
    bytes alive, and the death of the storage appends to the pager's queue.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from tvm_pager.memory import Page

__all__ = [
    "PAGE_ATTRIBUTE",
    "StorageRef",
    "page_of",
    "page_of_storage",
    "storage_of",
    "unbind",
]

PAGE_ATTRIBUTE = "_tvm_page"

# The C method, because `PagedTensor.untyped_storage` is overridden to fault.
storage_of = torch._C.TensorBase.untyped_storage


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """Weak reference from a page to its storage.

    Its callback is `deque.append`: no Python code in a finaliser.
    """

    __slots__ = ("page",)

    page: Page


def page_of_storage(storage: torch.UntypedStorage) -> Page | None:
    """The page that hangs on the storage, or None while it is ordinary memory."""
    return cast("Page | None", getattr(storage, PAGE_ATTRIBUTE, None))


def page_of(tensor: torch.Tensor) -> Page | None:
    """The page of the tensor's storage, or None for an unpaged or non-strided tensor."""
    try:
        return cast("Page | None", getattr(storage_of(tensor), PAGE_ATTRIBUTE, None))
    except (NotImplementedError, RuntimeError):  # sparse and other layouts have no storage
        return None


def unbind(storage: Any) -> None:
    """The storage is no page any more."""
    del storage._tvm_page
