"""The device that pages live on: which one it is, and what its memory can give."""

from __future__ import annotations

import psutil
import torch

from tvm_pager.errors import ConfigError
from tvm_pager.units import format_bytes

__all__ = ["check_device_budget", "free_device_bytes", "prepare_cuda", "resolve_device"]

_HEADROOM = 0.05  # of the card, left to CUDA's own allocations when no budget is given


def resolve_device(name: str | None) -> torch.device:
    """The device that pages live on, with its index; None means CUDA where there is one.

    Raises:
        ConfigError: it does not exist here, or is of a kind that cannot be paged.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"torch_device={name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"torch_device={name!r}: pages live on 'cuda' or, standing in for it, on 'cpu'"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"torch_device={name!r}: torch sees no CUDA device here; leave it out or give 'cpu'"
            )
        return torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
    return torch.device("cpu")


def free_device_bytes(device: torch.device) -> int | None:
    """Bytes that pages could take now, less some headroom for CUDA; None on the CPU: unknown."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - _HEADROOM * total)


def prepare_cuda(device: torch.device) -> None:
    """Makes the allocator exact, and takes cuBLAS's workspaces before anything is counted.

    Without expandable segments the allocator keeps up to 1 MiB of a large block beside what was
    asked. cuBLAS takes 32 MiB once per thread and stream, so forward and backward each take theirs.
    """
    # The first name is the one of torch >= 2.11; it is private, and there is no public one.
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    with torch.enable_grad():
        weight = torch.ones(16, 16, device=device, requires_grad=True)
        (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]


def check_device_budget(budget_bytes: int | None, device: torch.device) -> None:
    """Raises ConfigError for a budget beyond the physical memory: it would never be enforced."""
    is_cuda = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if is_cuda else psutil.virtual_memory().total
    if budget_bytes is not None and budget_bytes > total:
        raise ConfigError(
            f"device budget of {format_bytes(budget_bytes)}: {device} has {format_bytes(total)} of "
            "physical memory; give less, or leave it out for all"
        )
