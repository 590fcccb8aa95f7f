"""ZeRO-Infinity: parameters come module by module, as recorded; gradients and states stay below.

Source: ZeRO-Infinity (SC 2021), sections 5 and 6, and DeepSpeed's parameter coordinator. The order
in which parameters are needed is recorded; while one is used the next ones are prefetched, up to
`prefetch_bucket_size` elements ahead; after its use a parameter is released. Small ones
(`param_persistence_threshold`) stay on the device. Gradients leave when they are made; states lie
on NVMe where there is one; the update runs on the host, in a stage of its own after backward.

Simplified: one device, so that partitioning is no more than being below. A parameter is released
after each call of its layer; DeepSpeed's further thresholds on what is live or reused soon are left
out. Activations are kept, as with the checkpointing that the program does itself. Where everything
fits nothing moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.planning import MovementPlan, PageKind, Policy, Tier
from tvm_pager.planning.rules.below import STATE_KINDS, Below
from tvm_pager.planning.rules.placement import place
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Limits, Trace
    from tvm_pager.planning.rules.absences import Absence

__all__ = ["ZeroInfinity"]

_BUCKET_BYTES = 100_000_000  # 5e7 elements of 2 bytes
_PERSISTENT_BYTES = 200_000  # 1e5 elements


class ZeroInfinity(Policy):
    """Parameters, gradients and states; LRU decides about everything else."""

    name = "zero_infinity"
    kinds = STATE_KINDS

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        index = TraceIndex(trace)
        if index.peak_bytes <= limits.device_bytes:
            return place(index, hardware, limits, []).plan()
        below = Below(index, hardware, limits)
        least = min(_PERSISTENT_BYTES, limits.device_bytes // 1000)
        states = below.absences({PageKind.OPT_STATE}, least)
        taken = below.housed(states, (Tier.NVME, Tier.HOST))
        taken += below.housed(below.absences({PageKind.PARAM, PageKind.GRAD}, least))
        moves = place(index, hardware, limits, _in_buckets(index, taken))
        return below.plan(moves, taken, is_update_apart=True)


def _in_buckets(index: TraceIndex, taken: list[Absence]) -> list[Absence]:
    """Lets each page come once what comes before it and is not needed yet fits in the bucket."""
    queue = sorted(taken, key=lambda a: (a.until % index.num_ops, a))
    sizes = [index.trace.pages[absence.page].nbytes for absence in queue]
    result, first, ahead = [], 0, 0
    for place_, absence in enumerate(queue):
        ahead += sizes[place_]
        while first < place_ and ahead > _BUCKET_BYTES:
            ahead -= sizes[first]
            first += 1
        # `first` is the oldest that is still ahead: the one before it has been used by then.
        begin = queue[first - 1].until % index.num_ops + 1 if first else 0
        begin += absence.until - absence.until % index.num_ops
        result.append(absence._replace(fetch_from=max(begin, absence.fetch_from or 0)))
    return result
