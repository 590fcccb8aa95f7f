"""Composite operators, which inference mode dispatches whole, act on pages as on plain tensors.

Some choose a kernel by `requires_grad` of a view that they make themselves, some give a view, some
write in place: all of that needs torch's bookkeeping of views and versions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.trials.harness import assert_equal, frozen, small_pager


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()


# Name -> what is called with a weight, a batch whose strides cannot be folded, and a square matrix.
CASES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    # Folds the batch into one product, as the transposed weight requires a gradient.
    "linear": lambda w, x, v: F.linear(x, w),
    "matmul": lambda w, x, v: x @ w.mT,
    "flatten": lambda w, x, v: w.flatten(),
    "reshape": lambda w, x, v: w.reshape(4, -1),
    "reshape that copies": lambda w, x, v: w.t().reshape(-1),
    "contiguous": lambda w, x, v: w.contiguous(),
    "tensor_split": lambda w, x, v: w.tensor_split(2),
    "chunk": lambda w, x, v: w.chunk(2),  # one of three that note their views above dispatch
    "narrow": lambda w, x, v: w.narrow(0, 1, 2).square(),
    "matmul out": lambda w, x, v: torch.matmul(v, v.clone(), out=v),
    "movedim": lambda w, x, v: w.movedim(0, 1),
    "view_as": lambda w, x, v: w.view_as(w),
    "expand_as": lambda w, x, v: w[0].expand_as(w),
    "square_": lambda w, x, v: v.square_(),
    "square_ of a view": lambda w, x, v: v.flatten()[1:].square_(),
    "dropout_": lambda w, x, v: F.dropout(v, 0.5, inplace=True),
    "square out": lambda w, x, v: torch.square(v, out=v),
    "atleast_2d": lambda w, x, v: torch.atleast_2d(v[0]),
    # One operator, whose kernel is made of others.
    "encoder layer": lambda w, x, v: encoder()(x),
    "einsum": lambda w, x, v: torch.einsum("ijk,lk->ijl", x, w),
}


def facts(value: Any) -> Any:
    """What user code sees of the tensors beside their bytes."""
    if isinstance(value, tuple):
        return [facts(item) for item in value]
    return {"view": value._is_view(), "inference": value.is_inference(), "leaf": value.is_leaf}


def outcome(name: str, pager: Any) -> Any:
    torch.manual_seed(0)
    weight, batch = nn.Parameter(torch.randn(96, 32)), torch.randn(3, 8, 32)
    square = torch.randn(6, 6)
    if pager is not None:
        pager.evict_all()
    with torch.inference_mode():
        out = CASES[name](weight, batch.transpose(0, 1), square)
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)
    return frozen(out), facts(out), frozen(square), frozen(weight)


@pytest.mark.parametrize("device", ["1MiB", "48KiB"])
@pytest.mark.parametrize("name", CASES)
def test_composite_operators_act_as_in_plain_torch(name: str, device: str, tmp_path: Path) -> None:
    expected = outcome(name, None)
    with small_pager(tmp_path, device=device, host="1MiB") as pager:
        outcome(name, pager)  # the second call finds a known size, and may take the fast path
        assert_equal(list(expected), list(outcome(name, pager)))


@pytest.mark.parametrize("name", CASES)
def test_the_fast_path_does_too(name: str, tmp_path: Path) -> None:
    """Everything resident, and more room than any result could take."""
    expected = outcome(name, None)
    with small_pager(tmp_path, device="64MiB", host="64MiB", check=0):
        outcome(name, None)
        assert_equal(list(expected), list(outcome(name, None)))


def test_a_write_in_inference_mode_is_seen_by_autograd(tmp_path: Path) -> None:
    """Else the gradient would be that of the new value, and nobody would know."""
    with small_pager(tmp_path, device="1MiB", host="1MiB"):
        x = torch.rand(8, requires_grad=True)
        saved = x.detach() * 2
        loss = (x * saved).sum()
        with torch.inference_mode():
            saved.square_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_view_made_in_inference_mode_shares_the_version(tmp_path: Path) -> None:
    with small_pager(tmp_path, device="1MiB", host="1MiB"):
        x = torch.rand(4, 4)
        with torch.inference_mode():
            flat = x.flatten()
        flat.add_(1)
        assert x._version == flat._version == 1


def test_a_failing_operator_leaves_torch_as_it_was(tmp_path: Path) -> None:
    with small_pager(tmp_path, device="1MiB", host="1MiB"):
        x = torch.rand(4, 4)
        with torch.inference_mode():
            with pytest.raises(RuntimeError, match="shape"):
                F.linear(x, torch.rand(3, 3))
            with pytest.raises(RuntimeError, match="shape"):
                x.reshape(3, 3)
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(
            torch._C.DispatchKey.ADInplaceOrView
        )
        assert x.add_(1)._version == 1
