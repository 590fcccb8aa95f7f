"""FlashNeuron: activations go to NVMe in the order in which they are made, until the rest fits.

Source: FlashNeuron (FAST 2021), section 4, offloading scheduler: phase 1 takes tensors in creation
order until what stays fits on the device, and accepts the schedule if offloading takes no longer
than the forward pass. Prefetches run in backward.

Simplified: phase 2, which exchanges tensors for compressible ones (CSR, FP16) where phase 1 takes
too long, is left out: the phase-1 schedule stands and the device waits. Without a disk the
activations go to host memory, through which they pass in any case. What fits is the whole trace,
not the activations alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.planning import MovementPlan, PageKind, Phase, Policy, Tier
from tvm_pager.planning.hardware.lane_times import TierRoom
from tvm_pager.planning.hardware.lanes import disk_rates
from tvm_pager.planning.rules.absences import Pressure, absences
from tvm_pager.planning.rules.placement import place
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Limits, Trace

__all__ = ["FlashNeuron"]


class FlashNeuron(Policy):
    """Offloads activations only; LRU decides about everything else."""

    name = "flashneuron"
    kinds = frozenset({PageKind.ACTIVATION})

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        index = TraceIndex(trace)
        pressure = Pressure(index, limits.device_bytes)
        room = TierRoom(limits, disk_rates(hardware, limits) is not None)
        phases = [op.phase for op in trace.ops]
        taken = []
        for absence in sorted(absences(index, self.kinds), key=lambda a: (index.born[a.page], a)):
            if pressure.fits:
                break
            after, until = absence.after, absence.until % len(phases)
            if phases[after] is Phase.FORWARD and phases[until] is Phase.BACKWARD:
                nbytes = trace.pages[absence.page].nbytes
                to = room.tier_for(absence.page, nbytes, (Tier.NVME, Tier.HOST))
                taken.append(absence._replace(to=to))
                pressure.take(absence)
        return place(index, hardware, limits, taken).plan()
