"""What workers of data loaders and pools import: what `python -c` defines cannot be unpickled."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Squares(Dataset[torch.Tensor]):
    """Makes tensors in the worker; `offset` comes from the parent."""

    def __init__(self, offset: torch.Tensor | float, size: int = 24) -> None:
        self.offset = offset
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        filled = torch.full((64,), float(index)) + torch.arange(64.0)
        kept = [torch.zeros(4096) + part for part in range(16)]  # more than the pager's budget
        return filled * filled + self.offset + sum(part[0] for part in kept) * 0


def seen(tensor: torch.Tensor) -> tuple[type, bool, float]:
    """What a worker sees of a tensor that was sent to it."""
    total = (tensor + torch.ones(tensor.shape)).sum()
    return type(tensor), tensor.requires_grad, float(total)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor.detach()
