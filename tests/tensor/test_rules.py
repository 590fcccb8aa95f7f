"""One test per rule about which storages are pages and how the books follow them.

Each test is named after its rule. The other rules: `test_rules_operations.py`,
`test_rules_lifetime.py`, `test_rules_neighbours.py`.
"""

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
    everything,
    mlp,
    num_pages,
    same,
    small_pager,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path


# --- what a page is ---


def test_a_page_is_a_storage_and_its_views_share_it(pager: Any) -> None:
    base = torch.arange(64.0).reshape(8, 8)
    before = num_pages(pager)
    views = [base[2:4], base.t(), base.view(-1), base.detach(), base.view(torch.int32)]
    assert num_pages(pager) == before
    assert all(pager.is_paged(v) for v in views)
    pager.evict_all()
    assert {pager.residency(t).name for t in (base, *views)} == {"HOST"}
    assert views[0][0, 0].item() == 16.0
    assert {pager.residency(t).name for t in (base, *views)} == {"DEVICE"}
    views[1][0, 1] = -1.0
    pager.evict_all()
    assert base[1, 0].item() == -1.0


def test_identity_is_not_an_address(pager: Any) -> None:
    """An allocator hands the address of an evicted page to the next tensor of that size."""
    tensors = []
    for index in range(12):
        tensors.append(torch.full((32, 32), float(index)))
        pager.evict_all()
    for _ in range(2):
        for index, tensor in enumerate(tensors):
            assert tensor.sum().item() == index * 1024
            pager.evict_all()


def test_empty_tensors_are_kept_apart(pager: Any) -> None:
    """All of them have the address 0."""
    first, second = torch.empty(0), torch.empty(0)
    pager.evict_all()
    first.resize_(8).fill_(1.0)
    second.resize_(4).fill_(2.0)
    pager.evict_all()
    assert first.tolist() == [1.0] * 8
    assert second.tolist() == [2.0] * 4


# --- what becomes a page ---


def test_an_unpaged_argument_stays_unpaged_and_so_do_its_views(tmp_path: Path) -> None:
    total, plain = torch.zeros(4), torch.ones(4)
    with small_pager(tmp_path, check=2) as pager:
        loss = torch.full((4,), 2.0)
        for _ in range(3):
            pager.evict_all()
            total += loss
        result = plain.add_(loss)
        views = [total[1:], total.view(2, 2), total.detach(), total.t()]
        assert result is plain
        for tensor in (total, plain, *views):
            assert not pager.is_paged(tensor)
        assert type(total) is torch.Tensor
        views[0].mul_(loss[1:])
        pager.evict_all()
        assert total.tolist() == [6.0, 12.0, 12.0, 12.0]
        assert pager.is_paged(total + loss)
        del loss
    assert_nothing_left(tmp_path)
    assert total.tolist() == [6.0, 12.0, 12.0, 12.0]
    assert plain.tolist() == [3.0] * 4


def test_an_unpaged_out_argument_stays_unpaged(tmp_path: Path) -> None:
    fitting, growing = torch.zeros(8), torch.empty(0)
    with small_pager(tmp_path, check=2) as pager:
        a, b = torch.arange(8.0), torch.full((8,), 2.0)
        pager.evict_all()
        torch.mul(a, b, out=fitting)
        torch.add(a, b, out=growing)
        assert not pager.is_paged(fitting)
        assert not pager.is_paged(growing)
        pager.evict_all()
        assert fitting.tolist() == [2.0 * i for i in range(8)]
        assert growing.tolist() == [i + 2.0 for i in range(8)]
        del a, b
    assert_nothing_left(tmp_path)


def test_an_optimizer_stepped_before_paging_goes_on(tmp_path: Path) -> None:
    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = train(Run(None), model, optimizer, steps=1)
        run.page(model, optimizer)
        losses += train(run, model, optimizer, steps=2, first=1)
        return losses, everything(model, optimizer)

    same(f, tmp_path, enter=False, device=76 * KIB)


def foreign_memory(kind: str, tmp_path: Path) -> torch.Tensor:
    import numpy as np

    values = np.arange(64, dtype=np.float32)
    if kind == "from_numpy":
        return torch.from_numpy(values)
    if kind == "frombuffer":
        return torch.frombuffer(bytearray(values.tobytes()), dtype=torch.float32)
    if kind == "dlpack":
        return torch.from_dlpack(values)
    path = tmp_path / "numbers"
    values.tofile(path)
    if kind == "from_file":
        return torch.from_file(str(path), shared=True, size=64)
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+"))


@pytest.mark.parametrize("kind", ["from_numpy", "frombuffer", "dlpack", "from_file", "memmap"])
def test_memory_that_cannot_be_resized_stays_put(kind: str, tmp_path: Path) -> None:
    model = nn.Module()
    model.first = nn.Parameter(foreign_memory(kind, tmp_path))
    (tmp_path / "more").mkdir()
    model.register_buffer("second", foreign_memory(kind, tmp_path / "more"))
    with small_pager(tmp_path, check=2) as pager:
        before = len(pager.stats().notices)
        tvm_pager.page(model)
        pager.evict_all()
        assert len(pager.stats().notices) == before + 1, pager.stats().notices
        assert not pager.is_paged(model.first)
        out = model.first * 2 + model.second
        assert pager.is_paged(torch.ones(2)), "the pager is at work all the same"
        pager.evict_all()
        assert out.tolist() == [3.0 * i for i in range(64)]
        model.second[8:].mul_(-1)
        pager.evict_all()
        assert model.second[8:].tolist() == [-float(i) for i in range(8, 64)]
        assert model.second[:8].tolist() == [float(i) for i in range(8)]
        del model, out
    assert_nothing_left(tmp_path)


