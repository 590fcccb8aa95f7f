"""The host: copies, casts and fused AdamW updates by number of threads."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch

from tvm_pager.observe.profile.adamw import BYTES_PER_PARAM, AdamW
from tvm_pager.observe.profile.effort import share_of
from tvm_pager.observe.profile.identity import cpu_name, num_cores, num_numa_nodes
from tvm_pager.observe.profile.rounds import rate
from tvm_pager.planning.hardware.profile import HostRates
from tvm_pager.planning.hardware.rates import Curve, Figure, Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tvm_pager.observe.profile.effort import Effort

__all__ = ["measure_host"]

_CPU = torch.device("cpu")


def measure_host(effort: Effort, available_bytes: int, physical_bytes: int) -> HostRates:
    """Measures with 1 up to all threads, and sets torch's number of threads back. Blocks."""
    counts = effort.thread_counts(num_cores())

    def by_threads(call: Callable[[], object], units: int) -> Curve:
        return Curve(tuple(Point(count, _measure(call, units, count, effort)) for count in counts))

    with _threads(counts[-1]):  # memory is touched by all, so that it is spread as in real runs
        memcpy = by_threads(*_copy_call(effort, available_bytes))
        to_fp32, to_bf16 = (
            by_threads(*_cast_call(effort, available_bytes, *dtypes))
            for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
        )
        wanted_bytes = BYTES_PER_PARAM * effort.num_params
        num_params = share_of(wanted_bytes, available_bytes) // BYTES_PER_PARAM
        adamw = by_threads(AdamW(num_params, _CPU).step, num_params)
    return HostRates(
        cpu_name=cpu_name(),
        num_cores=counts[-1],
        num_numa_nodes=num_numa_nodes(),
        physical_bytes=physical_bytes,
        available_bytes=available_bytes,
        memcpy_bytes_per_s=memcpy,
        adamw_params_per_s=adamw,
        bf16_to_fp32_per_s=to_fp32,
        fp32_to_bf16_per_s=to_bf16,
    )


def _copy_call(effort: Effort, available_bytes: int) -> tuple[Callable[[], object], int]:
    nbytes = share_of(2 * effort.buffer_bytes, available_bytes) // 2
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=_CPU) for _ in range(2))
    return lambda: target.copy_(source), nbytes


def _cast_call(
    effort: Effort, available_bytes: int, source_dtype: torch.dtype, target_dtype: torch.dtype
) -> tuple[Callable[[], object], int]:
    bytes_per_element = source_dtype.itemsize + target_dtype.itemsize
    num_elements = share_of(effort.buffer_bytes, available_bytes) // bytes_per_element
    source = torch.ones(num_elements, dtype=source_dtype, device=_CPU)
    target = torch.ones(num_elements, dtype=target_dtype, device=_CPU)
    return lambda: target.copy_(source), num_elements


def _measure(call: Callable[[], object], units: int, num_threads: int, effort: Effort) -> Figure:
    def time_calls(num_calls: int) -> float:
        started_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        return time.perf_counter() - started_s

    with _threads(num_threads):
        return rate(time_calls, units, effort)


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
