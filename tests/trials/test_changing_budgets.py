"""Threads train while budgets change and pages are asked for and sent away: bitwise right."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import tvm_pager
from tests.trials.harness import KIB, assert_nothing_left

if TYPE_CHECKING:
    from pathlib import Path

DEVICE, HOST, NVME = (64 * KIB, 200 * KIB), (700 * KIB, 1400 * KIB), 512 * KIB
NUM_THREADS, NUM_STEPS = 3, 12
PATIENCE_S = 120.0


class Training:
    """A few matrices and their optimizer; every thread has its own, with its own numbers."""

    def __init__(self, seed: int) -> None:
        self._numbers = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.nn.Parameter(torch.randn(32, 32, generator=self._numbers) / 6) for _ in range(4)
        ]
        self._optimizer = torch.optim.AdamW(self.weights, lr=0.01)

    def run(self) -> list[str]:
        return [self._step() for _ in range(NUM_STEPS)]

    def _step(self) -> str:
        x = torch.randn(64, 32, generator=self._numbers)
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        loss = x.square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach()).hex()


def disturb(pager: tvm_pager.Pager, weights: list[torch.Tensor], draw: random.Random) -> None:
    what = draw.choice(["device", "host", "host", "prefetch", "prefetch", "evict_all", "check"])
    if what == "device":
        pager.set_budgets(device=draw.randint(*DEVICE))
    elif what == "host":
        pager.set_budgets(host=draw.randint(*HOST))
    elif what == "prefetch":
        pager.prefetch(*draw.sample(weights, 2))
    elif what == "evict_all":
        pager.evict_all()
    else:
        pager.check_invariants()


@pytest.mark.parametrize("has_nvme", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lookahead", "teraio"])
@pytest.mark.parametrize("seed", range(2))
def test_threads_train_on_while_another_one_changes_the_budgets(
    seed: int, policy: str, has_nvme: bool, tmp_path: Path
) -> None:
    expected = [Training(number).run() for number in range(NUM_THREADS)]
    draw = random.Random(f"{seed}/{policy}/{has_nvme}")
    found: dict[int, list[str]] = {}
    errors: list[BaseException] = []
    place = {"nvme": tmp_path, "nvme_bytes": NVME} if has_nvme else {}
    with tvm_pager.Pager(
        DEVICE[1],
        HOST[1],
        torch_device="cpu",
        policy=policy,
        segment_bytes=4096,
        strict=True,
        **place,
    ) as pager:
        trainings = [Training(number) for number in range(NUM_THREADS)]

        def train(number: int) -> None:
            try:
                found[number] = trainings[number].run()
            except BaseException as error:
                errors.append(error.with_traceback(None))

        threads = [
            threading.Thread(target=train, args=(number,), daemon=True)
            for number in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        weights = [weight for training in trainings for weight in training.weights]
        while any(thread.is_alive() for thread in threads):
            disturb(pager, weights, draw)
            threads[0].join(draw.random() / 200)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        del weights
        trainings.clear()
    assert not errors
    assert [found[number] for number in range(NUM_THREADS)] == expected
    assert_nothing_left(tmp_path)
