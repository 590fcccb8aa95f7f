"""One test per rule about other parts of torch that see, replace or compile operations."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tvm_pager
from tests.trials.harness import (
    Run,
    assert_nothing_left,
    batch,
    everything,
    mlp,
    same,
    seed_all,
    small_pager,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_pass_through(tmp_path: Path) -> None:
    def f(run: Run) -> Any:
        indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
        values = torch.arange(1.0, 4.0)
        sparse = torch.sparse_coo_tensor(indices, values, (3, 3))
        dense = batch(0, rows=3, width=3)
        run.evict()
        product = sparse @ dense
        run.evict()
        again = (sparse + sparse).coalesce()
        run.evict()
        rows = sparse.to_sparse_csr()
        run.evict()
        values.mul_(1.0)
        back = (rows.to_dense(), again.to_dense(), dense.to_sparse().to_dense())
        return sparse, product, again, back

    same(f, tmp_path, check=2)


@pytest.mark.timeout(120)
def test_compilation_over_paged_parameters_is_refused_by_name(tmp_path: Path) -> None:
    model = mlp(num_layers=1)
    with small_pager(tmp_path) as pager:
        tvm_pager.page(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch does not like global module hooks
            compiled = torch.compile(model, backend="eager")
            with pytest.raises(tvm_pager.PagerError, match=r"torch\.compile"):
                compiled(batch(0))
        pager.evict_all()
        assert model(batch(0)).shape == (8, 64)  # the plain call works
        del compiled, model
        torch._dynamo.reset()
    assert_nothing_left(tmp_path)


class Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def one_step(run: Run, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(run, model, optimizer, steps=2)
    return losses, everything(model, optimizer)


@pytest.mark.parametrize("where", ["above", "below"])
def test_other_dispatch_modes_see_each_operation_once(where: str, tmp_path: Path) -> None:
    seed_all(0)
    with Listening() as expected:
        one_step(Run(None), mlp(num_layers=2))

    seed_all(0)
    got = Listening()
    if where == "above":
        with small_pager(tmp_path) as pager, got:
            one_step(Run(pager), mlp(num_layers=2))
    else:
        with got, small_pager(tmp_path) as pager:
            one_step(Run(pager), mlp(num_layers=2))
    known = set(expected.names) - {"aten.detach.default"}  # nn.Parameter makes one of a subclass
    wanted = [name for name in expected.names if name in known]
    assert [name for name in got.names if name in known] == wanted
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("where", ["above", "below"])
def test_floating_point_operations_are_counted_once(where: str, tmp_path: Path) -> None:
    seed_all(0)
    with FlopCounterMode(display=False) as expected:
        one_step(Run(None), mlp(num_layers=2))
    seed_all(0)
    got = FlopCounterMode(display=False)
    if where == "above":
        with small_pager(tmp_path) as pager, got:
            one_step(Run(pager), mlp(num_layers=2))
    else:
        with got, small_pager(tmp_path) as pager:
            one_step(Run(pager), mlp(num_layers=2))
    assert got.get_total_flops() == expected.get_total_flops() > 0
    assert got.get_flop_counts()["Global"] == expected.get_flop_counts()["Global"]
    assert_nothing_left(tmp_path)


def test_a_mode_that_computes_may_use_pages(tmp_path: Path) -> None:
    """A mode that replaces an operation by others sees, and gives back, tensors that are pages."""

    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            return out + out if func is torch.ops.aten.tanh.default else out

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        with Doubling():
            out = model(batch(0))
            run.evict()
            out.sum().backward()
        return out, everything(model)

    same(f, tmp_path)
