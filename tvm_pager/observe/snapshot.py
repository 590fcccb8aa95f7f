"""Takes the figures of one pager together, from all the parts that count something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.memory import Tier
from tvm_pager.observe.counters import Counters, Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tvm_pager.runtime.context import PagingContext
    from tvm_pager.transfer.torch_backend import TorchBackend

__all__ = ["take_stats"]


def take_stats(
    context: PagingContext,
    backend: TorchBackend,
    counters: Counters,
    names: Callable[[], Mapping[int, str]],
) -> Stats:
    """A snapshot; the pager's lock is held.

    Args:
        context: its torch side.
        backend: its bytes.
        counters: its events.
        names: of pages, by id.
    """
    core = context.core
    if not context.is_closed:
        core.drain()
    return Stats(
        device_budget_bytes=core.budget_bytes,
        device_peak_bytes=core.table.device_peak_bytes,
        host_budget_bytes=backend.host_budget_bytes,
        host_peak_bytes=backend.host_peak_bytes,
        nvme_budget_bytes=backend.nvme_capacity_bytes,
        nvme_peak_bytes=core.table.frames[Tier.NVME].peak_bytes,
        bytes_by_lane=dict(counters.bytes_by_lane),
        num_faults=counters.num("fault"),
        num_evictions=counters.num("evict"),
        num_write_backs=counters.num("write_back"),
        num_clean_evictions=counters.num_clean_evictions,
        num_failures=counters.num("failure"),
        stall_s=counters.stall_ns / 1e9,
        num_pages=len(core.table.pages),
        num_operations=core.operation_index,
        num_exposed=context.num_exposed,
        num_policy_errors=core.num_policy_errors,
        notices=list(counters.notices),
        engine=backend.engine_text,
        thrashing=counters.fetches.thrashing(core.budget_bytes, core.overhead_bytes, names),
        plans=core.iterations.summary(),
    )
