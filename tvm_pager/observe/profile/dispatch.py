"""What issuing an operation costs the thread that does it: plainly, and on resident pages."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Protocol

import torch

from tvm_pager.observe.profile.rounds import repeat

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tvm_pager.observe.profile.effort import Effort
    from tvm_pager.planning.hardware.rates import Figure

__all__ = ["MakePager", "measure_dispatch"]

_NUM_BLOCKS = 5
_SLAB = "1MiB"  # nothing moves: everything fits
_POLICY = "lru"  # not one that plans: it would need the profile that is being measured


class MakePager(Protocol):
    """`tvm_pager.Pager`, handed down: this room lies below the one that it lives in."""

    def __call__(
        self, *, torch_device: str, host: str, policy: str
    ) -> AbstractContextManager[object]: ...


def measure_dispatch(
    device: torch.device, make_pager: MakePager, effort: Effort
) -> tuple[Figure, Figure]:
    """Nanoseconds of `torch.add` on 64 elements: plain, and on pages in a `Pager` without a budget.

    On CUDA it is the time to issue the operation, not to run it. One thread. Blocks, beside the
    rounds for a pager to open (it imports Dynamo the first time: seconds) and to close.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def rounds() -> Figure:
        return repeat(
            lambda: [_time(device, effort.num_calls)], effort.num_rounds, effort.dispatch_round_s
        )[0]

    try:
        plain_ns = rounds()
        with make_pager(torch_device=str(device), host=_SLAB, policy=_POLICY):
            dispatched_ns = rounds()
    finally:
        torch.set_num_threads(num_threads)
    return plain_ns, dispatched_ns


def _time(device: torch.device, num_calls: int) -> float:
    x, y = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device)
    add = torch.add
    for _ in range(num_calls):
        add(x, y)
    blocks = []
    for _ in range(_NUM_BLOCKS):
        if device.type == "cuda":  # a full launch queue would be charged to the next block
            torch.cuda.synchronize(device)
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            add(x, y)
        blocks.append((time.perf_counter_ns() - started_ns) / num_calls)
    return statistics.median(blocks)
