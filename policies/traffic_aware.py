"""Ratel, Fuyou: how much to swap, how much to compute again and where to, from all traffic at once.

Source: Ratel (LoHan, ICDE 2025, arXiv 2403.06504v2), holistic traffic-aware activation swapping and
active gradient offloading; Fuyou (v1 of the same paper). Weights and states live below the device
and come in the order of need as soon as there is room; gradients leave as soon as they are made and
the host updates during backward. Activations are ranked by the computation that swapping them saves
per byte; the number of the first ones that makes the iteration shortest is swapped, to host memory
up to what is free there and to NVMe from then on, and the others are computed again. The model is
in planning/cost/iteration_model.py; tools/ratel_table.py compares it with the published step times.

Simplified: the ranking is of pages, not of layers. Weights and states lie in host memory as far as
it goes and on NVMe beyond that, not on NVMe only. Where everything fits nothing moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.planning import MovementPlan, PageKind, Policy
from tvm_pager.planning.cost.iteration_model import SwapCandidate, choose_swaps
from tvm_pager.planning.rules.below import STATE_KINDS, Below
from tvm_pager.planning.rules.placement import place
from tvm_pager.planning.rules.replays import Replays
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Limits, Trace
    from tvm_pager.planning.rules.absences import Absence

__all__ = ["TrafficAware"]


class TrafficAware(Policy):
    """One model for all traffic; LRU decides about temporaries and buffers."""

    name = "traffic_aware"
    kinds = STATE_KINDS | {PageKind.ACTIVATION}

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        index = TraceIndex(trace)
        if index.peak_bytes <= limits.device_bytes:
            return place(index, hardware, limits, []).plan()
        below = Below(index, hardware, limits)
        states = below.housed(below.absences())
        found, kept_bytes, candidates = _candidates(below)
        choice = choose_swaps(below.work(kept_bytes), below.rates(), candidates)
        swapped = [found.pop(key) for key in choice.swapped]  # the best first: they stay in DRAM
        again = {c.key: int(c.replay_s * 1e9) for c in candidates if c.key in found}
        dropped = [found.pop(key)._replace(replay_ns=replay_ns) for key, replay_ns in again.items()]
        moved = below.housed([*swapped, *found.values()])
        taken = states + moved + dropped
        return below.plan(place(index, hardware, limits, taken, is_early=True), taken)


def _candidates(below: Below) -> tuple[dict[int, Absence], int, list[SwapCandidate]]:
    """Absences of activations by number; bytes that can only be swapped; what there is a choice of.

    Candidates go by the absences' numbers.
    """
    trace = below.index.trace
    replays = Replays(trace)
    found = dict(enumerate(below.absences({PageKind.ACTIVATION})))
    kept_bytes = 0
    candidates = []
    for key, absence in found.items():
        nbytes = trace.pages[absence.page].nbytes
        replay = replays.of(absence.page, absence.until)
        if replay is None:
            kept_bytes += nbytes
        else:
            candidates.append(SwapCandidate(key, nbytes, replay.compute_ns / 1e9))
    return found, kept_bytes, candidates
