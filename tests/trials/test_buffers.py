"""Section C of the trials, buffers: saved, counted and moved like weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.trials.harness import (
    Run,
    bytes_written,
    everything,
    same,
)

if TYPE_CHECKING:
    from pathlib import Path


class Counted(nn.Module):
    """Buffers of each sort: running statistics, a mask that is not saved, an integer counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.ones(32, 32).tril().bool(), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.norm(self.conv(x))
        size = y.shape[-1]
        scores = (y.transpose(1, 2) @ y).masked_fill(~self.mask[:size, :size], 0.0)
        return scores.mean(-1)


@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
def test_buffers_are_pages_like_weights(enter: bool, tmp_path: Path) -> None:
    """Trial 28: buffers on disk were not saved, or stayed in memory that nobody counted."""

    def f(run: Run) -> Any:
        model = Counted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.page(model, optimizer)
        if run.pager:
            assert all(run.pager.is_paged(b) for b in model.buffers())
            before = bytes_written(run.pager.stats())
            run.evict()
            moved = bytes_written(run.pager.stats()) - before
            assert moved >= sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        generator = torch.Generator().manual_seed(2)
        outputs = []
        for step in range(6):
            model.train(step < 5)
            x = torch.randn(4, 4, 16, generator=generator)
            run.evict()
            optimizer.zero_grad()
            out = model(x)
            if step < 5:
                out.square().sum().backward()
                run.evict()
                optimizer.step()
            outputs.append(out.detach())
        run.evict()
        return outputs, everything(model), model.state_dict()

    same(f, tmp_path, enter=enter)
