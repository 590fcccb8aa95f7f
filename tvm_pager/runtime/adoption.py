"""Live tensors become pages, and plain again, under the same Python object.

[Note: Exchange of the TensorImpl]
    `p.data = paged` and assigning `__class__` leave torch's Python dispatch key off: operations
    would run undispatched on evicted storage. So the TensorImpl is exchanged under the object
    (`torch._C._swap_tensor_impl`): `id(p)`, `isinstance(p, Parameter)`, weak references (an LSTM's
    too), the optimizer's and tied modules' references stay. What the exchange loses is put back by
    hand: hooks (the very same hook dictionaries, so that handles still remove them) and `.grad`. A
    graph that was alive at the exchange would deliver its gradient to the old TensorImpl, so that
    is refused by name.

[Note: References to a storage]
    A storage that predates paging becomes a page only if every tensor on it is exchanged: a plain
    tensor left on it would read freed memory after the first eviction. torch counts the references
    to a storage; they must equal the exchanged tensors and our own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from tvm_pager.errors import PagerError, UnpageableError
from tvm_pager.memory import PageKind
from tvm_pager.runtime.paged_tensor import PagedTensor
from tvm_pager.runtime.storage import page_of, page_of_storage, storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tvm_pager.runtime.context import PagingContext

__all__ = ["Named", "adopt", "exchange_impl", "refuse_live_graph", "restore", "tensors_of"]

_ADOPTABLE = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, PagedTensor})
_STAYS_PUT = "_tvm_stays_put"  # on storages that were looked at and left alone

_guard = torch._C._DisableTorchDispatch


@dataclass(slots=True)
class Named:
    """A tensor that belongs to something that is adopted or restored."""

    name: str
    tensor: torch.Tensor
    kind: PageKind
    owner: torch.Tensor | None = None  # whose gradient it is


@dataclass(slots=True)
class _StorageGroup:
    storage: torch.UntypedStorage
    members: list[Named] = field(default_factory=list)


def tensors_of(owners: Iterable[Any]) -> Iterator[Named]:
    """Parameters, buffers, gradients, optimizer states and bare tensors, each object once."""
    seen: set[int] = set()
    for owner in owners:
        for named in _tensors_of_one(owner):
            if id(named.tensor) not in seen:
                seen.add(id(named.tensor))
                yield named


def _tensors_of_one(owner: Any) -> Iterator[Named]:
    if isinstance(owner, torch.nn.Module):
        for name, parameter in owner.named_parameters(remove_duplicate=True):
            yield from _with_gradient(name, parameter)
        for name, buffer in owner.named_buffers():
            yield Named(name, buffer, PageKind.BUFFER)
    elif isinstance(owner, torch.optim.Optimizer):
        for index, group in enumerate(owner.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield from _with_gradient(f"param_groups[{index}][{position}]", parameter)
        for position, state in enumerate(owner.state.values()):
            if isinstance(state, dict):
                for name, value in state.items():
                    for tensor in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(tensor, torch.Tensor):
                            yield Named(f"state[{position}].{name}", tensor, PageKind.OPT_STATE)
    elif isinstance(owner, torch.Tensor):
        yield from _with_gradient("tensor", owner)
    else:
        raise UnpageableError(
            f"page() and unpage() take modules, optimizers and tensors, not {type(owner).__name__}"
        )


def _with_gradient(name: str, tensor: torch.Tensor) -> Iterator[Named]:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    yield Named(name, tensor, PageKind.PARAM if is_parameter else PageKind.OTHER)
    if tensor.is_leaf and tensor.grad is not None:
        yield Named(f"{name}.grad", tensor.grad, PageKind.GRAD, tensor)


def adopt(context: PagingContext, owners: Iterable[Any], *, copy: bool = False) -> int:
    """Makes pages of all that `owners` hold on the pager's device; returns their number.

    Tensors that cannot be paged stay as they are, with one notice per kind. Paging twice is a
    no-op. Blocks while pages are evicted to make room.

    Raises:
        PagerError: a tensor is held by a graph that is alive (named), or belongs to another pager.
    """
    groups: dict[int, _StorageGroup] = {}
    for named in tensors_of(owners):
        tensor = named.tensor
        if is_lazy(tensor):
            continue  # adopted at its module's entry, once it has a shape
        page = page_of(tensor)
        if page is not None:
            if page.pager is not context:
                raise PagerError(
                    f"{named.name} is paged by another pager; call that pager's unpage() first"
                )
            page.kind = named.kind
            continue
        if not _is_pageable(context, named):
            continue
        storage = storage_of(tensor)
        groups.setdefault(storage._cdata, _StorageGroup(storage)).members.append(named)
    for group in groups.values():
        for named in group.members:
            refuse_live_graph(named)
    num_adopted = 0
    with torch.no_grad():
        for group in groups.values():
            num_adopted += _adopt_group(context, group, copy=copy)
    return num_adopted


def _is_pageable(context: PagingContext, named: Named) -> bool:
    tensor = named.tensor
    if type(tensor) not in _ADOPTABLE:
        context.notice_once(
            f"tensors of the class {type(tensor).__name__} are not paged (first seen: {named.name})"
        )
        return False
    if tensor.layout is not torch.strided:
        context.notice_once(f"{tensor.layout} tensors are not paged (first seen: {named.name})")
        return False
    return context.owns_device(tensor)


def refuse_live_graph(named: Named) -> None:
    """Raises PagerError if a graph that is alive would deliver a gradient to the TensorImpl."""
    if type(named.tensor) is PagedTensor:
        return
    num_references = named.tensor._use_count()  # type: ignore[attr-defined]
    known = 2 if named.kind is PageKind.GRAD else 1  # a gradient is also held by its parameter
    if num_references > known or not named.tensor.is_leaf:
        raise PagerError(
            f"{named.name} is held by an autograd graph that is alive ({num_references} "
            "references): its gradient would be lost. Call page() before the forward pass, or "
            "drop the loss and outputs first"
        )


def is_adoptable(context: PagingContext, tensor: torch.Tensor) -> bool:
    """Whether an unpaged tensor could become a page, as far as a look at it alone can tell.

    Cheap.
    """
    if type(tensor) not in _ADOPTABLE or tensor.layout is not torch.strided:
        return False  # foreign, lazy, sparse
    try:
        storage = storage_of(tensor)
    except NotImplementedError:  # the wrappers of torch.func
        return False
    return (
        page_of_storage(storage) is None
        and context.owns_device(tensor)
        and not getattr(storage, _STAYS_PUT, False)
    )


def _adopt_group(context: PagingContext, group: _StorageGroup, *, copy: bool) -> int:
    storage = group.storage
    # One per exchanged tensor, and one for the Python object that `group` holds.
    expected = len(group.members) + 1
    counted = torch._C._storage_Use_Count(storage._cdata)
    first = group.members[0]
    if counted > expected:
        setattr(storage, _STAYS_PUT, True)
        context.notice_once(
            "storages that tensors outside the model look at are not paged and stay where they "
            f"are (first seen: {first.name}, {counted} references where {expected} are known)"
        )
        return 0
    if not storage.resizable() and not copy:
        setattr(storage, _STAYS_PUT, True)
        context.stays_put(storage)
        return 0
    core = context.core
    with core.lock:
        # Its bytes are on the device already; what the budget lacks is evicted before it enters the
        # books.
        nbytes = -(-storage.nbytes() // 512) * 512
        core.drain()
        core.commit(nbytes, f"page({first.name})")
        if context.is_cpu:
            core.make_room(nbytes, f"page({first.name})")
        if not storage.resizable():
            storage = _copy_of(context, storage, first)
        context.adopt_storage(storage, first.kind)
        for named in group.members:
            _exchange(named, PagedTensor, storage)
        if not context.is_cpu:
            # Its bytes were there before, beside the pages, and so are those of the groups to come:
            # what can be evicted by now goes, and the rest of the model follows.
            core.make_room_if_possible(f"page({first.name})")
    return len(group.members)


def _copy_of(
    context: PagingContext, storage: torch.UntypedStorage, first: Named
) -> torch.UntypedStorage:
    """A resizable storage with the same bytes: those of `from_pretrained` cannot shrink.

    All references that torch knows are exchanged, so only a numpy array or file mapping behind it
    could tell.
    """
    context.notice_once(
        "storages that torch cannot resize (safetensors, gguf, numpy, mmap) were copied into "
        "pages by page(); writes through the arrays behind them are no longer seen (first seen: "
        f"{first.name})"
    )
    with _guard():
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=context.device)
        copy.copy_(torch.empty(0, dtype=torch.uint8, device=context.device).set_(storage))
    return storage_of(copy)


def restore(context: PagingContext | None, owners: Iterable[Any]) -> int:
    """Makes plain tensors of all pages that `owners` hold, same objects; returns their number.

    Their bytes leave the books: from then on they are outside every budget. Blocks for the faults.

    Raises:
        PagerError: a tensor is held by a graph that is alive (named).
    """
    items = list(tensors_of(owners))
    paged = [named for named in items if isinstance(named.tensor, PagedTensor)]
    for named in paged:
        known = 2 if named.kind is PageKind.GRAD else 1
        num_references = named.tensor._use_count()  # type: ignore[attr-defined]
        if num_references > known or not named.tensor.is_leaf:
            raise PagerError(
                f"{named.name} is held by an autograd graph that is alive: its gradient would be "
                "lost. Call unpage() after backward, or drop the loss and outputs first"
            )
    with torch.no_grad():
        for named in items:
            tensor = named.tensor
            page = page_of(tensor)
            if page is not None and (context is None or page.pager is context):
                owner: PagingContext = page.pager
                with owner.core.lock:
                    owner.core.drain()
                    owner.fault_in(page, f"unpage({named.name})")
                    owner.forget_storage(storage_of(tensor))
            if isinstance(tensor, PagedTensor):  # others lie on pages too: runtime/own_classes.py
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                cls = torch.nn.Parameter if is_parameter else torch.Tensor
                _exchange(named, cls, storage_of(tensor))
    return len(paged)


def _exchange(named: Named, cls: type[torch.Tensor], storage: torch.UntypedStorage) -> None:
    """Puts a TensorImpl of class `cls` on `storage` under the object."""
    tensor = named.tensor
    with _guard(), torch.no_grad():
        replacement = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        replacement.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            replacement = replacement.conj()
        if tensor.is_neg():
            replacement = replacement._neg_view()
    exchange_impl(named, cls, replacement)


def exchange_impl(named: Named, cls: type[torch.Tensor], replacement: torch.Tensor) -> None:
    """Puts the TensorImpl of the plain tensor `replacement`, made `cls`, under the object.

    See [Note: Exchange of the TensorImpl].
    """
    tensor = named.tensor
    if named.owner is not None:
        named.owner.grad = None  # it holds the TensorImpl that is about to go
    gradient = tensor.grad
    requires_grad = tensor.requires_grad
    hooks = tensor._backward_hooks
    accumulate_hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    with _guard(), torch.no_grad():
        if cls is PagedTensor:
            replacement = torch.Tensor._make_subclass(PagedTensor, replacement)
        torch._C._autograd._unsafe_set_version_counter((replacement,), (tensor._version,))
    tensor.grad = None
    original = tensor.__class__
    tensor.__class__ = cls
    replacement.__class__ = original
    torch._C._swap_tensor_impl(tensor, replacement)
    if cls is PagedTensor and is_parameter:
        tensor._is_param = True
    elif "_is_param" in tensor.__dict__:
        del tensor._is_param
    tensor.requires_grad_(requires_grad)
    if gradient is not None:
        tensor.grad = gradient
    if hooks is not None:
        tensor._backward_hooks = hooks
    if accumulate_hooks is not None:
        tensor._post_accumulate_grad_hooks = accumulate_hooks
    if named.owner is not None:
        named.owner.grad = tensor
