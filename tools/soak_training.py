"""What tools/soak.py trains: a small language model whose batches change their shape."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["SCALES", "Scale", "Training"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes that page a lot on one kind of device: a model, its shapes, and ranges of budgets."""

    width: int
    depth: int
    vocabulary: int
    batches: tuple[int, ...]
    sequences: tuple[int, ...]
    device_bytes: tuple[int, int]  # least and most, beside what is no page
    host_bytes: tuple[int, int]
    nvme_bytes: int
    region_bytes: int  # of the slab: what a smaller host budget gives back is whole regions
    segment_bytes: int
    rss_tolerance_bytes: int


SCALES = {
    "cpu": Scale(
        width=48, depth=2, vocabulary=96, batches=(1, 2, 3, 4), sequences=(8, 16, 24, 32, 48),
        device_bytes=(448 * KIB, 1536 * KIB), host_bytes=(384 * KIB, 1408 * KIB),
        nvme_bytes=32 * MIB, region_bytes=256 * KIB, segment_bytes=16 * KIB,
        rss_tolerance_bytes=4 * MIB,
    ),
    "cuda": Scale(
        width=512, depth=3, vocabulary=2048, batches=(1, 2, 4, 8), sequences=(32, 64, 128, 256),
        device_bytes=(160 * MIB, 512 * MIB), host_bytes=(256 * MIB, 640 * MIB),
        nvme_bytes=2048 * MIB, region_bytes=32 * MIB, segment_bytes=1 * MIB,
        rss_tolerance_bytes=64 * MIB,
    ),
}  # fmt: skip


class Block(nn.Module):
    """Attention and a perceptron, written out, so that every step is one deterministic kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)).div(x.shape[-1] ** 0.5).softmax(-1)
        x = x + F.dropout(self.out(scores @ v), 0.1)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A tied embedding around blocks."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embed = nn.Embedding(scale.vocabulary, scale.width)
        self.blocks = nn.ModuleList([Block(scale.width) for _ in range(scale.depth)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


class Training:
    """A model with its optimizer; the same numbers for the same seed, whatever is between.

    Args:
        scale: sizes.
        seed: of weights, data, shapes and dropout.
        device: where it trains.
    """

    def __init__(self, scale: Scale, seed: int, device: str) -> None:
        self._scale, self._seed, self._device = scale, seed, device
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = Model(scale)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, iteration: int, before: Callable[[], None]) -> str:
        """Trains one step, calling `before` ahead of each phase; gives the loss in hex."""
        draw = random.Random(f"{self._seed}/shape/{iteration}")
        shape = (draw.choice(self._scale.batches), draw.choice(self._scale.sequences) + 1)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + iteration)
        tokens = torch.randint(self._scale.vocabulary, shape, generator=generator)
        tokens = tokens.to(self._device)
        before()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        before()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        before()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach().item()).hex()

    def tensors(self) -> list[torch.Tensor]:
        """Weights, and the optimizer's states."""
        states = [s for state in self.optimizer.state.values() for s in state.values()]
        return [*self.model.parameters(), *states]

    def digest(self) -> str:
        """Of the bytes of `tensors`."""
        found = hashlib.sha256()
        for tensor in self.tensors():
            found.update(tensor.detach().to("cpu", copy=True).numpy().tobytes())
        return found.hexdigest()
