"""One test per rule about single operations: what they write, and what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import tvm_pager
from tests.trials.harness import (
    KIB,
    Run,
    assert_nothing_left,
    batch,
    everything,
    mlp,
    same,
    small_pager,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --- dirty bits ---


@pytest.mark.parametrize("norm", ["batch", "sync batch", "instance", "functional"])
def test_running_statistics_survive_eviction(norm: str, tmp_path: Path) -> None:
    """These operations write their running statistics without saying so in their schema."""

    def f(run: Run) -> Any:
        if norm == "functional":
            mean, var = torch.zeros(4), torch.ones(4)
        else:
            kind = {"batch": nn.BatchNorm1d, "sync batch": nn.SyncBatchNorm}.get(norm)
            layer = kind(4) if kind else nn.InstanceNorm1d(4, track_running_stats=True)
            run.page(layer)
            if norm == "sync batch":
                layer.eval()
        outputs = []
        for step in range(4):
            x = batch(step, rows=4, width=32).view(2, 2, 32).repeat(1, 2, 1)
            run.evict()
            if norm == "functional":
                outputs.append(torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False))
            else:
                outputs.append(layer(x))
            run.evict()
        return outputs, (mean, var) if norm == "functional" else everything(layer)

    same(f, tmp_path, check=2)


@pytest.fixture(scope="module")
def undeclared() -> Iterator[Any]:
    """Operators of a third party: one hides its write, one fails after it, one declares it."""
    library = torch.library.Library("tvm_pager_rules", "DEF")
    library.define("hidden(Tensor x, Tensor[] more) -> Tensor")
    library.define("failing(Tensor(a!) x) -> ()")
    library.define("failing_hidden(Tensor x) -> ()")

    def hidden(x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        for tensor in (x, *more):
            tensor.add_(1)
        return x.sum()

    def failing(x: torch.Tensor) -> None:
        x.add_(1)
        raise ValueError("after the write")

    library.impl("hidden", hidden, "CPU")
    library.impl("failing", failing, "CPU")
    library.impl("failing_hidden", failing, "CPU")
    yield torch.ops.tvm_pager_rules
    library._destroy()


def clean(pager: Any, *shape: int) -> torch.Tensor:
    """A resident page with a current copy below: its eviction would write nothing."""
    tensor = torch.zeros(*shape)
    pager.evict_all()
    assert tensor.sum().item() == 0
    return tensor


def test_undeclared_writes_of_custom_operations_are_kept(undeclared: Any, pager: Any) -> None:
    tensors = [clean(pager, 8) for _ in range(3)]
    for tensor in tensors:
        tensor.sum()
    out = undeclared.hidden(tensors[0], tensors[1:])
    pager.evict_all()
    assert out.item() == 8.0
    assert [t.tolist() for t in tensors] == [[1.0] * 8] * 3


@pytest.mark.parametrize("name", ["failing", "failing_hidden"])
def test_an_operation_that_writes_and_raises_keeps_its_write(
    name: str, undeclared: Any, pager: Any
) -> None:
    tensor = clean(pager, 8)
    with pytest.raises(ValueError, match="after the write"):
        getattr(undeclared, name)(tensor)
    pager.evict_all()
    assert tensor.tolist() == [1.0] * 8
    pager.check_invariants()


def test_custom_op_with_declared_mutation_is_kept(pager: Any) -> None:
    @torch.library.custom_op("tvm_pager_rules_2::declared", mutates_args=["x"])
    def declared(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    x, y = clean(pager, 8), torch.full((8,), 3.0)
    pager.evict_all()
    declared(x, y)
    pager.evict_all()
    assert x.tolist() == [3.0] * 8


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_lists_larger_than_the_budget_are_split(options: Any, tmp_path: Path) -> None:
    """A fused optimizer names every parameter, gradient and state in one operation."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        losses = train(run, model, optimizer, steps=2)
        return losses, everything(model, optimizer)

    same(f, tmp_path, device=88 * KIB)


def test_foreach_functions_split_what_does_not_fit(tmp_path: Path) -> None:
    def f(run: Run) -> Any:
        left = [torch.full((32, 32), float(i)) for i in range(24)]  # 96 KiB
        right = [torch.full((32, 32), 0.5 * i) for i in range(24)]
        torch._foreach_add_(left, right, alpha=2)
        run.evict()
        sums = torch._foreach_mul(left, right)
        torch._foreach_addcmul_(sums, left, right, value=0.25)
        norms = torch._foreach_norm(sums)
        torch._foreach_mul_(right, torch.tensor(0.5))
        torch._foreach_copy_(left, right)
        torch._foreach_zero_(right)
        roots = torch._foreach_sqrt([s.abs() for s in sums])
        return left, right, sums, norms, roots

    same(f, tmp_path, check=2)


def test_a_write_on_the_fast_path_makes_the_copy_below_stale(tmp_path: Path) -> None:
    with small_pager(tmp_path, device="1MiB", check=0) as pager:
        tensor = torch.full((64,), 1.0)
        for expected in (2.0, 3.0, 4.0):
            pager.evict_all()
            tensor.neg()  # brings it back, and its copy below stays
            tensor.add_(1.0)
            pager.evict_all()
            assert tensor[0].item() == expected


# --- when it does not fit ---


def test_an_operation_larger_than_the_budget_is_refused_by_name(pager: Any) -> None:
    a, b = torch.full((6144,), 1.0), torch.full((6144,), 2.0)  # 24 KiB each, and the result too
    pager.evict_all()
    with pytest.raises(tvm_pager.BudgetError) as caught:
        torch.add(a, b)
    text = str(caught.value)
    assert "add" in text
    assert "64.00 KiB" in text
    assert any(f"{need}.00 KiB" in text for need in (24, 72))
    assert "device" in text
    assert any(word in text.lower() for word in ("raise", "larger", "give", "increase"))
    pager.check_invariants()
    a.add_(b)  # needs 48 KiB: the program can go on
    assert a.sum().item() == 3 * 6144.0


def test_what_no_tier_can_back_is_refused_at_creation(tmp_path: Path) -> None:
    with small_pager(tmp_path, host=64 * KIB, nvme=False, check=2) as pager:
        kept: list[torch.Tensor] = []

        def create() -> None:
            for index in range(100):
                kept.append(torch.full((32, 32), float(index)))

        with pytest.raises(tvm_pager.CommitError, match="KiB"):
            create()
        limit = len(kept)
        assert 24 <= limit <= 32  # 64 KiB of device, 64 KiB of slab, less reserves
        for index, tensor in enumerate(kept):
            pager.evict_all()
            assert tensor[3, 3].item() == float(index)
        pager.check_invariants()
        del kept[4:], tensor
        kept += [torch.full((32, 32), 7.0) for _ in range(limit - 6)]
        assert [t[0, 0].item() for t in kept[:5]] == [0.0, 1.0, 2.0, 3.0, 7.0]
        kept.clear()
    assert_nothing_left(tmp_path)
