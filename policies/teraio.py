"""TERAIO: the absences that relieve most memory pressure for the time that they take on the lanes.

Source: TERAIO (NeurIPS 2025, arXiv 2506.06472), lifetime-aware tensor migration; the selection goes
back to G10 (MICRO 2023), smart tensor eviction. While an operation needs more than the device has,
take the absence with the largest benefit / cost:

    benefit = integral over time of the bytes over the budget that it spares, from the end of its
              offload to the begin of its prefetch, both moved by what the lanes have to do already
    cost    = offload time + prefetch time

To NVMe as long as its lane has time for it, to host memory otherwise, within the host budget.
Prefetches begin as soon as there is room; those that the next operation needs go first.

Simplified: benefits only fall while absences are taken, so a candidate is valued again when its
turn comes, not after each choice, and taken if it is within a fifth of the best. Where no absence
can be hidden any more and the budget is still exceeded, the longest ones are taken and the device
waits. Pages below 1/20,000 of the budget stay. No GPU-direct path is assumed.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.planning import Fetch, MovementPlan, Policy, Tier
from tvm_pager.planning.hardware.busy_lane import BusyLane
from tvm_pager.planning.hardware.lane_times import Clock, LaneTimes, TierRoom
from tvm_pager.planning.rules.absences import Absence, Pressure, Relief, absences
from tvm_pager.planning.rules.placement import place
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Limits, Trace

__all__ = ["TeraIO"]

_CLOSE = 0.8  # of the best value that any other had: good enough


class TeraIO(Policy):
    """Benefit / cost over all kinds of pages."""

    name = "teraio"

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        index = TraceIndex(trace)
        search = _Search(index, hardware, limits)
        search.run()
        moves = place(index, hardware, limits, search.taken, is_early=True)
        actions = tuple(
            action._replace(priority=1)
            if isinstance(action, Fetch) and action.earliest < action.deadline
            else action
            for action in moves.actions
        )
        return MovementPlan(actions, moves.absent, moves.prediction)


class _Slots(NamedTuple):
    """What an absence is worth on one tier, and when it would move; nanoseconds."""

    value: float = 0.0
    to: Tier | None = None
    out_ns: tuple[float, float] = (0, 0)  # begin, length
    in_ns: tuple[float, float] = (0, 0)


class _Search:
    def __init__(self, index: TraceIndex, hardware: HardwareProfile, limits: Limits) -> None:
        self.taken: list[Absence] = []
        self._index = index
        self._pressure = Pressure(index, limits.device_bytes)
        self._relief = Relief(index, limits.device_bytes)
        self._times = LaneTimes(hardware, limits)
        self._room = TierRoom(limits, self._times.disk is not None)
        self._clock = Clock.undisturbed(index.trace)
        self._lanes = {(tier, way): BusyLane() for tier in Tier for way in ("out", "in")}

    def run(self) -> None:
        """Takes absences until everything fits or nothing helps."""
        least = max(1, self._pressure.budget_bytes // 20_000)
        found = self._pressure.helpful(absences(self._index, None, least))
        heap = [(-self._best(absence).value, place) for place, absence in enumerate(found)]
        heapify(heap)
        left = set(range(len(found)))
        while heap and not self._pressure.fits:
            _, place = heappop(heap)
            slots = self._best(found[place])
            if slots.value <= 0:
                continue
            if heap and slots.value < -heap[0][0] * _CLOSE:
                heappush(heap, (-slots.value, place))
                continue
            left.remove(place)
            self._take(found[place], slots)
        rest = [found[place] for place in left]
        for absence in sorted(rest, key=lambda a: (a.after - a.until, a.page)):
            if self._pressure.fits:
                return
            if self._pressure.helps(absence):
                nbytes = self._index.trace.pages[absence.page].nbytes
                self._take(absence, _Slots(to=self._room.tier_for(absence.page, nbytes)))

    def _best(self, absence: Absence) -> _Slots:
        """On NVMe if it is worth anything there, else in host memory."""
        for tier in (Tier.NVME, Tier.HOST):
            if self._room.has(tier, self._index.trace.pages[absence.page].nbytes):
                slots = self._slots(absence, tier)
                if slots.value > 0:
                    return slots
        return _Slots()

    def _slots(self, absence: Absence, tier: Tier) -> _Slots:
        nbytes = self._index.trace.pages[absence.page].nbytes
        out_ns = self._times.out_ns(nbytes, tier) if absence.is_dirty else 0
        in_ns = self._times.in_ns(nbytes, tier)
        clock, num_ops = self._clock, self._index.num_ops
        out = float(clock.at(absence.after + 1))
        if absence.is_dirty:
            out = self._lanes[tier, "out"].earliest(out, out_ns)
        come = self._lanes[tier, "in"].latest(clock.at(absence.until % num_ops), in_ns)
        arrival = come + clock.whole * (absence.until >= num_ops)
        if out + out_ns >= arrival:
            return _Slots()
        begin = max(clock.first_from(out + out_ns), absence.after + 1)
        end = min(clock.last_until(arrival), absence.until)
        frame_bytes = int(self._index.frame_bytes[absence.page])
        benefit = self._relief.of(begin, end, frame_bytes)
        return _Slots(benefit / max(1, out_ns + in_ns), tier, (out, out_ns), (come, in_ns))

    def _take(self, absence: Absence, slots: _Slots) -> None:
        self.taken.append(absence._replace(to=slots.to))
        self._pressure.take(absence)
        frame_bytes = int(self._index.frame_bytes[absence.page])
        self._relief.take(absence.after + 1, absence.until, frame_bytes)
        if slots.value > 0 and slots.to is not None:
            self._room.tier_for(
                absence.page, self._index.trace.pages[absence.page].nbytes, (slots.to,)
            )
            for way, (begin, length) in (("out", slots.out_ns), ("in", slots.in_ns)):
                if length > 0:
                    self._lanes[slots.to, way].reserve(begin, length)
