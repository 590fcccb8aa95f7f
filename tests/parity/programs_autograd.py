"""What autograd can do beyond one backward: graphs kept, views, hooks, functions, torch.func."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.parity.programs import MLP


@dataclass(eq=False)
class RetainedGraph(MLP):
    """Backward twice through one graph, the first time kept."""

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        optimizer.zero_grad()
        loss = self.loss(model, step_index)
        loss.backward(retain_graph=True)
        first = model[2].linear.weight.grad.clone()
        loss.backward()
        optimizer.step()
        return loss, first


@dataclass(eq=False)
class GradientPenalty(MLP):
    """Double backward: the norm of the gradient is part of the loss."""

    device_bytes: ClassVar[int] = 224 << 10

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        x.requires_grad_()
        loss = F.cross_entropy(model(x), target)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum().sqrt()


@dataclass(eq=False)
class Views(MLP):
    """In-place writes through views, and saved views with offsets, steps, transposes, overlaps."""

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        h = model[:3](x)
        square = h @ h.t()
        square = square + square.t() * square[:1].expand(32, -1)
        y = h.clone()
        y[1:5].mul_(2)
        y[:, ::2].add_(h[:, 1::2])
        y.t()[3].zero_()
        rows = y.view(8, 4, -1)
        rows.select(1, 2).copy_(rows.select(1, 0).sigmoid())
        windows = h.unfold(0, 4, 2).pow(2).mean()
        left, right = y.narrow(1, 0, 32), y.narrow(1, 32, 32)
        left.tanh_()
        y = torch.cat([right, left], 1) + square.narrow(1, 1, 16).sum(1, keepdim=True) * 1e-3
        total = torch.zeros(())
        total += F.cross_entropy(model[3:](y), target)
        total += windows
        return total

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        with torch.no_grad():
            model[1].linear.weight[2:4].clamp_(-0.01, 0.01)
            model[2].linear.weight.t()[5].fill_(0.125)
            model[3].linear.bias.data[::3] *= 0.5
            torch.add(model[4].linear.bias, 1, out=model[5].linear.bias)
        return loss


class ScaledSquare(torch.autograd.Function):
    """Saves an input, an output and a tensor that is neither."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = x.square() * scale
        ctx.save_for_backward(x, scale, out, x * 2)
        ctx.extra = x[:2]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, scale, out, twice = ctx.saved_tensors
        slope = grad * scale * twice + ctx.extra.sum() * 0
        return slope, (grad * out / scale).sum()


class DoubleInPlace(torch.autograd.Function):
    """Writes its argument and says so with `mark_dirty`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@dataclass(eq=False)
class Functions(MLP):
    """Custom autograd functions: saved tensors, attributes, in-place."""

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        x = model[0](x)
        for index, block in enumerate(model[1:-1]):
            x = block(x)
            if index % 2:
                x = ScaledSquare.apply(x, torch.tensor(0.5, requires_grad=True))
            else:
                x = DoubleInPlace.apply(x.clone())
        return F.cross_entropy(model[-1](x), target)


@dataclass(eq=False)
class Hooks(MLP):
    """Hooks of modules, tensors and parameters, registered before adoption where there is one."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.log: list[Any] = []
        block = model[2]
        block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda _, args, out: out + args[0].mean())
        block.register_full_backward_hook(lambda _, into, out: (into[0] * 0.5,))
        block.linear.weight.register_hook(lambda grad: grad + 0.25)
        block.linear.bias.register_post_accumulate_grad_hook(self.log_grad)
        return model

    def log_grad(self, parameter: torch.Tensor) -> None:
        self.log.append(parameter.grad.norm().item())

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: self.log.append("stepped"))

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        h = model[:4](x)
        h.retain_grad()
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.kept = h
        return F.cross_entropy(model[4:](h), target)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        kept, self.kept = self.kept, None
        return loss, kept.grad, list(self.log)


