"""Every operator of torch's own samples gives the same bits on pages that are off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import tvm_pager
from tests.tensor.opinfo_samples import Sample, clone, samples

NUM_CHUNKS = 4

_EIGENVECTORS = (
    "torch computes eigen- or singular vectors too for a tensor subclass: another kernel"
)
# Operators whose plain and paged results may differ, each with the reason.
_FORMULA = "autograd takes another formula for a tensor subclass: -0.0 for 0.0, no phase check"
EXEMPT = {
    "linalg.eig": _FORMULA,
    "linalg.svdvals": _EIGENVECTORS,
    "min.reduction_no_dim": _FORMULA,
    "linalg.cond": _EIGENVECTORS,
    "linalg.eigvalsh": _EIGENVECTORS,
    "norm.nuc": _EIGENVECTORS,
}


def facts(tree: Any) -> list[Any]:
    """What two runs must agree on: for tensors dtype, shape, strides and bytes."""
    out: list[Any] = []
    for leaf in pytree.tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            out.append(repr(leaf))
            continue
        plain = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
        layout = plain.stride() if leaf.layout is torch.strided else None
        data = plain.resolve_conj().resolve_neg().contiguous().clone()
        out.append(
            (leaf.dtype, tuple(leaf.shape), layout, data.reshape(-1).view(torch.uint8).tolist())
        )
    return out


def outcome(sample: Sample, args: Any, kwargs: Any, evict: Any) -> list[Any]:
    """Results, arguments after the call and gradients; or the error's class."""
    torch.manual_seed(0)
    try:
        result = sample[1](*args, **kwargs)
        evict()
        differentiable = [
            leaf
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if differentiable:
            sum(leaf.sum().abs() for leaf in differentiable).backward()
            evict()
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        if isinstance(error, tvm_pager.PagerError):
            raise
        return [type(error).__name__]
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    grads = [x.grad for x in leaves if x.is_leaf and x.grad is not None]
    return [facts(result), facts(leaves), facts(grads)]


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
@pytest.mark.parametrize("requires_grad", [False, True], ids=["forward", "backward"])
def test_operators_give_the_same_bits_on_evicted_pages(
    chunk: int, requires_grad: bool, tmp_path: Path
) -> None:
    wrong: list[str] = []
    num_run = 0
    for index, sample in enumerate(samples(1, requires_grad=requires_grad)):
        if index % NUM_CHUNKS != chunk or sample[0].split(".float")[0] in EXEMPT:
            continue
        plain_args, plain_kwargs = clone(sample[2]), clone(sample[3])
        expected = outcome(sample, plain_args, plain_kwargs, lambda: None)
        with tvm_pager.Pager(device="64MiB", host="64MiB", torch_device="cpu") as pager:
            args, kwargs = clone(sample[2]), clone(sample[3])
            leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            for leaf in leaves:
                pager.page(leaf)
            pager.evict_all()
            got = outcome(sample, args, kwargs, pager.evict_all)
            pager.check_invariants()
            if got != expected:
                wrong.append(sample[0])
            num_run += 1
            del args, kwargs, leaves, got
    assert num_run > 100
    assert not wrong, f"{len(wrong)} of {num_run} differ: {wrong}"
