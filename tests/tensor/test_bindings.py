"""torch's Python functions stand for the very operators that runtime/bindings.py says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tensor.opinfo_samples import clone, samples
from tvm_pager.runtime.bindings import BOUND, binding_of


class Record(TorchDispatchMode):
    """Notes the first operation and runs it."""

    first: tuple[Any, Any, Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.first = self.first or (func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Compare(TorchDispatchMode):
    """Calls the binding of each bound operator instead of it, and compares what that dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's method has no types
        self.seen: set[str] = set()
        self.wrong: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        if name not in BOUND:
            return func(*args, **kwargs)
        self.seen.add(name)
        record = Record()
        with record:
            out = binding_of(func)(*args, **kwargs)
        if record.first is None or not same(record.first, (func, args, kwargs)):
            self.wrong.add(f"{name} became {record.first}")
        return out


def same(left: Any, right: Any) -> bool:
    """Whether both name the same tensors and equal values; nan equals nan."""
    pairs = list(zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True))
    return all(
        a is b or (type(a) is type(b) and repr(a) == repr(b) and not isinstance(a, torch.Tensor))
        for a, b in pairs
    )


def further() -> list[Callable[[], Any]]:
    """What torch's operator samples do not reach: in place, as optimizers call it."""
    x, y, z = torch.rand(4, 4), torch.rand(4, 4), torch.rand(4, 4) + 1
    return [
        lambda: x.lerp_(y, 0.25),
        lambda: x.mul_(0.9).addcmul_(y, y, value=0.1),
        lambda: x.addcdiv_(y, z, value=-0.5),
        lambda: x.addcdiv_(y, z),
        lambda: x.add_(y, alpha=0.5).sub_(y, alpha=2).div_(2.0),
        lambda: x.mul_(y).add_(1).clamp(0.25),
        lambda: x.zero_().fill_(2),
        lambda: x.copy_(y, non_blocking=True),
        lambda: (x.sqrt() / 0.5).add_(1e-8),
        lambda: torch.ops.aten._softmax_backward_data(y, y, -1, torch.float32),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_each_binding_dispatches_its_operator_with_the_same_arguments(dtype: torch.dtype) -> None:
    compare = Compare()
    for _, call, args, kwargs in samples(2, dtype, requires_grad=True):
        try:
            with compare:
                result = call(*clone(args), **clone(kwargs))
                leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
                if any(leaf.requires_grad for leaf in leaves):
                    sum(leaf.sum().abs() for leaf in leaves if leaf.requires_grad).backward()  # type: ignore[union-attr]
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue  # a sample that raises, or one that a mode cannot see
    with compare:
        for run in further():
            run()
    assert not compare.wrong
    assert len(compare.seen) > 60
    assert dtype is not torch.float32 or compare.seen == BOUND


def test_every_name_has_a_binding_and_others_have_none() -> None:
    for name in BOUND:
        base, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, base), overload)
        assert binding_of(func) is not func._op, name
    assert binding_of(torch.ops.aten.add.Scalar) is torch.ops.aten.add.Scalar._op
    assert binding_of(torch.ops.aten.add.out) is torch.ops.aten.add.out._op
