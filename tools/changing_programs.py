"""What tools/bench_changing.py runs: programs of which no iteration need be like the one before."""

from __future__ import annotations

import abc
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tools.bench_llama import MODELS, building, make_llama

__all__ = ["PROGRAMS", "SCALES", "Program", "Scale"]


@dataclass(frozen=True)
class Scale:
    """Sizes for one kind of machine; `model` is one of tools/bench_llama.py."""

    model: str
    batch: int
    sequence: int  # the longest
    new_tokens: int
    width: int
    depth: int
    rows: int
    num_experts: int
    dtype: torch.dtype


SCALES = {
    "tiny": Scale(
        model="tiny", batch=1, sequence=128, new_tokens=3, width=128, depth=6, rows=64,
        num_experts=4, dtype=torch.float32,
    ),
    "small": Scale(
        model="0.95b", batch=2, sequence=2048, new_tokens=12, width=2048, depth=24, rows=4096,
        num_experts=8, dtype=torch.bfloat16,
    ),
}  # fmt: skip


class Program(abc.ABC):
    """A model in training, built from fixed seeds; `iterate(i)` runs the i-th iteration.

    What it gives is kept, not read: reading would wait for the device.
    """

    def __init__(self, scale: Scale, device: str) -> None:
        self.scale, self.device = scale, device
        with building(device, scale.dtype):
            self.model = self.build()
        # Single tensors: what torch takes for paged parameters.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)

    @abc.abstractmethod
    def build(self) -> nn.Module:
        """Makes the model, where and as the caller says."""

    @abc.abstractmethod
    def iterate(self, i: int) -> torch.Tensor:
        """Runs one iteration; gives its loss, or what stands for it."""

    def learn(self, loss: torch.Tensor) -> torch.Tensor:
        """Backward, update, and the loss."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def seeded(self, i: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 + i)


class Llama(Program):
    """What the next two train."""

    def build(self) -> nn.Module:
        return make_llama(self.scale.model, self.scale.sequence)

    def tokens(self, i: int, length: int) -> torch.Tensor:
        size = (self.scale.batch, length)
        vocabulary = MODELS[self.scale.model]["vocab_size"]
        return torch.randint(0, vocabulary, size, generator=self.seeded(i)).to(self.device)

    def train_on(self, ids: torch.Tensor) -> torch.Tensor:
        self.model.train()
        return self.learn(self.model(input_ids=ids, labels=ids, use_cache=False).loss)


class Alternating(Llama):
    """Two steps of training, two batches of evaluation, one generated text; and again."""

    def iterate(self, i: int) -> torch.Tensor:
        ids = self.tokens(i, self.scale.sequence)
        if i % 5 < 2:
            return self.train_on(ids)
        self.model.eval()
        with torch.no_grad():
            if i % 5 < 4:
                loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                return loss
            return self.generate(ids[:, : self.scale.sequence // 8])

    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        """Greedy, with a cache that grows; `model.generate` would read each token."""
        from transformers import DynamicCache

        # transformers has renamed it.
        has_new_name = "cache" in inspect.signature(self.model.forward).parameters
        cached = {"cache" if has_new_name else "past_key_values": DynamicCache(), "use_cache": True}
        tokens = [self.model(input_ids=ids, **cached).logits[:, -1:].argmax(-1)]
        for _ in range(self.scale.new_tokens - 1):
            tokens.append(self.model(input_ids=tokens[-1], **cached).logits[:, -1:].argmax(-1))
        return torch.cat(tokens, dim=1).float().mean()


class Growing(Llama):
    """Each batch is longer than the one before, from a quarter of the longest on."""

    def iterate(self, i: int) -> torch.Tensor:
        longest = self.scale.sequence
        return self.train_on(self.tokens(i, min(longest, longest // 4 + i * longest // 32)))


class Residual(nn.Module):
    """A perceptron beside the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


class Stack(Program):
    """What the last two train, on rows of random numbers."""

    def rows(self, i: int) -> torch.Tensor:
        size = (self.scale.rows, self.scale.width)
        return torch.randn(size, generator=self.seeded(i)).to(self.device, self.scale.dtype)

    def iterate(self, i: int) -> torch.Tensor:
        return self.learn(self.model(self.rows(i)).float().square().mean())


class Skipping(Stack):
    """Stochastic depth: each layer is left out in one iteration of ten."""

    def build(self) -> nn.Module:
        scale, rng = self.scale, random.Random(7)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Residual(scale.width) for _ in range(scale.depth))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    if rng.random() >= 0.1:
                        x = x + layer(x)
                return x

        return Model()


class Experts(nn.Module):
    """Each row goes through the one expert that a router chooses; one without rows does not run."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num)
        self.experts = nn.ModuleList(Residual(width) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        weight, choice = weights.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)  # the host has to know how many
            if len(rows):
                out = out.index_copy(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


class Routed(Stack):
    """A mixture of experts: sizes of most temporaries depend on the data."""

    def build(self) -> nn.Module:
        scale = self.scale
        num_layers = max(1, scale.depth // scale.num_experts)
        layers = [Experts(scale.width, scale.num_experts) for _ in range(num_layers)]
        return nn.Sequential(*layers)


PROGRAMS: dict[str, Callable[[Scale, str], Program]] = {
    "alternating": Alternating,
    "growing": Growing,
    "skipping": Skipping,
    "experts": Routed,
}
