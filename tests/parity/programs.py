"""What a program is, and the small ones that optimizers and training features are tried on.

Every budget is about a third of what the plain run needs, and above what its largest operation
names; `test_harness.py` measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(eq=False)
class Program:
    """A deterministic training script, cut where adoption may come in between.

    Subclasses give `build_model` and `loss`, or `step` where the loop itself is the subject.
    Attributes set in `start` belong to one run: the harness runs a copy of the program.
    """

    num_steps: int = 3
    device_bytes: ClassVar[int] = 96 << 10
    segment_bytes: ClassVar[int] = 16 << 10  # below the largest pages, so that some have several

    @property
    def name(self) -> str:
        return repr(self)

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.build_model()
        return model, self.build_optimizer(model)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Makes what lives as long as one run: schedulers, scalers."""

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        raise NotImplementedError

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        optimizer.zero_grad()
        loss = self.loss(model, step_index)
        loss.backward()
        optimizer.step()
        return loss


class Block(nn.Module):
    """A residual layer with dropout, so that random numbers are part of every parity run."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))


@dataclass(eq=False)
class MLP(Program):
    """Six residual layers of 16 KiB each on 32 random rows."""

    width: int = 64
    depth: int = 6
    dropout: float = 0.1
    device_bytes: ClassVar[int] = 160 << 10

    def build_model(self) -> nn.Module:
        blocks = [Block(self.width, self.dropout) for _ in range(self.depth)]
        return nn.Sequential(nn.Linear(24, self.width), *blocks, nn.Linear(self.width, 8))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(32, 24), torch.randint(0, 8, (32,))

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        return F.cross_entropy(model(x), target)


@dataclass(eq=False)
class OptimizerProgram(MLP):
    """The MLP under any optimizer; `make` takes the parameters."""

    label: str = ""
    make: Callable[[Any], torch.optim.Optimizer] | None = None

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.label})"

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert self.make is not None
        return self.make(model.parameters())


class SegmentAttention(nn.Module):
    """A graph attention layer written with scatters, as graph libraries do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(2 * width, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        h = self.project(x)
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1))).squeeze(1)
        highest = torch.full((len(x),), -torch.inf).scatter_reduce(0, target, score, "amax")
        weight = (score - highest.detach()[target]).exp()
        total = torch.zeros(len(x)).scatter_add(0, target, weight)
        weight = weight / total[target].clamp_min(1e-9)
        out = torch.zeros_like(h)
        out.index_add_(0, target, h[source] * weight[:, None])
        return F.elu(out) + x


class GraphNetwork(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList([SegmentAttention(width) for _ in range(4)])
        self.head = nn.Linear(width, 5)

    def forward(self, kinds: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> Any:
        x = self.embed(kinds)
        for layer in self.layers:
            x = layer(x, edges)
        counts = torch.bincount(graph, minlength=4).clamp_min(1)
        pooled = torch.zeros(4, x.shape[1]).index_add(0, graph, x) / counts[:, None]
        return self.head(pooled)


@dataclass(eq=False)
class Graph(Program):
    """Gather, scatter_reduce, scatter_add and index_add over 200 edges, forward and backward."""

    device_bytes: ClassVar[int] = 288 << 10

    def build_model(self) -> nn.Module:
        return GraphNetwork(48)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        kinds = torch.randint(0, 40, (60,))
        edges = torch.randint(0, 60, (2, 200))
        graph = torch.randint(0, 4, (60,)).sort().values
        return F.cross_entropy(model(kinds, edges, graph), torch.randint(0, 5, (4,)))


class Router(nn.Module):
    """Top-1 mixture of experts: which weights are used depends on the data."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(num_experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_put((rows,), expert(x[rows]) * weight[rows, None])
        return x + out


@dataclass(eq=False)
class Experts(MLP):
    """Data-dependent control flow: no two steps record the same trace."""

    num_steps: int = 4
    device_bytes: ClassVar[int] = 192 << 10

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(24, 64), Router(64, 6), Router(64, 6), nn.Linear(64, 8))
