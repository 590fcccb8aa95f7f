"""Optimizers of torch and of others, over implementations, paged and plain to the same bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.harness import same
from tests.parity.programs import OptimizerProgram
from tests.parity.programs_text import hugging_face

ADAM = importlib.import_module("torch.optim.adam")
OPTIMIZER = importlib.import_module("torch.optim.optimizer")
IMPLEMENTATIONS = ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam")


class Lion(torch.optim.Optimizer):
    """A third party's optimizer: sign of an interpolated momentum, written tensor by tensor."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = (momentum * 0.9 + p.grad * 0.1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


class BlockwiseLion(Lion):
    """Keeps its momentum in one flat buffer, of which each parameter has a slice."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        every = [p for group in self.param_groups for p in group["params"]]
        flat = torch.zeros(sum(p.numel() for p in every))
        for p, part in zip(every, flat.split([p.numel() for p in every]), strict=True):
            self.state[p]["momentum"] = part.view_as(p)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)


def huggingface_adafactor(params: Any) -> torch.optim.Optimizer:
    return hugging_face().Adafactor(
        params, scale_parameter=True, relative_step=True, warmup_init=True
    )


def made(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, **settings)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": made("SGD", lr=0.1),
    "sgd-nesterov": made("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": made("SGD", lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": made("SGD", lr=0.1, momentum=0.9, fused=True),
    "adamw": made("AdamW"),
    "adamw-loop": made("AdamW", foreach=False),
    "adamw-foreach": made("AdamW", foreach=True),
    "adamw-fused": made("AdamW", fused=True),
    "adamw-amsgrad": made("AdamW", amsgrad=True, maximize=True),
    "adamw-amsgrad-foreach": made("AdamW", amsgrad=True, foreach=True),
    "adamw-amsgrad-fused": made("AdamW", amsgrad=True, fused=True),
    "adam-foreach": made("Adam", weight_decay=0.01, foreach=True),
    "adafactor": made("Adafactor", lr=0.01),
    "adafactor-foreach": made("Adafactor", lr=0.01, foreach=True),
    "adafactor-huggingface": huggingface_adafactor,
    "adagrad": made("Adagrad", initial_accumulator_value=0.1),
    "adagrad-fused": made("Adagrad", fused=True),
    "adadelta-foreach": made("Adadelta", foreach=True),
    "adamax": made("Adamax"),
    "nadam-foreach": made("NAdam", foreach=True),
    "radam": made("RAdam"),
    "asgd": made("ASGD"),
    "rmsprop-centered": made("RMSprop", centered=True, momentum=0.9),
    "rmsprop-foreach": made("RMSprop", centered=True, momentum=0.9, foreach=True),
    "rprop": made("Rprop"),
    "muon": muon,
    "lion": Lion,
    "lion-flat-state": BlockwiseLion,
}
IN_EVERY_TIER = [
    "sgd-fused", "adamw", "adamw-foreach", "adamw-fused", "adafactor-huggingface",
    "lion-flat-state",
]  # fmt: skip


def program(name: str) -> OptimizerProgram:
    return OptimizerProgram(label=name, make=OPTIMIZERS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_matches_plain_torch(name: str, tmp_path: Path) -> None:
    same(program(name), tmp_path=tmp_path)


@pytest.mark.parametrize("name", IN_EVERY_TIER)
def test_optimizer_in_an_unmodified_script_over_three_tiers(name: str, tmp_path: Path) -> None:
    same(program(name), tmp_path=tmp_path, mode="context", nvme=True)


@pytest.mark.parametrize("name", IN_EVERY_TIER)
def test_optimizer_made_after_adoption(name: str, tmp_path: Path) -> None:
    same(program(name), tmp_path=tmp_path, mode="adopt_model", policy="clock")


@pytest.mark.parametrize("mode", ["adopt", "adopt_model", "context"])
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("prefers_lists", [False, True], ids=["as on CPU", "as on CUDA"])
def test_adamw_takes_the_implementation_that_plain_torch_takes(
    mode: str,
    settings: dict[str, bool],
    prefers_lists: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain torch takes its list kernels by default only where a device and an exact type allow."""
    if prefers_lists:  # what plain torch does with CUDA parameters
        monkeypatch.setattr(OPTIMIZER, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    taken: list[str] = []

    def spy(name: str, implementation: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            taken.append(name)
            implementation(*args, **kwargs)

        return call

    for name in IMPLEMENTATIONS:
        monkeypatch.setattr(ADAM, name, spy(name, getattr(ADAM, name)))
    case = OptimizerProgram(
        num_steps=2, label=f"adamw {settings} {prefers_lists}", make=made("AdamW", **settings)
    )
    same(case, tmp_path=tmp_path, mode=mode, use_cache=False)
    expected = "_multi_tensor_adam" if prefers_lists else "_single_tensor_adam"
    if "foreach" in settings:
        expected = "_multi_tensor_adam" if settings["foreach"] else "_single_tensor_adam"
    if "fused" in settings:
        expected = "_fused_adam"
    assert taken == [expected] * 4, "two plain and two paged steps"


def test_optimizer_class_and_parameter_identity_are_kept(tmp_path: Path) -> None:
    """Schedulers and scalers test `isinstance`, and states are found by identity."""
    seen: list[list[int]] = []

    class Watched(OptimizerProgram):
        def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = super().build()
            self.before = [id(p) for p in model.parameters()]
            return model, optimizer

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.before = [id(p) for p in model.parameters()]
            return super().build_optimizer(model)

        def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
            loss = super().step(model, optimizer, step_index)
            held = [id(p) for group in optimizer.param_groups for p in group["params"]]
            assert [id(p) for p in model.parameters()] == held == self.before
            assert all(type(p).__module__ for p in model.parameters())
            assert type(optimizer) is torch.optim.AdamW
            seen.append(held)
            return loss

    same(Watched(label="watched", make=made("AdamW")), tmp_path=tmp_path, mode="adopt")
    assert len(seen) == 6
