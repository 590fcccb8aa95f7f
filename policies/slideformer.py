"""SlideFormer: a window of layers on the device, their inputs kept in DRAM, all else made again.

Source: SlideFormer (DAC 2026, arXiv 2603.16428). The device holds the parameters and gradients of
`WINDOW` layers: when a layer is entered, the next one in the order of execution is prefetched; when
it is left, its parameters go. A layer's gradients leave when they are made, and the host updates
the layer while backward goes on. Each layer is checkpointed: its input goes to host memory and
comes back one layer ahead, everything inside is computed again.

Simplified: an activation is a layer's input if it passes from one layer to another, or was made of
what did and is gone itself. Other activations are computed again where their chain allows it, and
swapped where not. There is no queue of fixed units, pages have their own sizes. Where everything
fits nothing moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.planning import MovementPlan, PageKind, Policy
from tvm_pager.planning.rules.below import STATE_KINDS, Below
from tvm_pager.planning.rules.placement import place
from tvm_pager.planning.rules.replays import Replays
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Limits, Trace
    from tvm_pager.planning.rules.absences import Absence

__all__ = ["SlideFormer"]

WINDOW = 2


class SlideFormer(Policy):
    """Layer by layer; LRU decides about what is neither weight, state nor activation."""

    name = "slideformer"
    kinds = STATE_KINDS | {PageKind.ACTIVATION}

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        index = TraceIndex(trace)
        if index.peak_bytes <= limits.device_bytes:
            return place(index, hardware, limits, []).plan()
        below = Below(index, hardware, limits)
        taken = below.housed(below.absences() + _checkpointed(below))
        start_before = below.layers.start_before
        ahead = [
            absence._replace(
                fetch_from=max(absence.fetch_from or 0, start_before(absence.until, WINDOW - 1))
            )
            for absence in taken
        ]
        moves = place(index, hardware, limits, ahead)
        return below.plan(moves, taken)


def _checkpointed(below: Below) -> list[Absence]:
    """Absences of activations: inputs are swapped, what lies inside is computed again."""
    replays = Replays(below.index.trace)
    result = []
    for absence in below.absences({PageKind.ACTIVATION}):
        if not _is_input(below, absence):
            replay = replays.of(absence.page, absence.until)
            if replay is not None:
                absence = absence._replace(replay_ns=replay.compute_ns)
        result.append(absence)
    return result


def _is_input(below: Below, absence: Absence) -> bool:
    """Whether other layers read it too, or it was made of what another layer made and is gone."""
    trace, layer_of = below.index.trace, below.layers.of_op
    born = trace.pages[absence.page].born
    if born is None:
        return True
    uses = below.index.uses(absence.page).tolist()
    if any(layer_of[use] != layer_of[born] for use in uses):
        return True
    operands = [trace.pages[operand] for operand in trace.ops[born].reads]
    return any(
        operand.born is not None
        and layer_of[operand.born] != layer_of[born]
        and (operand.died is not None and operand.died <= absence.until)
        for operand in operands
    )
