"""Threads that train while another one changes budgets, prefetches, and sends everything away."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

import tvm_pager
from tests.trials.harness import KIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_THREADS, NUM_STEPS = 3, 12
PATIENCE_S = 120.0


class Scale(NamedTuple):
    """Sizes; budgets are least and most, and hold what all threads need together."""

    torch_device: str
    width: int
    rows: int
    device: tuple[int, int]
    host: tuple[int, int]
    nvme: int
    segment: int


def _scale(torch_device: str, factor: int) -> Scale:
    """Both sides of a matrix `factor` times as long as the least that is worth moving."""
    unit = factor * factor * KIB
    return Scale(
        torch_device,
        32 * factor,
        64 * factor,
        (64 * unit, 200 * unit),
        (700 * unit, 1400 * unit),
        512 * unit,
        4 * unit,
    )


CPU, CUDA = _scale("cpu", 1), _scale("cuda", 16)


class Training:
    """A few matrices and their optimizer; every thread has its own, with its own numbers."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self._scale = scale
        self._numbers = torch.Generator().manual_seed(seed)
        width = scale.width
        self.weights = [torch.nn.Parameter(self._draw(width, width) / width**0.5) for _ in range(4)]
        self._optimizer = torch.optim.AdamW(self.weights, lr=0.01)

    def run(self) -> list[str]:
        return [self._step() for _ in range(NUM_STEPS)]

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._numbers).to(self._scale.torch_device)

    def _step(self) -> str:
        x = self._draw(self._scale.rows, self._scale.width)
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        loss = x.square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach()).hex()


def in_threads(
    scale: Scale, meanwhile: Callable[[list[torch.Tensor]], None] = lambda _: None
) -> list[list[str]]:
    """Trains in threads, and does something with the weights again and again; gives the losses.

    Raises what one of them raises.
    """
    trainings = [Training(scale, number) for number in range(NUM_THREADS)]
    found: dict[int, list[str]] = {}
    errors: list[BaseException] = []

    # Until all are done: a thread that ended would leave its cuBLAS workspace to the next one, and
    # how many there are would depend on who was faster.
    is_done = threading.Barrier(NUM_THREADS)

    def train(number: int) -> None:
        try:
            found[number] = trainings[number].run()
            is_done.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            pass  # another one has raised
        except BaseException as error:
            errors.append(error.with_traceback(None))
            is_done.abort()

    threads = [
        threading.Thread(target=train, args=(number,), daemon=True) for number in range(NUM_THREADS)
    ]
    for thread in threads:
        thread.start()
    weights = [weight for training in trainings for weight in training.weights]
    while any(thread.is_alive() for thread in threads):
        meanwhile(weights)
        threads[0].join(0.001)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    trainings.clear()  # `train` may be alive in a traceback
    if errors:
        raise errors[0]
    return [found[number] for number in range(NUM_THREADS)]


def in_threads_under_changes(
    scale: Scale, policy: str, seed: int, nvme: Path | None, beside_bytes: int = 0
) -> list[list[str]]:
    """As `in_threads`, paged.

    Args:
        scale: sizes.
        policy: its name.
        seed: of what changes.
        nvme: directory of the swap file; None: there is none.
        beside_bytes: what libraries have on the device; the budget is the whole process's.
    """
    draw = random.Random(f"{seed}/{policy}/{nvme is not None}")
    place = {} if nvme is None else {"nvme": nvme, "nvme_bytes": scale.nvme}
    low, high = (nbytes + beside_bytes for nbytes in scale.device)
    with tvm_pager.Pager(
        high,
        scale.host[1],
        torch_device=scale.torch_device,
        policy=policy,
        segment_bytes=scale.segment,
        strict=True,
        **place,
    ) as pager:

        def disturb(weights: list[torch.Tensor]) -> None:
            what = draw.choice(["device", "host", "host", "prefetch", "prefetch", "away", "check"])
            if what == "device":
                pager.set_budgets(device=draw.randint(low, high))
            elif what == "host":
                pager.set_budgets(host=draw.randint(*scale.host))
            elif what == "prefetch":
                pager.prefetch(*draw.sample(weights, 2))
            elif what == "away":
                pager.evict_all()
            else:
                pager.check_invariants()

        return in_threads(scale, disturb)
