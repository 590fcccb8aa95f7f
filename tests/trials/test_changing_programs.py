"""Programs that do not repeat, under a policy that plans.

DeepSpeed I#5662, I#6870, I#5033; DeepSpeedExamples I#840: a recorded order that matches no longer
gave a warning at each step, kept what was prefetched for ever, and stalled.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trials.harness import KIB, WIDTH, Run, batch, everything, mlp, same

PLANNED = "tests.model.tiny_planner:TinyPlanner"
POLICIES = [PLANNED, "lookahead"]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def followed(stats: Any) -> tuple[int, int]:
    """Iterations that were followed to the end, and all of them."""
    words = stats.plans.split()
    return int(words[1]), int(words[3])


def test_a_training_loop_is_planned_and_computes_the_same(policy: str, tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        model = mlp(6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = [step(model, optimizer, batch(i)) for i in range(10)]
        return losses, everything(model, optimizer)

    stats = same(program, tmp_path, policy=policy, device=112 * KIB, host=1024 * KIB)
    num_followed, num_all = followed(stats)
    assert num_followed >= 6
    assert num_all <= 11


def test_training_evaluation_and_generation_alternate(policy: str, tmp_path: Path) -> None:
    """Scenario: each of the three comes back; each has a trace in the end."""

    def program(run: Run) -> Any:
        model = mlp(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        results: list[Any] = []
        for round_ in range(4):
            results += [step(model, optimizer, batch(i)) for i in range(4)]
            model.eval()
            with torch.no_grad():
                results += [model(batch(100 + i)).sum().item() for i in range(4)]
                sequence = batch(round_, rows=2)
                for _ in range(4):  # each token after the last one
                    sequence = torch.cat((sequence, model(sequence)[-1:]))
            results.append(sequence)
            model.train()
        return results, everything(model, optimizer)

    stats = same(program, tmp_path, policy=policy, device=96 * KIB, host=1024 * KIB)
    num_followed, num_all = followed(stats)
    assert num_followed > num_all // 3
    assert_one_line(stats)


def test_a_sequence_that_grows(policy: str, tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        model = mlp(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        return [step(model, optimizer, batch(i, rows=4 + 2 * i)) for i in range(16)]

    stats = same(program, tmp_path, policy=policy, device=96 * KIB, host=1024 * KIB)
    assert followed(stats)[0] >= 6
    assert_one_line(stats)


class Skipping(nn.Module):
    """Stochastic depth: a layer is left out now and then."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.random = random.Random(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.random.random() > 0.15:
                x = x + torch.tanh(layer(x))
        return x


def test_layers_are_skipped_at_random(policy: str, tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        model = Skipping()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        losses = [step(model, optimizer, batch(i)) for i in range(20)]
        return losses, everything(model, optimizer)

    stats = same(program, tmp_path, policy=policy, device=112 * KIB, host=1024 * KIB)
    num_followed, num_all = followed(stats)
    assert num_followed > num_all // 3
    assert_one_line(stats)


class Experts(nn.Module):
    """Each row goes through the expert that a router chooses; some experts see none."""

    def __init__(self, num: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return out + x


def test_experts_are_chosen_by_the_data(policy: str, tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        model = nn.Sequential(*[Experts() for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        losses = [step(model, optimizer, batch(i, rows=6)) for i in range(16)]
        return losses, everything(model, optimizer)

    stats = same(program, tmp_path, policy=policy, device=128 * KIB, host=1024 * KIB)
    assert_one_line(stats)


def test_two_networks_are_trained_by_turns(policy: str, tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        first, second = mlp(4), mlp(5)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (first, second)]
        losses = []
        for i in range(10):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                losses.append(step(model, optimizer, batch(i)))
        return losses, everything(first), everything(second)

    stats = same(program, tmp_path, policy=policy, device=96 * KIB, host=1024 * KIB)
    num_followed, num_all = followed(stats)
    assert num_all >= 19
    assert num_followed >= 12
    assert "2 traces" in stats.plans


def test_gradients_that_are_accumulated_make_one_iteration(tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        model = mlp(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i in range(8):
            for part in range(3):
                model(batch(3 * i + part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model)

    stats = same(program, tmp_path, policy=PLANNED, device=80 * KIB, host=1024 * KIB)
    assert followed(stats)[1] <= 8
    assert "1 traces" in stats.plans


def test_optimizers_that_step_inside_backward_end_no_iteration(tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        model = mlp(6)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=1e-2)

            def update(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        for i in range(8):
            model(batch(i)).square().mean().backward()
        return everything(model)

    stats = same(program, tmp_path, policy=PLANNED, device=80 * KIB, host=1024 * KIB)
    assert followed(stats)[1] <= 8
    assert "1 traces" in stats.plans


def test_marks_of_the_program_decide_from_the_first_one_on(tmp_path: Path) -> None:
    def program(run: Run) -> Any:
        model = mlp(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i in range(12):
            step(model, optimizer, batch(i))
            if i % 2 and run.pager is not None:
                run.pager.step()
        return everything(model)

    stats = same(program, tmp_path, policy=PLANNED, device=80 * KIB, host=1024 * KIB)
    # One at the first optimizer's step, then each second step.
    assert followed(stats)[1] <= 8


def test_a_program_that_changes_all_the_time_takes_less_than_three_times_lru(
    tmp_path: Path,
) -> None:
    def program(run: Run) -> Any:
        model = Skipping(12)
        pick = random.Random(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i in range(30):
            if pick.random() < 0.3:
                with torch.no_grad():
                    model(batch(i, rows=pick.randrange(1, 9)))
            else:
                step(model, optimizer, batch(i, rows=pick.randrange(1, 9)))
        return everything(model)

    took = []
    for policy in ("lru", "lookahead"):
        started = time.process_time()
        same(program, tmp_path, policy=policy, device=96 * KIB, host=1024 * KIB)
        took.append(time.process_time() - started)
    assert took[1] < 3 * took[0]


def assert_one_line(stats: Any) -> None:
    """Nothing was said at each step."""
    assert len([text for text in stats.notices if "plan" in text or "trace" in text]) <= 1
