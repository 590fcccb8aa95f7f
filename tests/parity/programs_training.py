"""Training loops: clipping, scaling, accumulation, schedules, checkpointing, copies, resumption."""

from __future__ import annotations

import copy
import io
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.programs import MLP


@dataclass(eq=False)
class Clip(MLP):
    """`clip_grad_norm_` over gradients that are never on the device together."""

    norm_type: float = 2.0
    foreach: bool | None = None
    by_value: bool = False

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        optimizer.zero_grad()
        loss = self.loss(model, step_index)
        loss.backward()
        if self.by_value:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=self.foreach)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        else:
            norm = nn.utils.clip_grad_norm_(
                model.parameters(), 0.1, self.norm_type, error_if_nonfinite=True,
                foreach=self.foreach,
            )  # fmt: skip
        optimizer.step()
        return loss, norm, norm.item()


@dataclass(eq=False)
class Scaled(MLP):
    """GradScaler with unscale and clip; the second step overflows and must be skipped."""

    num_steps: int = 4
    fused: bool = False

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=self.fused)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        optimizer.zero_grad()
        loss = self.loss(model, step_index)
        self.scaler.scale(loss).backward()
        if step_index == 1:
            with torch.no_grad():
                model[1].linear.weight.grad[3, 5] = torch.inf
        if not self.fused:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss, self.scaler.get_scale()


@dataclass(eq=False)
class Accumulation(MLP):
    """Four micro-steps per update; gradients are read between, and zeroed in place or dropped."""

    set_to_none: bool = True

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        optimizer.zero_grad(set_to_none=self.set_to_none)
        total, seen = 0.0, []
        for _ in range(4):
            loss = self.loss(model, step_index) / 4
            loss.backward()
            total = total + loss.detach()
            seen.append(model[3].linear.weight.grad.norm().item())
        optimizer.step()
        return total, seen


@dataclass(eq=False)
class Scheduled(MLP):
    """Learning rates by schedule, OneCycleLR's momentum included."""

    num_steps: int = 4
    schedule: str = "lambda"

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 1e-2},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedulers = torch.optim.lr_scheduler
        self.scheduler: Any = {
            "lambda": lambda: schedulers.LambdaLR(optimizer, lambda index: 1 / (1 + index)),
            "one_cycle": lambda: schedulers.OneCycleLR(optimizer, max_lr=0.01, total_steps=6),
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0),
            "cosine": lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=2),
        }[self.schedule]()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        self.scheduler.step(*([loss.detach()] if self.schedule == "plateau" else []))
        return loss, [float(group["lr"]) for group in optimizer.param_groups]


@dataclass(eq=False)
class Checkpointed(MLP):
    """Activation checkpointing in both modes, with dropout that must be drawn again the same."""

    use_reentrant: bool = False
    dropout: float = 0.3

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        x = model[0](x)
        for block in model[1:-1]:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return F.cross_entropy(model[-1](x), target)


@dataclass(eq=False)
class SavedOnCpu(MLP):
    """Autograd's own offload hooks around a paged forward."""

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().loss(model, step_index)


@dataclass(eq=False)
class Autocast(MLP):
    """bfloat16 autocast: the cast weights are cached for the length of the region."""

    checkpointed: bool = False

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        with torch.autocast("cpu", torch.bfloat16):
            if self.checkpointed:
                logits = checkpoint(model, x, use_reentrant=False)
            else:
                logits = model(x) + 0 * model(x)
            return F.cross_entropy(logits.float(), target)


class TiedNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.body = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.body[3].weight = self.body[0].weight
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)).relu())


@dataclass(eq=False)
class Tied(MLP):
    """Tied weights stay one tensor, one page, one optimizer entry."""

    device_bytes: ClassVar[int] = 112 << 10

    def build_model(self) -> nn.Module:
        return TiedNetwork()

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        tokens = torch.randint(0, 64, (32,))
        return F.cross_entropy(model(tokens), tokens.roll(1))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        assert model.head.weight is model.embed.weight
        assert model.body[3].weight is model.body[0].weight
        return loss, len(list(model.parameters())), len(optimizer.param_groups[0]["params"])


