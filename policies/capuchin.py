"""Capuchin: swap what can be hidden, then whatever of swapping and recomputing costs less.

Source: Capuchin (ASPLOS 2020), sections 4.3 to 4.5. From the accesses of one iteration:

    free time FT = SwapInStart - SwapOutEnd
                 = (back-access - swap time) - (evicted-access + swap time)

Candidates in the time of peak memory are taken by falling FT while their swaps are hidden, with
the lanes' other swaps counted in. If that is not enough, the others are taken by falling
MSPS = bytes saved / recomputation time; each is swapped or recomputed, whichever delays less. A
prefetch begins at its in-trigger, an access before the back-access; one that was late is begun 5 %
of its swap time earlier in the next iteration, again and again.

Simplified: only what is born in the iteration is a candidate (weights are persistent in the paper).
The time of swapping comes from the hardware profile, not from a first run. A prefetch that begins a
whole swap time earlier and is late still waits for room or for the lane, and begins no earlier:
else there would be a new plan after each iteration. A recomputation's cost is that of its chain
from what is alive then, with what was chosen for recomputation before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.planning import IterationReport, MovementPlan, PageKind, Policy
from tvm_pager.planning.hardware.busy_lane import BusyLane
from tvm_pager.planning.hardware.lane_times import Clock, LaneTimes, TierRoom
from tvm_pager.planning.plan import Fetch
from tvm_pager.planning.rules.absences import Absence, Pressure, absences, reachable_bytes
from tvm_pager.planning.rules.placement import place
from tvm_pager.planning.rules.replays import Replays
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Limits, Trace

__all__ = ["Capuchin"]

_STEP, _MOST = 0.05, 1.0  # of the swap time


class Capuchin(Policy):
    """Swap or recompute activations and temporaries; LRU decides about everything else."""

    name = "capuchin"
    kinds = frozenset({PageKind.ACTIVATION, PageKind.TEMPORARY})

    def __init__(self) -> None:
        self._made: _Made | None = None

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        self._made = _Made(TraceIndex(trace), hardware, limits)
        return self._made.plan()

    def feedback(self, report: IterationReport) -> MovementPlan | None:
        made = self._made
        if made is None or report.trace is not made.index.trace or not report.is_complete:
            return None
        if not made.begin_earlier(report.late_fetches):
            return None
        return made.plan()


class _Made:
    """What was chosen for one trace, and how much earlier than planned prefetches begin."""

    def __init__(self, index: TraceIndex, hardware: HardwareProfile, limits: Limits) -> None:
        self.index = index
        self._hardware = hardware
        self._limits = limits
        self._times = LaneTimes(hardware, limits)
        self._clock = Clock.undisturbed(index.trace)
        self._room = TierRoom(limits, self._times.disk is not None)
        self._leads: dict[int, float] = {}  # page -> nanoseconds
        self._begins: dict[tuple[int, int], int] = {}  # (page, need) -> fetch of the first plan
        self._taken = self._choose()

    def plan(self) -> MovementPlan:
        """Places what was chosen, with the prefetches as early as was learned."""
        plan = place(
            self.index, self._hardware, self._limits, [self._led(a) for a in self._taken]
        ).plan()
        if not self._begins:
            fetches = [action for action in plan.actions if isinstance(action, Fetch)]
            self._begins = {(fetch.page, fetch.deadline): fetch.earliest for fetch in fetches}
        return plan

    def _led(self, absence: Absence) -> Absence:
        lead = self._leads.get(absence.page)
        begin = self._begins.get((absence.page, absence.until))
        if lead is None or begin is None:
            return absence
        earlier = min(self._clock.last_until(self._clock.at(begin) - lead), begin - 1)
        return absence._replace(fetch_from=max(earlier, absence.after + 1))

    def begin_earlier(self, late: tuple[int, ...]) -> bool:
        """Moves the in-triggers of late pages; whether one gets to another operation by that."""
        is_moved = False
        for absence in self._taken:
            page = absence.page
            if page not in late or (page, absence.until) not in self._begins:
                continue
            swap_ns, lead_ns = self._swap_ns(absence)[1], self._leads.get(page, 0.0)
            before = self._led(absence).fetch_from
            self._leads[page] = min(lead_ns + _STEP * swap_ns, _MOST * swap_ns)
            is_moved |= self._led(absence).fetch_from != before
        return is_moved

    def _choose(self) -> list[Absence]:
        index = self.index
        found = absences(index, Capuchin.kinds)
        # What cannot be reached by these kinds is left to others, and not striven for.
        goal_bytes = max(self._limits.device_bytes, reachable_bytes(index, found))
        pressure = Pressure(index, goal_bytes)
        found = pressure.helpful(found)
        found.sort(key=lambda a: (-self._free_time(a), a))
        out, back = BusyLane(), BusyLane()
        taken: list[Absence] = []
        exposed: dict[Absence, float] = {}
        for absence in found:
            if pressure.fits:
                return taken
            delay = self._swap(absence, out, back)
            if delay > 0:
                exposed[absence] = delay
            else:
                taken.append(self._swapped(absence))
                pressure.take(absence)
        return taken + self._choose_exposed(exposed, pressure)

    def _choose_exposed(self, exposed: dict[Absence, float], pressure: Pressure) -> list[Absence]:
        """The rest, by MSPS; those that cannot be recomputed come last."""
        replays, dropped, taken = Replays(self.index.trace), set[int](), []
        costs = {}
        for absence in exposed:
            replay = replays.of(absence.page, absence.until)
            costs[absence] = float("inf") if replay is None else replay.compute_ns
        frames = self.index.frame_bytes
        for absence in sorted(exposed, key=lambda a: (-frames[a.page] / (costs[a] + 1), a)):
            if pressure.fits:
                break
            if not pressure.helps(absence):
                continue
            replay = replays.of(absence.page, absence.until, dropped)
            if replay is not None and replay.compute_ns < exposed[absence]:
                dropped.add(absence.page)
                taken.append(self._swapped(absence)._replace(replay_ns=replay.compute_ns))
            else:
                taken.append(self._swapped(absence))
            pressure.take(absence)
        return taken

    def _swapped(self, absence: Absence) -> Absence:
        nbytes = self.index.trace.pages[absence.page].nbytes
        return absence._replace(to=self._room.tier_for(absence.page, nbytes))

    def _swap_ns(self, absence: Absence) -> tuple[int, int]:
        nbytes = self.index.trace.pages[absence.page].nbytes
        return self._times.out_ns(nbytes, None), self._times.in_ns(nbytes, None)

    def _free_time(self, absence: Absence) -> int:
        out_ns, in_ns = self._swap_ns(absence)
        clock = self._clock
        return (clock.at(absence.until) - in_ns) - (clock.at(absence.after + 1) + out_ns)

    def _swap(self, absence: Absence, out: BusyLane, back: BusyLane) -> float:
        """Takes time on the lanes if the swap can be hidden; else says how long it delays."""
        out_ns, in_ns = self._swap_ns(absence)
        leaves = out.earliest(self._clock.at(absence.after + 1), out_ns)
        comes = back.latest(self._clock.at(absence.until), in_ns)
        if leaves + out_ns <= comes:
            out.reserve(leaves, out_ns)
            back.reserve(comes, in_ns)
        return leaves + out_ns - comes
