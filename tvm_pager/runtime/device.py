"""The device that pages live on: which one it is, and what its memory can give."""

from __future__ import annotations

import torch

from tvm_pager.errors import ConfigError
from tvm_pager.machine import DeviceMemory, Limit, host_limit_bytes
from tvm_pager.units import format_bytes

__all__ = ["check_device_budget", "device_memory", "prepare_cuda", "resolve_device", "trace_facts"]


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


def trace_facts(device: torch.device) -> dict[str, str]:
    """What a trace that is recorded on the device says of its origin."""
    is_cuda = device.type == "cuda"
    return {
        "recorded": "from a run, device times by events" if is_cuda else "from a run on the CPU",
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "torch": torch.__version__,
    }


def device_memory(device: torch.device) -> DeviceMemory | None:
    """What the device has, in bytes; None on the CPU, where CPU tensors only stand in for it.

    Free is what nobody holds, and what torch has taken from CUDA in this process: budgets count
    that. What other processes hold is not free.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(free + torch.cuda.memory_reserved(device), total)


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
    """Raises ConfigError for a budget beyond what can ever be there: it would not be enforced."""
    if device.type == "cuda":
        limit = Limit(torch.cuda.mem_get_info(device)[1], f"the memory of {device}")
    else:
        limit = host_limit_bytes()
    if budget_bytes is not None and budget_bytes > limit.nbytes:
        raise ConfigError(
            f"device budget of {format_bytes(budget_bytes)} on {device}: {limit.reason} is "
            f"{format_bytes(limit.nbytes)}; give less, or leave it out for all"
        )
