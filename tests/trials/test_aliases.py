"""Section B of the trials: tied weights, views, in-place operations."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trials.harness import (
    KIB,
    Run,
    assert_nothing_left,
    batch,
    bytes_written,
    everything,
    mlp,
    same,
    small_pager,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path


class TiedModel(nn.Module):
    """The head is the embedding."""

    def __init__(self, vocab: int = 64, width: int = 32) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.emb(ids))))


@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
def test_tied_weights_stay_one_tensor(enter: bool, tmp_path: Path) -> None:
    """Trial 13: dispatching a model untied embedding and head.

    Memory doubled, and the two drifted apart.
    """

    def f(run: Run) -> Any:
        model = TiedModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.page(model, optimizer)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(5):
            ids = torch.randint(0, 64, (2, 5), generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            run.evict()
            loss.backward()
            run.evict()
            optimizer.step()
            losses.append(loss.item())
        assert model.head.weight is model.emb.weight
        assert len(list(model.parameters())) == 3
        state = model.state_dict()
        assert {"emb.weight", "head.weight"} <= set(state)
        state["emb.weight"][0, 0] = 7.0  # seen under both names
        assert state["head.weight"][0, 0].item() == 7.0
        assert model.head.weight[0, 0].item() == 7.0
        return losses, everything(model, optimizer), state

    same(f, tmp_path, enter=enter)


def test_tied_weights_are_counted_once(tmp_path: Path) -> None:
    """Trial 13, second half: one storage is one page, however many names it has."""
    with small_pager(tmp_path) as pager:
        model = TiedModel()
        assert pager.stats().num_pages == 3
        before = bytes_written(pager.stats())
        pager.evict_all()
        moved = bytes_written(pager.stats()) - before
        needed = sum(p.numel() * 4 for p in model.parameters())
        assert needed <= moved < needed + 3 * 4 * KIB
        del model
    assert_nothing_left(tmp_path)


def test_tying_after_paging_frees_the_second_page(tmp_path: Path) -> None:
    """Trial 13, kind: the weight that nothing names any more leaves the books."""
    with small_pager(tmp_path) as pager:
        emb, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        assert pager.stats().num_pages == 2
        pager.evict_all()
        head.weight = emb.weight
        assert pager.stats().num_pages == 1
        pager.check_invariants()
        del emb, head
    assert_nothing_left(tmp_path)


def shared_groups(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names whose tensors share memory, found as checkpoint writers find them."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        groups[(tensor.device, storage.data_ptr(), storage.nbytes())].append(name)
    return sorted(sorted(names) for names in groups.values())


@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
def test_identities_are_constant_over_eviction(enter: bool, tmp_path: Path) -> None:
    """Trial 14: each attribute access built a fresh tensor.

    So checks for sharing failed, and saving raised.
    """

    def f(run: Run) -> Any:
        model = TiedModel()
        ids = [id(p) for p in model.parameters()]
        run.page(model)
        for _ in range(2):
            assert [id(p) for p in model.parameters()] == ids
            run.evict()
            assert [id(p) for p in model.parameters()] == ids
            assert model.head.weight is model.emb.weight
            model(torch.arange(5))
            assert [id(p) for p in model.parameters()] == ids
        run.evict()
        return shared_groups(model.state_dict())

    same(f, tmp_path, enter=enter)


@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
def test_safetensors_sees_the_same_sharing(enter: bool, tmp_path: Path) -> None:
    """Trial 14, second half: a checkpoint writer drops a tied weight's second name only."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")

    def f(run: Run) -> Any:
        model = TiedModel()
        run.page(model)
        run.evict()
        path = str(tmp_path / "model.safetensors")
        safetensors.save_model(model, path)
        other = TiedModel()
        safetensors.load_model(other, path)
        run.evict()
        return dict(safetensors.load_file(path)), other.state_dict()

    same(f, tmp_path, enter=enter)


