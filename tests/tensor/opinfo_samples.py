"""Forward samples of torch's own operator tests, for "paged equals plain, bit for bit" tests.

    for name, call, args, kwargs in samples(limit_per_op=2):
        torch.manual_seed(0)
        expected = call(*clone(args), **clone(kwargs))

The samples run on the CPU and give the same bits each time from the same seed; what does not is
left out below, by name and with the reason. A call keeps quiet about deprecations. A few samples
raise (a bool operand of `_foreach_sub`, a leaf that requires grad for `_foreach_zero`): compare
errors as well.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tools.operator_cases import all_opinfos, opinfo_samples, sample_label

__all__ = ["SKIPPED", "Sample", "clone", "samples"]

Sample = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_UNINITIALISED = "returns memory as it was"
_CUDA_ONLY = "runs on CUDA only"
SKIPPED = {
    "empty": _UNINITIALISED,
    "empty_like": _UNINITIALISED,
    "empty_permuted": _UNINITIALISED,
    "empty_strided": _UNINITIALISED,
    "new_empty": _UNINITIALISED,
    "new_empty_strided": _UNINITIALISED,
    "resize_": _UNINITIALISED,
    "resize_as_": _UNINITIALISED,
    "jiterator_2inputs_2outputs": _CUDA_ONLY,
    "jiterator_4inputs_with_extra_args": _CUDA_ONLY,
    "jiterator_binary": _CUDA_ONLY,
    "jiterator_binary_return_by_ref": _CUDA_ONLY,
    "jiterator_unary": _CUDA_ONLY,
}


def samples(
    limit_per_op: int = 1, dtype: torch.dtype = torch.float32, *, requires_grad: bool = False
) -> Iterator[Sample]:
    """The first samples of each operator as (name, call, args, kwargs).

    Names are unique and the same in each run. An operator that does not know `dtype` gets int64 or
    bool. With `requires_grad`, the differentiable arguments of differentiable operators are leaves
    that require it. Seeds torch, numpy and `random`.
    """
    for op in all_opinfos():
        if op.name in SKIPPED:
            continue
        choices = (dtype, torch.int64, torch.bool)
        chosen = next((each for each in choices if each in op.supported_dtypes("cpu")), None)
        if chosen is None:
            continue
        wants_grad = requires_grad and op.supports_autograd and chosen.is_floating_point
        # Made at once, because a generator must not be suspended with the filter changed.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = list(opinfo_samples(op, "cpu", chosen, limit_per_op, wants_grad))
        for index, sample in enumerate(given):
            yield (
                f"{sample_label(op, chosen)}[{index}]",
                functools.partial(_quietly, op.op),
                (sample.input, *sample.args),
                dict(sample.kwargs),
            )


def clone(tree: Any) -> Any:
    """A copy of arguments: the same bits, strides, offsets and sharing of storage, nothing shared.

    Leaves that require grad become new leaves that do.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if tensor.layout is not torch.strided or tensor._is_zerotensor():
            return plain.clone().requires_grad_(tensor.requires_grad)
        storage = plain.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        new = torch.empty(0, dtype=plain.dtype)
        with torch.no_grad():
            new.set_(storages[storage._cdata], plain.storage_offset(), plain.shape, plain.stride())
        if plain.is_conj():
            new = torch._conj(new)
        if plain.is_neg():
            new = torch._neg_view(new)
        return new.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copy, tree)


def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)