@dataclass(eq=False)
class UpdateInBackward(MLP):
    """One optimizer per parameter, stepped by a hook as soon as the gradient is there."""

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.single = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        self.handles = [p.register_post_accumulate_grad_hook(self.update) for p in self.single]

    def update(self, parameter: torch.Tensor) -> None:
        self.single[parameter].step()
        self.single[parameter].zero_grad()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = self.loss(model, step_index)
        loss.backward()
        if step_index == self.num_steps - 1:
            for handle in self.handles:  # torch does not collect cycles that go through them
                handle.remove()
        return loss, [dict(self.single[p].state[p]) for p in model.parameters()]


@dataclass(eq=False)
class Functional(MLP):
    """functional_call with replaced weights, per-sample gradients by vmap, jvp, vjp, hessian."""

    num_steps: int = 2
    depth: int = 3
    dropout: float = 0.0
    transform: str = "functional_call"
    device_bytes: ClassVar[int] = 144 << 10

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        x, target = self.batch()
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
            return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        loss = super().step(model, optimizer, step_index)
        if self.transform == "functional_call":
            halved = {name: p * 0.5 for name, p in model.named_parameters()}
            made = loss_of(halved, x, target)
            return loss, made, torch.autograd.grad(made, list(model.parameters()))
        if self.transform == "grad":
            return loss, torch.func.grad(loss_of)(weights, x, target)
        if self.transform == "vmap":
            small = {name: p for name, p in weights.items() if p.ndim == 1}
            large = {name: p for name, p in weights.items() if p.ndim > 1}

            def small_loss(small: dict[str, torch.Tensor], x: Any, y: Any) -> Any:
                return loss_of({**small, **large}, x[None], y[None])

            return loss, torch.func.vmap(torch.func.grad(small_loss), (None, 0, 0))(
                small, x, target
            )
        tangents = {name: torch.ones_like(p) for name, p in weights.items()}
        if self.transform == "jvp":
            made = torch.func.jvp(lambda w: loss_of(w, x, target), (weights,), (tangents,))
            return loss, made
        if self.transform == "vjp":
            out, pull = torch.func.vjp(lambda x: model(x), x)
            return loss, out, pull(torch.ones_like(out))
        inner = torch.func.hessian(
            lambda bias: F.cross_entropy(model[:-1](x)[:, :8] + bias, target)
        )
        return loss, inner(weights[f"{self.depth + 1}.bias"])


@dataclass(eq=False)
class Reparametrized(MLP):
    """Weight norm, spectral norm (a buffer written in forward) and orthogonal parametrizations."""

    depth: int = 4
    device_bytes: ClassVar[int] = 192 << 10

    def build_model(self) -> nn.Module:
        model = super().build_model()
        parametrizations.weight_norm(model[1].linear)
        parametrizations.spectral_norm(model[2].linear)
        parametrizations.orthogonal(model[3].linear, orthogonal_map="cayley")
        return model


class SpectralMix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, 16, dtype=torch.complex64) * 0.1)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1) * self.filter.conj()
        mixed = torch.fft.irfft(spectrum.conj(), n=x.shape[1], dim=1)
        return x + self.linear(mixed).tanh() * spectrum.imag.mean()


@dataclass(eq=False)
class Complex(MLP):
    """Complex parameters, lazily conjugated and negated views, FFTs."""

    device_bytes: ClassVar[int] = 96 << 10

    def build_model(self) -> nn.Module:
        return nn.Sequential(*[SpectralMix() for _ in range(4)])

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # torch's Adam refuses the lazily conjugated gradients that this model makes.
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        return model(torch.randn(4, 64, 16)).square().mean()


@dataclass(eq=False)
class Sparse(MLP):
    """Sparse gradients of embeddings are neither paged nor dropped, and stay sparse."""

    device_bytes: ClassVar[int] = 96 << 10

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(300, 32, sparse=True), nn.EmbeddingBag(300, 32, mode="sum", sparse=True)
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        tokens = torch.randint(0, 300, (12, 6))
        bags, words = model[1](tokens), model[0](tokens).mean(1)
        return (bags * words).sum().square()
