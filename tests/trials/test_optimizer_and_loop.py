"""Section F of the trials: optimizers, schedulers, clipping, accumulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.trials.harness import (
    KIB,
    LAYER_BYTES,
    Run,
    assert_nothing_left,
    batch,
    everything,
    mlp,
    same,
    small_pager,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def with_lambda_schedule(run: Run) -> Any:
    model = mlp(num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.page(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    losses, rates = [], []
    for step in range(3):
        losses += train(run, model, optimizer, steps=1, first=step)
        schedule.step()
        rates.append(schedule.get_last_lr())
    return losses, rates, everything(model, optimizer)


def with_one_cycle(run: Run) -> Any:
    model = mlp(num_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.page(model, optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    losses = []
    for step in range(3):
        losses += train(run, model, optimizer, steps=1, first=step)
        schedule.step()
    return losses, schedule.get_last_lr(), everything(model, optimizer)


def with_grad_scaler(run: Run) -> Any:
    model = mlp(num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.page(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        if step == 2:
            loss = loss * float("inf")  # this step must be skipped
        run.evict()
        scaler.scale(loss).backward()
        run.evict()
        scaler.unscale_(optimizer)
        run.evict()
        scaler.step(optimizer)
        scaler.update()
        losses.append((loss.item(), scaler.get_scale()))
    return losses, everything(model, optimizer)


def with_frozen_layers(run: Run) -> Any:
    model = mlp(num_layers=3)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.page(model, optimizer)
    losses = train(run, model, optimizer)
    assert model[0].weight.grad is None
    return losses, everything(model, optimizer)


def with_groups(run: Run) -> Any:
    model = mlp(num_layers=3)
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    run.page(model, optimizer)
    losses = train(run, model, optimizer, steps=2)
    run.evict()
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.05})
    losses += train(run, model, optimizer, steps=2, first=2)
    return losses, everything(model, optimizer)


def with_closure(run: Run) -> Any:
    model = mlp(num_layers=2, width=16)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)
    run.page(model, optimizer)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch(0, width=16)) - 1).square().mean()
        run.evict()
        loss.backward()
        run.evict()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert losses[-1] < losses[0]
    return losses, everything(model)


def with_weights_loaded_late(run: Run) -> Any:
    model = mlp(num_layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.page(model, optimizer)
    losses = train(run, model, optimizer, steps=1)
    late = {name: torch.full(p.shape, 0.01) for name, p in model.named_parameters()}
    run.evict()
    model.load_state_dict(late)
    run.evict()
    losses += train(run, model, optimizer, steps=2, first=1)
    return losses, everything(model, optimizer)


def with_states_loaded_late(run: Run) -> Any:
    model = mlp(num_layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.page(model, optimizer)
    train(run, model, optimizer, steps=2)
    run.evict()
    state = optimizer.state_dict()
    other = torch.optim.Adam(model.parameters(), lr=0.5)
    other.load_state_dict(state)
    run.evict()
    losses = train(run, model, other, steps=2, first=2)
    return losses, everything(model, other)


def with_options(**options: Any) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        model = mlp(num_layers=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        run.page(model, optimizer)
        losses = train(run, model, optimizer)
        return losses, everything(model, optimizer)

    return program


LOOPS: dict[str, Callable[[Run], Any]] = {
    "LambdaLR": with_lambda_schedule,
    "OneCycleLR": with_one_cycle,
    "GradScaler": with_grad_scaler,
    "frozen layers": with_frozen_layers,
    "groups, one added later": with_groups,
    "LBFGS": with_closure,
    "weights loaded late": with_weights_loaded_late,
    "states loaded late": with_states_loaded_late,
    "foreach": with_options(foreach=True),
    "fused": with_options(fused=True),
    "amsgrad": with_options(amsgrad=True, maximize=True),
}


@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_users_optimizer_stays_an_optimizer(loop: str, enter: bool, tmp_path: Path) -> None:
    """Trial 42: an offloading optimizer was no Optimizer: schedulers refused it, frozen weights
    crashed it, and weights loaded after it was made were not seen.
    """
    same(LOOPS[loop], tmp_path, enter=enter, device=88 * KIB)


def gradients(run: Run, num_layers: int = 40) -> list[nn.Parameter]:
    """Parameters of `num_layers` layers whose gradients alone are ten times the device."""
    parameters = []
    for index in range(num_layers):
        parameter = nn.Parameter(torch.zeros(64, 64))
        parameter.grad = batch(index, rows=64)
        parameters.append(parameter)
        run.evict()
    return parameters


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_streams_over_gradients(
    norm_type: float, foreach: bool | None, tmp_path: Path
) -> None:
    """Trial 43: clipping failed when gradients lay on the other device.

    The gradients together are ten times the device's budget.
    """
    device = 64 * KIB

    def f(run: Run) -> Any:
        parameters = gradients(run)
        grads_bytes = sum(p.grad.nbytes for p in parameters)
        assert grads_bytes >= 10 * device
        norm = nn.utils.clip_grad_norm_(parameters, 1.0, norm_type, foreach=foreach)
        run.evict()
        again = nn.utils.get_total_norm([p.grad for p in parameters], norm_type, foreach=foreach)
        nn.utils.clip_grad_value_(parameters, 0.001, foreach=foreach)
        return norm, again, [p.grad for p in parameters[::7]]

    same(f, tmp_path, device=device)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_refuses_what_is_not_finite(foreach: bool, tmp_path: Path) -> None:
    """Trial 43, second half: `error_if_nonfinite` raises as in plain torch and changes nothing."""

    def f(run: Run) -> Any:
        parameters = gradients(run, num_layers=6)
        parameters[3].grad[1, 1] = float("nan")
        run.evict()
        with pytest.raises(RuntimeError, match="non-finite") as caught:
            nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True, foreach=foreach)
        return str(caught.value), [p.grad for p in parameters]

    same(f, tmp_path)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_into_pages_that_are_out(set_to_none: bool, tmp_path: Path) -> None:
    """Trial 44: a new gradient replaced the old one, or was not found at all.

    Four micro-steps with gradients off the device in between, a user who reads `p.grad`, and a
    backward pass that is run twice.
    """

    def f(run: Run) -> Any:
        model = mlp(num_layers=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.page(model, optimizer)
        seen = []
        for step in range(2):
            for micro in range(4):
                loss = model(batch(4 * step + micro)).square().mean() / 4
                run.evict()
                loss.backward(retain_graph=micro == 3)
                if micro == 3:
                    run.evict()
                    loss.backward()
                run.evict()
                seen.append(model[0].weight.grad[3, :4].clone())
                seen.append(model[4].bias.grad.norm().item())
            optimizer.step()
            run.evict()
            weights = everything(model)
            optimizer.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                assert all(p.grad is None for p in model.parameters())
            else:
                assert all(not p.grad.any() for p in model.parameters())
        return seen, weights

    same(f, tmp_path, enter=False)


def test_dropped_gradients_leave_the_books(tmp_path: Path) -> None:
    """Trial 44, second half: `zero_grad` gives the bytes back, wherever they lay."""
    with small_pager(tmp_path) as pager:
        model = mlp(num_layers=3)
        baseline = pager.stats().num_pages
        model(batch(0)).square().mean().backward()
        pager.evict_all()
        assert pager.stats().num_pages == baseline + 6
        model.zero_grad(set_to_none=True)
        assert pager.stats().num_pages == baseline
        assert baseline == 6
        before = pager.stats().bytes_by_lane["h2d"]
        for p in model.parameters():
            assert p.grad is None
        assert pager.stats().bytes_by_lane["h2d"] == before < 16 * LAYER_BYTES
        pager.check_invariants()
        del model, p
    assert_nothing_left(tmp_path)
