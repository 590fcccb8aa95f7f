"""Section A of the trials: runs that raise nothing and compute something else."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trials.harness import (
    HOST_BYTES,
    KIB,
    LAYER_BYTES,
    Run,
    assert_nothing_left,
    batch,
    bytes_to_nvme,
    everything,
    mlp,
    same,
    small_pager,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("optimizer_made", ["before paging", "after paging"])
def test_the_optimizer_updates_the_weights_that_forward_uses(
    optimizer_made: str, tmp_path: Path
) -> None:
    """Trial 1: with weights offloaded, training ran without an error and never changed a weight.

    Forward used temporary tensors while the optimizer held the old ones. One layer with its
    gradient and its momentum does not fit on the device here, so weights leave between their uses.
    """

    def f(run: Run) -> Any:
        model = mlp()
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        held = list(model.parameters())
        if optimizer_made == "before paging":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            run.page(model)
        else:
            run.page(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = train(run, model, optimizer)
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        for p, q, r in zip(held, model.parameters(), grouped, strict=True):
            assert p is q is r
        for name, p in model.named_parameters():
            assert (p.detach() - start[name]).norm().item() > 0, f"{name} did not move"
        return losses, everything(model, optimizer)

    same(f, tmp_path, device=44 * KIB, enter=False)


def test_optimizer_states_come_back_from_disk_as_last_written(tmp_path: Path) -> None:
    """Trial 2: with optimizer states on NVMe the loss fell 25 times less than with them in DRAM.

    The device holds the operands of one update and little else, and device and slab together less
    than two thirds of all pages, which are used in turn: so states pass through the swap file at
    each step. Checksums are taken at write-back and verified at fetch.
    """

    def f(run: Run) -> Any:
        model = mlp(num_layers=5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = train(run, model, optimizer, steps=50)
        return losses, everything(model, optimizer)

    stats = same(f, tmp_path, device=76 * KIB, check=1)
    pages_bytes = 4 * 5 * LAYER_BYTES  # weights, gradients, two states
    assert bytes_to_nvme(stats) > 49 * (pages_bytes - 76 * KIB - HOST_BYTES // 2)


class TinyGPT(nn.Module):
    """Embeddings, one pre-norm block, a head."""

    def __init__(self, vocab: int = 48, width: int = 32, context: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("place", torch.arange(context), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(self.place)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_language_model_learns_as_in_plain_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    """Trial 3: after an upgrade, training with offload no longer converged; others saw a huge loss.

    200 steps of a tiny GPT, offloaded to DRAM; every loss must be the same number.
    """

    device = 72 * KIB if dtype is torch.float32 else 40 * KIB

    def f(run: Run) -> Any:
        model = TinyGPT().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(7)
        losses = []
        for _ in range(200):
            start = torch.randint(0, 48, (2, 1), generator=generator)
            ids = (start + 5 * torch.arange(13)) % 48
            logits = model(ids[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
        return losses, everything(model, optimizer)

    same(f, tmp_path, device=device, host=1024 * KIB, nvme=False, check=0)


def test_sparse_gradients_are_applied(tmp_path: Path) -> None:
    """Trial 8: sparse embedding gradients were skipped, and nothing said so."""

    def f(run: Run) -> Any:
        embedding = nn.Embedding(1000, 16, sparse=True)
        bag = nn.EmbeddingBag(1000, 16, sparse=True, mode="sum")
        weights = [embedding.weight, bag.weight]
        optimizer = torch.optim.SparseAdam(weights, lr=0.1)
        generator = torch.Generator().manual_seed(3)
        losses = []
        for _ in range(3):
            ids = torch.randint(0, 1000, (4, 6), generator=generator)
            loss = embedding(ids).square().sum() + bag(ids).square().sum()
            run.evict()
            optimizer.zero_grad()
            loss.backward()
            for weight in weights:
                assert weight.grad.layout is torch.sparse_coo
            run.evict()
            optimizer.step()
            run.evict()
            losses.append(loss.item())
        return losses, weights, [w.grad for w in weights], [optimizer.state[w] for w in weights]

    same(f, tmp_path, device=320 * KIB)


@pytest.mark.parametrize("deep", [False, True], ids=["to host", "to nvme"])
@pytest.mark.parametrize("rank", [2, 3])
def test_memory_formats_survive_each_tier(rank: int, deep: bool, tmp_path: Path) -> None:
    """Trial 10: a channels_last weight came back contiguous after one trip, and metrics drifted.

    Everything leaves the device after each single operation. Weights, saved tensors and gradients
    keep their strides.
    """

    def f(run: Run) -> Any:
        conv = nn.Conv2d if rank == 2 else nn.Conv3d
        norm = nn.BatchNorm2d if rank == 2 else nn.BatchNorm3d
        memory_format = torch.channels_last if rank == 2 else torch.channels_last_3d
        model = nn.Sequential(conv(4, 8, 3), norm(8), nn.ReLU(), conv(8, 4, 3, padding=1))
        model = model.to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(5)
        saved = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved.append((tuple(tensor.shape), tensor.stride()))
            return tensor

        with run.evicting_each():
            for _ in range(2):
                x = torch.randn(2, 4, *[6] * rank, generator=generator)
                x = x.to(memory_format=memory_format).requires_grad_()
                optimizer.zero_grad()
                with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
                    y = model(x)
                y.square().sum().backward()
                optimizer.step()
        assert not model[0].weight.is_contiguous()
        assert model[0].weight.is_contiguous(memory_format=memory_format)
        return y, x.grad, saved, everything(model, optimizer)

    stats = same(f, tmp_path, device=128 * KIB, host=HOST_BYTES if deep else 2048 * KIB, deep=deep)
    assert deep or bytes_to_nvme(stats) == 0


WIDE = 32  # so that both layers are on the device at once


def test_equal_shapes_off_the_device_are_different_tensors(tmp_path: Path) -> None:
    """Trial 11: a map keyed by data pointer took all offloaded tensors for one and the same."""

    def f(run: Run) -> Any:
        first, second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        x = batch(0, width=WIDE)
        run.evict()
        out = [first(x), second(x)]
        assert not torch.equal(out[0], out[1])
        run.evict()
        state = nn.ModuleList([first, second]).state_dict()
        return out, dict(state)

    same(f, tmp_path)


def test_addresses_of_pages_off_the_device_are_real(tmp_path: Path) -> None:
    """Trial 11, second half: an address leads to the right bytes, and no two are equal."""
    with small_pager(tmp_path) as pager:
        tensors = [torch.full((256,), float(i)) for i in range(4)]
        pager.evict_all()
        addresses = [t.data_ptr() for t in tensors]
        assert 0 not in addresses
        assert len(set(addresses)) == len(tensors)
        for i, address in enumerate(addresses):
            assert list((ctypes.c_float * 256).from_address(address)) == [float(i)] * 256
        pager.check_invariants()
        del tensors
    assert_nothing_left(tmp_path)
