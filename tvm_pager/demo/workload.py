"""What the demonstration runs, plain and paged alike: fine-tune, then generate; no pager here.

`Observer` is told at the points where a paged run has something to look at; a plain run passes one
that does nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tvm_pager.demo.digest import digest_tensors
from tvm_pager.demo.model import Inputs, build_model

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["Observer", "Outcome", "run_workload"]

# Small enough that a few steps on source code do not make the model forget France.
_LEARNING_RATE = 1e-5


class Observer(Protocol):
    """Looks at tensors in the middle of a run, without changing them."""

    def after_forward(self, activations: list[torch.Tensor]) -> None:
        """Is given the output of each decoder layer while backward still needs it."""

    def after_step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Is called after each optimizer step, while the gradients are still there."""


@dataclass(slots=True)
class Outcome:
    """Everything that two runs must agree on, and the seconds that they may differ in.

    Attributes:
        losses: one per step, exact (a float32 fits a float).
        tokens: generated ids, the prompt not included.
        digests: by kind ("weights", "gradients", "optimizer states"), SHA-256 by tensor name.
        seconds: by phase; "steps" holds one figure per step.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: dict[str, Any] = field(default_factory=dict)


def run_workload(
    inputs: Inputs,
    state: dict[str, torch.Tensor],
    device: str,
    observer: Observer | None,
    say: Callable[[str], None],
) -> Outcome:
    """Builds, trains, generates and takes checksums. `state` is emptied once it is loaded."""
    import torch

    outcome = Outcome()
    started_s = time.perf_counter()
    torch.manual_seed(inputs.seed)
    model = build_model(inputs.config, device)
    model.load_state_dict(state)
    state.clear()
    # foreach=False: torch takes the loop over single tensors for paged parameters anyway, and so
    # that both runs call the same kernels the plain one must too. On the CPU it is the default.
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, foreach=False)
    outcome.seconds["build"] = _synchronise(device) - started_s
    _train(inputs, model, optimizer, device, observer, say, outcome)

    started_s = time.perf_counter()
    model.eval()
    prompt = torch.tensor([inputs.prompt], device=device)
    generated = model.generate(  # type: ignore[operator]  # transformers' models are typed loosely
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=inputs.num_tokens,
        do_sample=False,
    )
    outcome.tokens = generated[0, len(inputs.prompt) :].tolist()
    outcome.seconds["generate"] = _synchronise(device) - started_s
    say(f"generated {len(outcome.tokens)} tokens in {outcome.seconds['generate']:.1f} s")

    started_s = time.perf_counter()
    outcome.digests = _digests(model, optimizer)
    outcome.seconds["checksums"] = time.perf_counter() - started_s
    return outcome


def _train(
    inputs: Inputs,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str,
    observer: Observer | None,
    say: Callable[[str], None],
    outcome: Outcome,
) -> None:
    import torch

    activations: list[torch.Tensor] = []
    layers: Any = model.get_submodule("model.layers")
    handles = [
        layer.register_forward_hook(lambda _layer, _args, output: activations.append(output))
        for layer in (layers if observer is not None else ())
    ]
    model.train()
    outcome.seconds["steps"] = []
    for step, ids in enumerate(inputs.batches):
        started_s = time.perf_counter()
        batch = torch.tensor(ids, device=device)
        optimizer.zero_grad()  # here, so that the last step's gradients are left to compare
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        if observer is not None:
            observer.after_forward(activations)
            activations.clear()
        loss.backward()
        optimizer.step()
        outcome.losses.append(loss.item())
        outcome.seconds["steps"].append(_synchronise(device) - started_s)
        if observer is not None:
            observer.after_step(model, optimizer)
        say(
            f"step {step + 1} of {len(inputs.batches)}: loss {outcome.losses[-1]:.6f}, "
            f"{outcome.seconds['steps'][-1]:.1f} s"
        )
    for handle in handles:
        handle.remove()


def _digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
    named = list(model.named_parameters())
    states = (
        (f"{name} {key}", optimizer.state[parameter][key])
        for name, parameter in named
        for key in sorted(optimizer.state[parameter])
    )
    gradients = ((name, parameter.grad) for name, parameter in named if parameter.grad is not None)
    return {
        "weights": digest_tensors(named),
        "gradients": digest_tensors(gradients),
        "optimizer states": digest_tensors(states),
    }


def _synchronise(device: str) -> float:
    """Waits for the device and gives the time, so that seconds are those of finished work."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()
