"""Raw access: plain torch and numpy aliases of a page, which pin it for as long as they live.

[Note: Aliases through a buffer of ours]
    A real `.numpy()` makes a storage unresizable for good. So an alias is built over a small buffer
    object that numpy keeps as the array's base: while any array or tensor over it lives the page is
    held on the device, and its finaliser queues the release. Writes through an alias cannot be
    seen, so the page counts as written when the alias is made and again when it dies; while it
    lives the page cannot leave anyway.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from tvm_pager.errors import UnpageableError
from tvm_pager.runtime.storage import page_of, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import Page
    from tvm_pager.runtime.context import PagingContext

__all__ = ["AbsentStorage", "plain_alias", "plain_copy", "read", "recovered", "storage_alias"]

_T = TypeVar("_T")

_guard = torch._C._DisableTorchDispatch


class _ExportedBytes:
    """The buffer object: holds the page's storage, and the page on the device, until it dies."""

    def __init__(self, context: PagingContext, page: Page) -> None:
        self._page: Page | None = None  # `__del__` runs also where the fault below fails
        context.fault_in(page, "raw access")
        context.core.hold(page)
        context.core.written(page)
        self._storage = page.memory()
        self._page = page
        self._context = context
        interface = {
            "data": (self._storage.data_ptr(), False),
            "shape": (page.nbytes,),
            "typestr": "|u1",
            "version": 3,
            "strides": None,
        }
        if context.is_cpu:
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface

    def __del__(self) -> None:
        # Runs anywhere, also inside the pager's lock: see [Note: Finalisers] in paging/pager.py.
        if self._page is not None:
            self._context.core.dead_exports.append(self._page)


class AbsentStorage(torch.UntypedStorage):
    """What `untyped_storage()` gives where pins leave no room: the page's identity, not its bytes.

    `data_ptr()` is the page's virtual address: unique for each page of a run and no address of any
    process, so that scans for shared storages (safetensors, save_pretrained) see the same groups as
    in plain torch, however large the model, and a read through it crashes at once.
    """

    _tvm_va: int
    _tvm_nbytes: int

    def data_ptr(self) -> int:
        return self._tvm_va

    def nbytes(self) -> int:
        return self._tvm_nbytes

    def size(self) -> int:
        return self._tvm_nbytes

    def __len__(self) -> int:
        return self._tvm_nbytes


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the same bytes, detached. Blocks for the fault.

    The page is held while the alias lives.
    """
    page = page_of(tensor)
    if page is None:
        with _guard():
            return _rebuilt(storage_of(tensor), tensor)
    context: PagingContext = page.pager
    with context.core.lock, _guard(), torch.no_grad():
        context.core.drain()
        flat = _flat_bytes(context, page)
        return _view(flat, tensor)


def read(tensor: torch.Tensor, look: Callable[[torch.Tensor], _T]) -> _T:
    """Lets `look` see a plain alias, and no longer: no other thread finds the page held. Blocks."""
    page = page_of(tensor)
    if page is None:
        return look(plain_alias(tensor))
    with page.pager.core.lock:
        return look(plain_alias(tensor))


def recovered(tensor: torch.Tensor) -> torch.Tensor:
    """A plain CPU copy of a paged tensor, also after a `close` that found no room for it."""
    page = page_of(tensor)
    kept = page.kept if page is not None else None
    if kept is None:
        return plain_copy(tensor).cpu()
    item = tensor.element_size()
    flat = kept[: kept.numel() // item * item].view(tensor.dtype)
    seen = torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())
    return seen.clone()


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A detached plain tensor over a copy of the page outside the pager, same layout.

    Tensors that share a page share the copy too, while no operation comes between: so files keep
    the sharing.
    """
    page = page_of(tensor)
    if page is None:
        return plain_alias(tensor).clone()
    context: PagingContext = page.pager
    with context.core.lock, _guard(), torch.no_grad():
        context.core.drain()
        made = context.copies.get(page.id)
        flat = made[1]() if made is not None and made[0] == context.core.operation_index else None
        if flat is None:
            # Not by way of an alias, which counts as a write: a state can be saved on a disk that
            # refuses writes only as long as pages that are clean stay so.
            context.fault_in(page, "copy")
            flat = torch.empty(page.nbytes, dtype=torch.uint8, device=context.device)
            flat.copy_(torch.empty(0, dtype=torch.uint8, device=context.device).set_(page.memory()))
            # The storage's object lives as long as any tensor on it, the tensor's only as long as
            # we look.
            context.copies[page.id] = (context.core.operation_index, _weak_flat(flat))
        return _view(flat, tensor)


def _weak_flat(flat: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    reference = weakref.ref(storage_of(flat))

    def get() -> torch.Tensor | None:
        storage = reference()
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    return get


def storage_alias(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The tensor's storage for use outside dispatch: a plain alias, held until the next boundary.

    Addresses of storages are compared (by scans for shared weights), so a page whose address was
    seen must keep it. When escaped pointers hold half of the budget, further pages give an
    `AbsentStorage` until the next boundary.
    """
    page = page_of(tensor)
    if page is None:
        return storage_of(tensor)
    context: PagingContext = page.pager
    with context.core.lock:
        context.core.drain()
        if not context.may_expose(page):
            context.mark_absent(page)
            storage = AbsentStorage(0)  # type: ignore[no-untyped-call]
            storage._tvm_va = context.core.table.address_of(page)
            storage._tvm_nbytes = page.nbytes
            return storage
        context.fault_in(page, "untyped_storage")
        context.expose(page)
        alias: Any = storage_of(plain_alias(tensor))
        alias.resize_ = _refuse_resize
        alias._tvm_origin = page.memory()
        return alias  # type: ignore[no-any-return]  # Any, to hang attributes on it


def _refuse_resize(size: int) -> None:
    raise UnpageableError(
        f"resize_({size}) of the storage of a paged tensor: resize the tensor instead, or unpage() "
        "it first"
    )


def _flat_bytes(context: PagingContext, page: Page) -> torch.Tensor:
    if not page.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=context.device)
    exported = _ExportedBytes(context, page)
    if context.is_cpu:
        return torch.from_numpy(np.asarray(exported))
    return torch.as_tensor(exported, device=context.device)


def _view(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Looks at bytes the way `like` looks at its storage; conjugate and negative bits included."""
    item = like.element_size()
    whole = flat[: flat.numel() // item * item].view(like.dtype)
    out = torch.as_strided(whole, like.size(), like.stride(), like.storage_offset())
    if like.is_conj():
        out = out.conj()
    return out._neg_view() if like.is_neg() else out


def _rebuilt(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the very same storage."""
    plain = torch.empty(0, dtype=like.dtype, device=like.device)
    plain.set_(storage, like.storage_offset(), like.size(), like.stride())
    if like.is_conj():
        plain = plain.conj()
    return plain._neg_view() if like.is_neg() else plain