def test_memory_that_somebody_else_refers_to_is_not_taken_away(tmp_path: Path) -> None:
    """A plain alias made before adoption would find 0 bytes."""
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(1.0)
    alias = model.weight.detach()
    with small_pager(tmp_path, check=2) as pager:
        tvm_pager.page(model)
        pager.evict_all()
        assert alias.sum().item() == 64.0
        alias[0, 0] = 5.0
        pager.evict_all()
        assert model.weight[0, 0].item() == 5.0
        with torch.no_grad():
            model.weight.mul_(2)
        pager.evict_all()
        assert alias.sum().item() == 2 * 68.0
        del model
    assert_nothing_left(tmp_path)


def test_an_alias_made_before_is_safe_outside_every_context(tmp_path: Path) -> None:
    """There no mode sees the operation, so nothing could fetch the page for a plain alias."""
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(1.0)
    alias = model.weight.detach()
    pager = small_pager(tmp_path)
    tvm_pager.page(model, pager=pager)
    pager.evict_all()
    assert alias.sum().item() == 64.0
    assert not pager.is_paged(model.weight)
    assert pager.is_paged(model.bias)
    pager.close()


# --- the books follow what torch does to a storage ---


def test_data_assignment_is_followed(tmp_path: Path) -> None:
    plain = torch.full((4,), 9.0)
    with small_pager(tmp_path, check=2) as pager:
        parameter = nn.Parameter(torch.zeros(16))
        before = num_pages(pager)
        parameter.data = torch.ones(8)
        assert num_pages(pager) == before
        pager.evict_all()
        assert parameter.tolist() == [1.0] * 8
        assert pager.is_paged(parameter)
        pager.evict_all()
        parameter.data = parameter.data * 3
        pager.evict_all()
        assert parameter.tolist() == [3.0] * 8
        parameter.data = plain
        pager.evict_all()
        assert (parameter + 1).tolist() == [10.0] * 4
        assert plain.tolist() == [9.0] * 4
        pager.check_invariants()
        del parameter
        assert num_pages(pager) == before - 1
    assert_nothing_left(tmp_path)


def test_set_is_followed(pager: Any) -> None:
    tensor, other = torch.zeros(16), torch.arange(8.0)
    before = num_pages(pager)
    pager.evict_all()
    tensor.set_(other)
    assert num_pages(pager) == before - 1
    pager.evict_all()
    assert tensor.tolist() == other.tolist() == [float(i) for i in range(8)]
    tensor.add_(1)
    pager.evict_all()
    assert other.tolist() == [i + 1.0 for i in range(8)]


@pytest.mark.parametrize("adopted", [False, True])
def test_casting_a_module_is_followed(adopted: bool, tmp_path: Path) -> None:
    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        run.page(model)
        run.evict()
        model.half()
        run.evict()
        out = [p.float().sum() for p in model.parameters()]
        model.float()
        run.evict()
        if run.pager:
            assert num_pages(run.pager) == 4 + len(out)
            assert all(run.pager.is_paged(p) for p in model.parameters())
        return out, everything(model)

    same(f, tmp_path, enter=not adopted, check=2)


def test_resizing_is_followed(pager: Any) -> None:
    tensor = torch.arange(16.0)
    pager.evict_all()
    tensor.resize_(64)
    tensor[16:] = 1.0
    pager.evict_all()
    assert tensor.tolist() == [float(i) for i in range(16)] + [1.0] * 48
    tensor.resize_(4)
    pager.evict_all()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_resizing_the_storage_itself_is_followed_or_refused(pager: Any) -> None:
    tensor = torch.arange(4.0)
    pager.evict_all()
    try:
        tensor.untyped_storage().resize_(4096)
    except tvm_pager.PagerError as error:
        assert "resize" in str(error)  # noqa: PT017 - either answer is right
    pager.release(tensor)
    pager.evict_all()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert num_pages(pager) == 1


def test_growth_of_an_out_argument_is_followed(pager: Any) -> None:
    out = torch.empty(0)
    a = torch.arange(1024.0)
    pager.evict_all()
    torch.add(a, 1, out=out)
    pager.check_invariants()
    pager.evict_all()
    assert pager.residency(out).name != "DEVICE"
    assert out.tolist() == [i + 1.0 for i in range(1024)]


def test_growth_counts_against_the_budget(pager: Any) -> None:
    """Resizing and growing outputs may not carry the device over its budget."""
    kept = [torch.full((2048,), float(i)) for i in range(6)]  # 48 of 64 KiB
    out = torch.empty(0)
    torch.add(kept[0].repeat(3), 1, out=out)
    small = torch.empty(0)
    small.resize_(6144).fill_(3.0)
    assert out.tolist() == [1.0] * 6144
    assert small.sum().item() == 3 * 6144.0
    assert [t[0].item() for t in kept] == [float(i) for i in range(6)]
