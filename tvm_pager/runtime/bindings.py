"""The quick way into an operator: the Python function that torch generated for it.

[Note: Which overload]
    An `OpOverload` boxes its arguments by schema, which costs 0.5 to 1.1 us more than the function
    of the same name in `torch` (CPU, torch 2.13: `view` 1.6 against 0.45 us, `add` 1.9 against
    1.3). Such a function chooses the overload by its arguments, so it stands for an overload only
    where that choice is always the same: `torch.add(x, 2)` is `add.Tensor`, whoever asked for
    `add.Scalar`. The names below are those that were seen to give the very overload, with the very
    arguments, for all of torch's own operator samples (tests/tensor/test_bindings.py).
    Factories are not among them: they fill in a device. Keyword arguments are the same in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BOUND", "binding_of"]

# Without the namespace, which is aten; what training and inference of common models call most.
BOUND: Final = frozenset(
    """
    _log_softmax.default _log_softmax_backward_data.default _softmax.default
    _softmax_backward_data.default abs.default add.Tensor add_.Tensor
    addcdiv_.default addcmul.default addcmul_.default addmm.default amax.default as_strided.default
    baddbmm.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor bmm.default
    clamp.default clamp_min.default clone.default constant_pad_nd.default convolution.default
    copy_.default cos.default cumsum.default detach.default div.Tensor div_.Tensor dot.default
    embedding.default eq.Scalar eq.Tensor exp.default expand.default fill_.Scalar gather.default
    ge.Scalar gelu.default gt.Scalar index_select.default le.Scalar lerp_.Scalar log.default
    lt.Scalar lt.Tensor masked_fill.Scalar maximum.default mean.default mean.dim minimum.default
    mm.default mul.Tensor mul_.Tensor native_group_norm.default native_layer_norm.default ne.Scalar
    neg.default permute.default pow.Tensor_Scalar reciprocal.default relu.default repeat.default
    rsqrt.default select.int sigmoid.default silu.default sin.default sqrt.default
    squeeze.dim sub.Tensor sub_.Tensor sum.default sum.dim_IntList t.default tanh.default
    transpose.int tril.default triu.default unsqueeze.default view.default where.self zero_.default
    """.split()  # noqa: SIM905 - ninety names, and none of them needs a comment
)


def binding_of(func: Any) -> Callable[..., Any]:
    """What to call for the operator `func`; it takes the same arguments.

    At the least the operator without the Python frame of `OpOverload.__call__` (0.3 us).
    """
    quick: Callable[..., Any] = getattr(func, "_op", func)
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "aten" and f"{name}.{func._schema.overload_name or 'default'}" in BOUND:
        for owner in (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn):
            if hasattr(owner, name):
                quick = getattr(owner, name)
                break
    return quick
