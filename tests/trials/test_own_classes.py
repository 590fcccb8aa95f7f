"""Parameters of a class of their own that are made over pages: class, fields and bytes are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import tvm_pager
from tests.trials.harness import KIB, Run, assert_equal, everything, frozen, mlp, same, small_pager
from tvm_pager.memory import Tier

if TYPE_CHECKING:
    from pathlib import Path


class Subclassed(nn.Parameter):
    """As most libraries do it."""

    extra: int

    def __new__(cls, data: torch.Tensor, extra: int) -> Subclassed:
        self = torch.Tensor._make_subclass(cls, data, True)
        self.extra = extra
        return self

    def doubled(self) -> torch.Tensor:
        return self * 2


class Inherited(Subclassed):
    """By Parameter's own `__new__`, with an `__init__` that Python calls for instances only."""

    def __new__(cls, data: torch.Tensor, extra: int) -> Inherited:
        return nn.Parameter.__new__(cls, data, True)

    def __init__(self, data: torch.Tensor, extra: int) -> None:
        self.extra = extra


class Viewed(Subclassed):
    """A leaf by `as_subclass`."""

    def __new__(cls, data: torch.Tensor, extra: int) -> Viewed:
        self = data.detach().as_subclass(cls).requires_grad_()
        self.extra = extra
        return self


CLASSES = pytest.mark.parametrize("cls", [Subclassed, Inherited, Viewed])


@CLASSES
def test_a_parameter_of_its_own_class_can_be_made_in_a_pager(
    cls: type[Subclassed], tmp_path: Path
) -> None:
    def f(run: Run) -> Any:
        model = mlp(num_layers=3)
        data = torch.randn(64, 64)
        run.evict()
        weight = cls(data, 3)
        assert type(weight) is cls
        assert isinstance(weight, nn.Parameter)
        assert weight.extra == 3
        model[0].weight = weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            run.evict()
            model(torch.ones(4, 64)).square().mean().backward()
            run.evict()
            optimizer.step()
        data.add_(1)  # the same bytes, as in plain torch
        run.evict()
        assert model[0].weight is weight
        return weight.doubled(), data, weight._version, everything(model, optimizer)

    same(f, tmp_path, device=96 * KIB)


@CLASSES
def test_it_stays_on_the_device_which_is_said_once(cls: type[Subclassed], tmp_path: Path) -> None:
    with small_pager(tmp_path) as pager:
        data = torch.full((64, 64), 2.0)
        pager.evict_all()
        first = cls(data, 1)
        assert pager._core.table.frames[Tier.HOST].used_bytes == 0, "no copy that could get stale"
        second = cls(torch.ones(4), 2)
        pager.page(first, second)
        pager.evict_all()
        assert pager.residency(first) is Tier.DEVICE
        with torch.no_grad():
            first.numpy().fill(3.0)  # a pointer, with nothing to bring it back first
        assert data.sum().item() == 3.0 * 64 * 64
        (notice,) = [text for text in pager.stats().notices if cls.__name__ in text]
        assert "not paged" in notice
        pager.check_invariants()
    assert first.sum().item() == 3.0 * 64 * 64


@CLASSES
def test_over_a_page_where_no_context_is_open(cls: type[Subclassed], tmp_path: Path) -> None:
    model = mlp(num_layers=4)
    expected = frozen(model[0].weight * 2)
    pager = small_pager(tmp_path, device=32 * KIB)
    pager.page(model)
    pager.evict_all()
    weight = cls(model[0].weight, 1)
    pager.evict_all()
    assert_equal(expected, frozen(weight.doubled()))
    pager.close()
    assert_equal(expected, frozen(cls(model[0].weight, 1).doubled()))


def test_a_page_that_cannot_come_back_is_an_error_by_name(tmp_path: Path) -> None:
    with small_pager(tmp_path) as pager:
        data = torch.full((128, 64), 2.0)
        pager.evict_all()
        held = [torch.ones(64, 64) for _ in range(3)]
        arrays = [tensor.numpy() for tensor in held]
        with pytest.raises(tvm_pager.BudgetError, match="of the class Subclassed"):
            Subclassed(data, 1)
        del arrays
        assert Subclassed(data, 1).sum().item() == 2.0 * 128 * 64


def test_a_tensor_that_a_graph_made_keeps_its_graph(tmp_path: Path) -> None:
    def f(run: Run) -> Any:
        leaf = torch.ones(64, 64, requires_grad=True)
        product = leaf * 3
        run.evict()
        seen = product.as_subclass(Viewed)
        assert type(seen) is Viewed
        run.evict()
        seen.square().sum().backward()
        return leaf.grad

    same(f, tmp_path)


def test_lazy_modules_can_be_made_in_a_pager(tmp_path: Path) -> None:
    def f(run: Run) -> Any:
        model = nn.Sequential(nn.LazyLinear(64), nn.LazyBatchNorm1d(), nn.LazyLinear(64))
        with pytest.raises(ValueError, match="uninitialized"):
            model[0].weight.sum()
        run.evict()
        model(torch.ones(4, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            run.evict()
            model(torch.ones(4, 64)).square().mean().backward()
            run.evict()
            optimizer.step()
        assert type(model[0]) is nn.Linear
        return everything(model, optimizer)

    stats = same(f, tmp_path, device=48 * KIB)
    assert not [text for text in stats.notices if "class" in text]


def test_unpage_takes_their_bytes_out_of_the_books(tmp_path: Path) -> None:
    """Parameters that lazy modules filled in a pager, too: a class of torch's, over a page."""
    with small_pager(tmp_path) as pager:
        own = Subclassed(torch.full((64, 64), 2.0), 1)
        lazy = nn.LazyLinear(4)
        expected = frozen(lazy(torch.ones(2, 64)))
        pager.evict_all()
        pager.unpage(own, lazy)
        assert [pager.is_paged(t) for t in (own, lazy.weight, lazy.bias)] == [False] * 3
        pager.evict_all()
        pager.check_invariants()
    assert type(own) is Subclassed
    assert own.sum().item() == 2.0 * 64 * 64
    assert_equal(expected["data"], frozen(lazy(torch.ones(2, 64)))["data"])


def test_torchs_own_classes_are_made_as_before(tmp_path: Path) -> None:
    with small_pager(tmp_path) as pager:
        data = torch.ones(8)
        for parameter in (
            nn.Parameter(data),
            nn.Parameter(),
            nn.Parameter.__new__(nn.Parameter, data, False),
            torch.Tensor._make_subclass(nn.Parameter, data, True),
        ):
            assert type(parameter) is tvm_pager.PagedTensor
            assert isinstance(parameter, nn.Parameter)
            assert pager.is_paged(parameter)
        assert type(nn.Buffer(data)) is tvm_pager.PagedTensor
        assert type(data.as_subclass(torch.Tensor)) is tvm_pager.PagedTensor
        assert pager.stats().notices == []
    plain = torch.zeros(3)
    assert type(torch.Tensor._make_subclass(nn.Parameter, plain)) is nn.Parameter
    assert not torch.Tensor._make_subclass(nn.Parameter, plain).requires_grad
    assert Inherited(plain, 2).data_ptr() == plain.data_ptr()
    with pytest.raises(TypeError):
        torch.Tensor._make_subclass(nn.Parameter, 3)  # type: ignore[arg-type]