@pytest.mark.parametrize("deep", [False, True], ids=["to host", "to nvme"])
def test_saved_views_survive_eviction(deep: bool, tmp_path: Path) -> None:
    """Trial 15: a saved view with an offset or a broadcast stride could not be rebuilt.

    Views of one storage with offset, transposition, broadcasting, steps and overlap are saved for
    backward, and their base is pushed out before backward asks for them.
    """

    def f(run: Run) -> Any:
        x = batch(0, rows=16, width=16).requires_grad_()
        row = batch(1, rows=1, width=16).requires_grad_()
        y = x * 1.0  # the base is not a leaf
        views = [
            y[1:],
            y.t(),
            row.expand(64, -1),
            y[::2],
            y.unfold(0, 4, 1),
            y[3:9, 2:7],
            y.view(-1)[5:100].view(5, 19),
            y.as_strided((4, 4), (3, 2), 7),
        ]
        generator = torch.Generator().manual_seed(9)
        factors = [torch.randn(v.shape, generator=generator).requires_grad_() for v in views]
        out = torch.stack([(v * w).sin().sum() for v, w in zip(views, factors, strict=True)])
        strides = [(v.stride(), v.storage_offset()) for v in views]
        del views
        run.evict()
        out.sum().backward()
        run.evict()
        return out, strides, x.grad, row.grad, [w.grad for w in factors]

    same(f, tmp_path, deep=deep)


def test_views_saved_together_move_their_bytes_once(tmp_path: Path) -> None:
    """Trial 17: an offload hook copied weights too, or one storage once per view of it.

    A fix that dropped the doubles handed back the wrong layout: a square matrix and its transpose
    look alike, and the gradient was wrong without an error.
    """

    def f(run: Run) -> Any:
        linear = nn.Linear(32, 32, bias=False)
        source = batch(0, rows=32, width=32).requires_grad_()
        left = batch(1, rows=32, width=32)
        run.evict()
        before = bytes_written(run.pager.stats()) if run.pager else 0
        x = source * 1.0
        out = (x @ linear.weight).sum() + (x.t() @ left).sum() + x[1:].square().sum()
        kept = x.numel() * 4
        del x
        run.evict()
        if run.pager:
            moved = bytes_written(run.pager.stats()) - before
            assert kept <= moved < kept + 4 * KIB, "one activation, and no weight a second time"
        out.backward()
        return out, source.grad, linear.weight.grad

    same(f, tmp_path, device=128 * KIB)


@pytest.mark.parametrize("deep", [False, True], ids=["to host", "to nvme"])
def test_in_place_operations_on_views_reach_the_base(deep: bool, tmp_path: Path) -> None:
    """Trials 13-17, kind: a write through any alias is seen through every other after a trip."""

    def f(run: Run) -> Any:
        base = torch.zeros(8, 8)
        views = [base[2:4], base.t()[1], base.view(-1)[5:9], base[:, ::3]]
        run.evict()
        for i, view in enumerate(views):
            view.add_(i + 1)
            run.evict()
        chunks = base.chunk(2)
        chunks[1].mul_(2)
        run.evict()
        base[0] = 5
        run.evict()
        return base, views, [c.clone() for c in chunks]

    same(f, tmp_path, deep=deep)


def test_recurrent_weights_are_found_by_their_owner(tmp_path: Path) -> None:
    """Trial 14, kind: a module that keeps weak references to its weights still finds them."""

    def f(run: Run) -> Any:
        model = nn.LSTM(16, 16, num_layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.page(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            out, _ = model(batch(step, rows=5, width=16).unsqueeze(1))
            run.evict()
            out.square().sum().backward()
            optimizer.step()
            run.evict()
        return out, everything(model, optimizer)

    same(f, tmp_path, enter=False)


def test_one_layer_under_two_names_trains_once(tmp_path: Path) -> None:
    """Trial 13, kind: a module that is used twice has one gradient, the sum of both uses."""

    def f(run: Run) -> Any:
        layer = nn.Linear(64, 64)
        model = nn.Sequential(layer, nn.Tanh(), layer, mlp(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.page(model)
        losses = train(run, model, optimizer)
        assert model[0] is model[2]
        return losses, everything(model, optimizer)

    same(f, tmp_path, enter=False)