@dataclass(eq=False)
class Frozen(MLP):
    """The first half frozen; unfrozen for the last step by `add_param_group`."""

    unfreeze: bool = False
    device_bytes: ClassVar[int] = 120 << 10

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[:4].requires_grad_(False)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        if self.unfreeze and step_index == 2:
            model[:4].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[:4].parameters()), "lr": 1e-4})
        return super().step(model, optimizer, step_index)


def cloned(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's bytes, and not how often `deepcopy` wrote them."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@dataclass(eq=False)
class Copied(MLP):
    """`deepcopy` of model and optimizer gives independent pages; both train on and stay apart."""

    depth: int = 4
    device_bytes: ClassVar[int] = 160 << 10

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        if step_index == 1:
            self.twin, self.twin_optimizer = copy.deepcopy((model, optimizer))
            with torch.no_grad():
                self.twin[0].weight.add_(1)
        if step_index < 1:
            return loss
        twin_loss = super().step(self.twin, self.twin_optimizer, step_index)
        return loss, twin_loss, cloned(self.twin)


@dataclass(eq=False)
class Averaged(MLP):
    """An exponential moving average of the weights, with torch's AveragedModel."""

    depth: int = 4

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        self.average.update_parameters(model)
        return loss, cloned(self.average)


@dataclass(eq=False)
class Resumed(MLP):
    """Save after the first step, train on, load, train again: the second time must equal a resume.

    The saved bytes are compared too: they must be what plain torch would load.
    """

    num_steps: int = 4
    depth: int = 4
    through_file: bool = True
    assign: bool = False

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        saved: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if step_index == 0:
            if self.through_file:
                self.file = io.BytesIO()
                torch.save(saved, self.file)
            else:
                self.saved = copy.deepcopy(saved)
        if step_index == 2:
            if self.through_file:
                self.file.seek(0)
                self.saved = torch.load(self.file, weights_only=True)
            model.load_state_dict(self.saved["model"], assign=self.assign)
            optimizer.load_state_dict(self.saved["optimizer"])
            return loss, self.saved["model"]
        return loss


@dataclass(eq=False)
class Recast(MLP):
    """`model.to(dtype)` while paged exchanges the data of every parameter."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        if step_index:
            optimizer.zero_grad()
            model.to(torch.bfloat16 if step_index == 1 else torch.float64)
        return super().step(model, optimizer, step_index)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().batch()
        return x.to(self.dtype), target

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        self.dtype = model[0].weight.dtype
        return super().loss(model, step_index)


@dataclass(eq=False)
class Alternating(MLP):
    """Training, evaluation in inference mode, and layers skipped at random."""

    num_steps: int = 6

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        if step_index % 3 == 2:
            model.eval()
            with torch.inference_mode():
                loss = self.loss(model, step_index)
            model.train()
            return loss
        return super().step(model, optimizer, step_index)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        x = model[0](x)
        for block in model[1:-1]:
            if torch.rand(()) < 0.7:
                x = block(x)
        return F.cross_entropy(model[-1](x), target)


@dataclass(eq=False)
class OtherThread(MLP):
    """Backward and update on another thread than forward, as some loaders and servers do."""

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        optimizer.zero_grad()
        loss = self.loss(model, step_index)
        failures: list[BaseException] = []

        def rest() -> None:
            try:
                loss.backward()
                optimizer.step()
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=rest)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]
        return loss


@dataclass(eq=False)
class Closure(MLP):
    """LBFGS calls the closure several times and keeps a history of flat vectors."""

    num_steps: int = 2
    depth: int = 2
    dropout: float = 0.0
    device_bytes: ClassVar[int] = 224 << 10  # it flattens all gradients into one vector

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        x, target = self.batch()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            return loss

        return optimizer.step(closure)
