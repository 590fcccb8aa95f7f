"""Training, evaluation and generation by turns: each begins alike whatever came before it."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.tensor.test_recorded_iterations import num_iterations
from tests.trials.harness import KIB, batch, mlp, small_pager

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

OPTIONS: dict[str, Any] = {"device": 64 * KIB, "host": 1024 * KIB, "policy": "lookahead"}


def counts_of(pager: Any) -> Any:
    return pager._core.iterations.outcomes.counts


def train(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    loss = model(batch(index)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_each_of_three_kinds_has_one_trace_in_the_end(tmp_path: Path) -> None:
    with small_pager(tmp_path, **OPTIONS) as pager:
        model = mlp(6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        kept = []
        for number in range(12):
            kept += [train(model, optimizer, 10 * number + i) for i in range(2)]
            with torch.no_grad():
                kept += [model(batch(10 * number + i)).square().mean() for i in range(2)]
                row = batch(number)[:1]
                for _ in range(4):
                    row = model(row)
                    kept.append(row)
        counts = counts_of(pager)
        num_learned = counts["complete"]
        # Of 12 x 8, without the first rounds.
        assert num_learned >= 70
        assert counts["recorded"] <= 10
        assert len(pager._core.iterations._known) <= 4
        del model, optimizer, kept, row


def test_what_comes_between_an_update_and_the_next_model_belongs_to_the_update(
    tmp_path: Path,
) -> None:
    with small_pager(tmp_path, **OPTIONS) as pager:
        model = mlp(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for index in range(8):
            train(model, optimizer, index)
            if index % 2:
                torch.ones(8) + torch.ones(8)  # as a log would
        counts = counts_of(pager)
        assert num_iterations(pager) == 7
        assert counts["complete"] == 4
        follower = pager._core.iterations.follower
        assert follower is not None
        assert follower.known.trace.modules[follower.known.trace.ops[0].module] == "0"
        del model, optimizer


def functional_step(weights: list[torch.Tensor], optimizer: Any, index: int) -> None:
    x = batch(index)
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_program_that_enters_no_model_has_iterations_too(tmp_path: Path) -> None:
    with small_pager(tmp_path, **OPTIONS) as pager:
        weights = [torch.nn.Parameter(torch.randn(64, 64) / 8) for _ in range(8)]
        optimizer = torch.optim.SGD(weights, lr=1e-2, foreach=False)
        for index in range(9):
            functional_step(weights, optimizer, index)
        assert num_iterations(pager) == 8
        assert counts_of(pager)["complete"] >= 5
        del weights, optimizer


def test_a_program_that_enters_models_no_more_has_iterations_again(tmp_path: Path) -> None:
    with small_pager(tmp_path, **OPTIONS) as pager:
        model = mlp(4)
        weights = [torch.nn.Parameter(torch.randn(64, 64) / 8) for _ in range(12)]
        optimizer = torch.optim.SGD([*model.parameters(), *weights], lr=1e-2, foreach=False)
        for index in range(3):
            train(model, optimizer, index)
        before = num_iterations(pager)
        for index in range(10):
            functional_step(weights, optimizer, index)
        assert num_iterations(pager) >= before + 8
        del model, weights, optimizer


def test_two_optimizers_one_after_the_other_wait_for_one_model(tmp_path: Path) -> None:
    """What the first one creates (its states, and what clears gradients) is no iteration."""
    with small_pager(tmp_path, **OPTIONS) as pager:
        model = mlp(6)
        halves = list(model.parameters())[::2], list(model.parameters())[1::2]
        optimizers = [torch.optim.AdamW(half, lr=1e-3, foreach=False) for half in halves]
        for index in range(7):
            model(batch(index)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        assert num_iterations(pager) == 6
        del model, halves, optimizers, optimizer


def test_blocks_that_a_program_calls_one_by_one_make_one_iteration(tmp_path: Path) -> None:
    with small_pager(tmp_path, **OPTIONS) as pager:
        blocks = [mlp(1) for _ in range(6)]
        with torch.no_grad():
            for index in range(8):
                x = batch(index)
                for block in blocks:
                    x = block(x)
        assert num_iterations(pager) == 7
        assert counts_of(pager)["complete"] >= 4
        del blocks, block, x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_that_are_checkpointed_make_one_iteration(
    use_reentrant: bool, tmp_path: Path
) -> None:
    """Reentrant checkpointing turns gradients off, as evaluation does."""
    with small_pager(tmp_path, **OPTIONS) as pager:
        blocks = [mlp(1) for _ in range(6)]
        parameters = [p for block in blocks for p in block.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=1e-2, foreach=False)
        for index in range(8):
            x = batch(index).requires_grad_()
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert num_iterations(pager) == 7
        assert counts_of(pager)["complete"] >= 4
        del blocks, block, parameters, optimizer, x


def test_a_model_at_whose_entry_recording_ends_is_let_go(tmp_path: Path) -> None:
    """The hook that takes modules down was called once more after it had been removed."""
    with small_pager(tmp_path, **OPTIONS) as pager:
        pager.record()
        model = mlp(6)
        with torch.no_grad():
            for index in range(4):
                model(batch(index))
        assert counts_of(pager)["recorded"] == 2
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
