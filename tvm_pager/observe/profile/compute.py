"""The device: matrix products by dtype, copies within its memory, fused AdamW updates."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch

from tvm_pager.observe.profile.adamw import BYTES_PER_PARAM, AdamW
from tvm_pager.observe.profile.effort import share_of
from tvm_pager.observe.profile.identity import cpu_name
from tvm_pager.observe.profile.rounds import rate
from tvm_pager.planning.hardware.profile import DeviceRates, MatmulRates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tvm_pager.machine import DeviceMemory
    from tvm_pager.observe.profile.effort import Effort
    from tvm_pager.planning.hardware.rates import Figure

__all__ = ["measure_device", "release_cached"]


def measure_device(device: torch.device, effort: Effort, memory: DeviceMemory) -> DeviceRates:
    """Measures on the device's current stream, or with torch's threads on a stand-in. Blocks."""
    is_cuda, free_bytes = device.type == "cuda", memory.free_bytes
    buffer_bytes = effort.device_buffer_bytes if is_cuda else effort.buffer_bytes
    wanted_params = effort.num_device_params if is_cuda else effort.num_params
    num_params = share_of(BYTES_PER_PARAM * wanted_params, free_bytes) // BYTES_PER_PARAM
    # One after the other, and nothing of the one before is kept in the allocator's cache.
    matmul = _measure_matmul(device, effort, free_bytes)
    release_cached(device)
    copy = _measure_copy(device, share_of(2 * buffer_bytes, free_bytes) // 2, effort)
    release_cached(device)
    adamw = _measure_calls(device, AdamW(num_params, device).step, num_params, effort)
    return DeviceRates(
        name=torch.cuda.get_device_name(device) if is_cuda else cpu_name(),
        is_stand_in=not is_cuda,
        total_bytes=memory.total_bytes,
        free_bytes=free_bytes,
        matmul_flop_per_s=matmul,
        copy_bytes_per_s=copy,
        adamw_params_per_s=adamw,
    )


def release_cached(device: torch.device) -> None:
    """Gives device memory that nobody uses back to the driver; on the CPU there is none to give."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_calls(device: torch.device, call: Callable[[], object], num_calls: int) -> float:
    """Seconds that the device takes for so many calls, by its own clock. Blocks."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        return time.perf_counter() - started_s
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(num_calls):
            call()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _measure_calls(
    device: torch.device, call: Callable[[], object], units: float, effort: Effort
) -> Figure:
    return rate(lambda num_calls: time_calls(device, call, num_calls), units, effort)


def _measure_copy(device: torch.device, nbytes: int, effort: Effort) -> Figure:
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return _measure_calls(device, lambda: target.copy_(source), nbytes, effort)


def _measure_matmul(device: torch.device, effort: Effort, free_bytes: int) -> MatmulRates:
    is_cuda = device.type == "cuda"
    size = effort.matmul_size if is_cuda else effort.stand_in_matmul_size
    while size > 16 and 3 * 4 * size * size > share_of(free_bytes, free_bytes):
        size //= 2

    def measure(dtype: torch.dtype) -> Figure:
        # Small random values: products of large ones overflow fp16, constants flatter the clocks.
        generator = torch.Generator(device=device).manual_seed(0)
        a, b = (
            torch.randn(size, size, generator=generator, device=device).mul_(0.01).to(dtype)
            for _ in range(2)
        )
        out = torch.empty_like(a)
        return _measure_calls(device, lambda: torch.mm(a, b, out=out), 2.0 * size**3, effort)

    with _fp32_precision("ieee"):
        fp32 = measure(torch.float32)
    tf32 = None
    if is_cuda and torch.cuda.get_device_capability(device) >= (8, 0):
        with _fp32_precision("tf32"):
            tf32 = measure(torch.float32)
    return MatmulRates(fp32, tf32, bf16=measure(torch.bfloat16), fp16=measure(torch.float16))


@contextlib.contextmanager
def _fp32_precision(name: str) -> Iterator[None]:
    """Sets how fp32 products are computed on GPUs, and back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = name
    try:
        yield
    finally:
        matmul.fp32_precision = before
