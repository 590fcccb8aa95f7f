"""What an operation gave: storages that it created become pages, what belongs to others does not.

An unpaged argument stays unpaged, and so do its views: `total += paged_loss` must not page `total`,
whose other references would read freed memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tvm_pager.runtime.storage import PAGE_ATTRIBUTE, page_of_storage, storage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.runtime.context import PagingContext
    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["TensorClass", "compare_sizes", "count_versions", "tensor_class", "wrap", "wrap_tensor"]

_NEVER_PAGED = frozenset(
    {
        # torch keeps it in a cache of its own, for the life of the process.
        "aten::_cudnn_init_dropout_state.default",
        # Their storage holds a C++ object, not bytes.
        "aten::fbgemm_pack_gemm_matrix_fp16.default",
        "aten::fbgemm_pack_quantized_matrix.default",
        "aten::fbgemm_pack_quantized_matrix.KN",
    }
)

_Tensor = torch.Tensor


class TensorClass:
    """The class of paged tensors, told by paged_tensor.py, which nothing here may import."""

    paged: type[torch.Tensor] = torch.Tensor
    plain: ClassVar[set[type]] = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}

    def register(self, cls: type[torch.Tensor]) -> None:
        self.paged = cls
        self.plain.add(cls)


tensor_class = TensorClass()


def wrap(
    context: PagingContext,
    plan: OperatorPlan,
    out: Any,
    args: Sequence[Any],
    unpaged: list[torch.Tensor],
) -> Any:
    """Makes pages of the tensors in an operator's result, however lists and tuples nest them."""
    cls = out.__class__
    if cls is _Tensor:
        return wrap_tensor(context, plan, out, args, unpaged)
    if cls is list:
        return [wrap(context, plan, item, args, unpaged) for item in out]
    if cls is tuple:
        return tuple([wrap(context, plan, item, args, unpaged) for item in out])
    return out


def wrap_tensor(
    context: PagingContext,
    plan: OperatorPlan,
    out: torch.Tensor,
    args: Sequence[Any],
    unpaged: list[torch.Tensor],
) -> torch.Tensor:
    """A result as a paged tensor, or as it is where it belongs to an argument of `unpaged`."""
    try:
        storage = storage_of(out)
    except (NotImplementedError, RuntimeError):
        context.pass_through(out)
        return out
    if getattr(storage, PAGE_ATTRIBUTE, None) is None:
        if not context.owns_device(out) or out._is_zerotensor():
            return out  # elsewhere, or a zero of autograd's that has no bytes at all
        for tensor in unpaged:
            if tensor is out or tensor.__class__ not in tensor_class.plain:
                return out  # what a foreign subclass computes, it also converts to itself
            if plan.returns_alias and tensor.layout is not torch.strided:
                return out  # perhaps a component of it, which its kernels read without dispatch
            if _shares(tensor, storage):
                return _like(tensor, out)
        if plan.name in _NEVER_PAGED or context.adopt_storage(storage) is None:
            return out
    elif args and args[0] is out:
        return out  # type: ignore[no-any-return]  # narrowed to an element of `args`
    return out.as_subclass(tensor_class.paged)


def _like(tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Views of an unpaged tensor stay unpaged and of its class: code making Parameters insists."""
    return out.as_subclass(tensor_class.paged) if tensor.__class__ is tensor_class.paged else out


def _shares(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    try:
        return storage_of(tensor) is storage
    except (NotImplementedError, RuntimeError):
        return False


def count_versions(written: list[torch.Tensor]) -> None:
    """On the CPU `_foreach_*_` loops over in-place operators, and it is those that count versions.

    Below dispatch they do not, so it is done here. (The CUDA kernels count none, in plain torch
    neither.)
    """
    torch.autograd.graph.increment_version(
        [tensor for tensor in written if tensor.is_cpu and not tensor.is_inference()]
    )


def compare_sizes(context: PagingContext, written: list[torch.Tensor]) -> None:
    """Tells the books where `resize_` or `out=` has changed a storage; evicts if that overdrew."""
    for tensor in written:
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):
            continue
        page = page_of_storage(storage)
        if page is not None and storage.nbytes() != page.nbytes:
            context.core.resized(page, storage.nbytes())
            if context.core.free_bytes < 0:
                context.core.make_room(0, "resize")
