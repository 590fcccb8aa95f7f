"""From absences to a plan: when each page leaves and when it is fetched. Pure.

[Note: Placement]
    1. Evictions begin right after the use before and follow each other on their lane. Device memory
       is given up where the copy is expected to have ended; earlier, and with a stall, where the
       operations need the room. That gives a clock of the iteration.
    2. Fetches are placed backwards from their needs, so that each has ended in time and one ends
       before the next begins; or from where the policy says.
    3. In the order of the needs each fetch is moved later if there is no room yet.
    An absence of which nothing is left is no absence: the page stays.

[Note: Both ways]
    A page that is to be computed again is given up by `Drop`, and the plan has an eviction and a
    fetch for the same absence: where the drop is carried out, these find nothing to move and lapse;
    where it is not, the page still leaves in time. So the plan keeps to the budget either way. The
    prediction is of the first way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tvm_pager.memory import Tier
from tvm_pager.planning.hardware.lane_times import Clock, LaneTimes
from tvm_pager.planning.plan import Drop, Evict, Fetch, MovementPlan, Prediction
from tvm_pager.planning.rules.absences import Absence, Pressure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.plan import Action
    from tvm_pager.planning.traces.trace_index import TraceIndex

__all__ = ["Moves", "place"]

_LEAD = 1.1  # a fetch is begun this much longer before its need than it takes


@dataclass(frozen=True, slots=True)
class Moves:
    """The actions of absences, and what is expected of them.

    Attributes:
        actions: evictions and fetches, by moment.
        absent: numbers of the pages that are off the device at moment 0.
        prediction: of what happens.
    """

    actions: tuple[Action, ...]
    absent: frozenset[int]
    prediction: Prediction

    def plan(
        self, more: Sequence[Action] = (), prediction: Prediction | None = None
    ) -> MovementPlan:
        """A plan of the actions and more; those of one moment stay in this order."""
        actions = sorted((*self.actions, *more), key=lambda action: action.earliest)
        return MovementPlan(tuple(actions), self.absent, prediction or self.prediction)


def place(
    index: TraceIndex,
    hardware: HardwareProfile,
    limits: Limits,
    absences: Sequence[Absence],
    *,
    is_early: bool = False,
) -> Moves:
    """Places the movement of the absences; see [Note: Placement] and [Note: Both ways].

    Args:
        index: of the trace.
        hardware: gives the time of transfers.
        limits: the device budget.
        absences: no two of them of one page at a time.
        is_early: fetch as soon as there is room, not as late as possible.
    """
    moves = _place(
        index, hardware, limits, [a._replace(replay_ns=None) for a in absences], is_early
    )
    gone = {(a.page, a.earliest) for a in moves.actions if isinstance(a, Evict)}
    drops = [a for a in absences if a.replay_ns is not None and (a.page, a.after + 1) in gone]
    if not drops:
        return moves
    moved = [absence for absence in absences if absence.replay_ns is None]
    prediction = _place(index, hardware, limits, moved + drops, is_early).prediction
    given_up = [Drop(a.page, a.after + 1, a.after + 1, priority=-1) for a in drops]
    return replace(moves, actions=(*given_up, *moves.actions), prediction=prediction)


def _place(
    index: TraceIndex,
    hardware: HardwareProfile,
    limits: Limits,
    absences: Sequence[Absence],
    is_early: bool,
) -> Moves:
    placement = _Placement(index, LaneTimes(hardware, limits), limits, absences)
    kept = placement.run(is_early)
    if len(kept) < len(absences):
        # What stays changes what is clean when a later absence of the same page begins.
        placement = _Placement(index, LaneTimes(hardware, limits), limits, kept)
        placement.run(is_early)
    return placement.moves()


class _Placement:
    def __init__(
        self,
        index: TraceIndex,
        times: LaneTimes,
        limits: Limits,
        absences: Sequence[Absence],
    ) -> None:
        self.index = index
        self.num_ops = index.num_ops
        self.absences = sorted(absences, key=lambda absence: (absence.after, absence.page))
        pages = index.trace.pages
        self.is_dirty = self._find_dirty()
        self.out_ns = [
            times.out_ns(pages[a.page].nbytes, a.to) if dirty else 0
            for a, dirty in zip(self.absences, self.is_dirty, strict=True)
        ]
        self.in_ns = [
            times.in_ns(pages[a.page].nbytes, a.to) if a.replay_ns is None else 0
            for a in self.absences
        ]
        self.release = [absence.after + 1 for absence in self.absences]
        self.fetch = [absence.until for absence in self.absences]
        self.clock: list[int] = []
        self.pressure = Pressure(index, limits.device_bytes)
        for absence in self.absences:
            self.pressure.take(absence)

    def run(self, is_early: bool) -> list[Absence]:
        """Places everything; gives the absences of which something is left."""
        self._place_evictions()
        if not is_early:
            self._place_fetches()
        self._find_room(is_early)
        kept = zip(self.absences, self.release, self.fetch, strict=True)
        return [absence for absence, release, fetch in kept if release < fetch]

    def _find_dirty(self) -> list[bool]:
        """Whether the page is written between its absence before and this one."""
        index, num_ops = self.index, self.num_ops
        by_page: dict[int, list[int]] = {}
        for place, absence in enumerate(self.absences):
            by_page.setdefault(absence.page, []).append(place)
        result = [True] * len(self.absences)
        for page, places in by_page.items():
            last = self.absences[places[-1]].after
            is_lasting = index.becomes[page] == page
            for before, place in zip([None, *places], places, strict=False):
                after = self.absences[place].after
                if before is not None:
                    since = self.absences[before].after + 1
                    result[place] = index.is_dirty(page, since, after + 1)
                elif is_lasting:
                    result[place] = index.is_dirty(page, 0, after + 1) or index.is_dirty(
                        page, last + 1, num_ops
                    )
        return [
            dirty and absence.replay_ns is None
            for dirty, absence in zip(result, self.absences, strict=True)
        ]

    def _place_evictions(self) -> None:
        """Sets `release` and `clock`. Fetches are taken to be early enough for their lane."""
        num_ops, launch_ns = self.num_ops, self.index.trace.launch_ns
        leaving: dict[int, list[int]] = {}
        coming: dict[int, list[int]] = {}
        for place, absence in enumerate(self.absences):
            leaving.setdefault(absence.after, []).append(place)
            coming.setdefault(absence.until % num_ops, []).append(place)
        lanes: dict[tuple[bool, bool], int] = {}  # (is out, is NVMe) -> free from
        ends = [0] * len(self.absences)
        pending: list[tuple[int, int]] = []  # (end of the copy, place)
        held = 0  # bytes of what is pending
        budget, frames = self.pressure.budget_bytes, self.index.frame_bytes

        def let_go(moment: int) -> int:
            end, place = heappop(pending)
            self.release[place] = moment
            return end

        now = 0
        for op, entry in enumerate(self.index.trace.ops):
            now = max(now, op * launch_ns)
            while pending and (pending[0][0] <= now or self.pressure.at(op) + held > budget):
                held -= int(frames[self.absences[pending[0][1]].page])
                now = max(now, let_go(op))
            for place in coming.get(op, ()):
                now += self.absences[place].replay_ns or 0
                lane = (False, self.absences[place].to is Tier.NVME)
                lanes[lane] = max(lanes.get(lane, 0), ends[place]) + self.in_ns[place]
                now = max(now, lanes[lane])
            self.clock.append(now)
            now += entry.compute_ns
            for place in leaving.get(op, ()):
                ends[place] = now
                if self.is_dirty[place]:
                    lane = (True, self.absences[place].to is Tier.NVME)
                    ends[place] = lanes[lane] = max(lanes.get(lane, 0), now) + self.out_ns[place]
                    heappush(pending, (ends[place], place))
                    held += int(frames[self.absences[place].page])
        while pending:
            now = max(now, let_go(num_ops))
        self.clock.append(now)

    def _place_fetches(self) -> None:
        """Sets `fetch` backwards along the lanes; the second round knows the next iteration."""
        num_ops, clock = self.num_ops, Clock(self.clock)
        whole = clock.whole
        order = sorted(
            range(len(self.absences)), key=lambda p: self.absences[p].until % num_ops, reverse=True
        )
        free: dict[bool, float] = {}  # is NVMe -> the lane is taken from then on
        for _ in range(2):
            for place in order:
                absence = self.absences[place]
                lane = absence.to is Tier.NVME
                need = clock.at(absence.until % num_ops)
                begin = min(need, free.get(lane, whole)) - self.in_ns[place] * _LEAD
                free[lane] = begin
                if absence.fetch_from is not None:
                    begin_at = max(absence.fetch_from, self.release[place])
                    self.fetch[place] = min(begin_at, absence.until)
                    continue
                if absence.until >= num_ops:
                    begin += whole
                moment = clock.last_until(begin)
                self.fetch[place] = min(max(moment, self.release[place]), absence.until)
            free = {lane: begin + whole for lane, begin in free.items()}

    def _find_room(self, is_early: bool) -> None:
        """Moves each fetch later, to where there is room up to its need."""
        frames, pressure = self.index.frame_bytes, self.pressure
        for place, absence in enumerate(self.absences):
            nbytes = int(frames[absence.page])
            pressure.add(absence.after + 1, self.release[place], nbytes)
        for place in sorted(range(len(self.absences)), key=lambda p: self.absences[p].until):
            absence = self.absences[place]
            nbytes = int(frames[absence.page])
            begin = self.fetch[place]
            if is_early:
                begin = min(max(self.release[place], absence.fetch_from or 0), absence.until)
            begin = pressure.room_from(begin, absence.until, nbytes)
            self.fetch[place] = begin
            pressure.add(begin, absence.until, nbytes)

    def moves(self) -> Moves:
        """The actions, once everything is placed."""
        num_ops, becomes = self.num_ops, self.index.becomes
        actions: list[Action] = []
        absent: set[int] = set()
        lane_bytes: dict[str, int] = {}
        for place, (page, after, until, _, to, _, replay_ns) in enumerate(self.absences):
            release, fetch = self.release[place], self.fetch[place]
            if release >= fetch:
                continue
            actions.append(Evict(page, after + 1, release, to))
            if until < num_ops:
                actions.append(Fetch(page, fetch, until))
            elif fetch < num_ops:
                actions.append(Fetch(page, fetch, num_ops))
            else:
                following = int(becomes[page])
                absent.add(following)
                actions.append(Fetch(following, fetch - num_ops, until - num_ops))
            if replay_ns is not None:
                continue
            nbytes = self.index.trace.pages[page].nbytes
            if self.is_dirty[place]:
                _count(lane_bytes, ("d2h", "h2n"), to, nbytes)
            _count(lane_bytes, ("h2d", "n2h"), to, nbytes)
        actions.sort(key=lambda action: (action.earliest, isinstance(action, Fetch)))
        return Moves(tuple(actions), frozenset(absent), self._prediction(lane_bytes))

    def _prediction(self, lane_bytes: dict[str, int]) -> Prediction:
        trace = self.index.trace
        busy = max(trace.compute_ns, len(trace.ops) * trace.launch_ns)
        step_ns = self.clock[-1]
        peak = {Tier.DEVICE: self.pressure.peak_bytes}
        replay_ns = sum(absence.replay_ns or 0 for absence in self.absences)
        stall_ns = max(0, step_ns - busy - replay_ns)
        return Prediction(step_ns, stall_ns, lane_bytes, peak, replay_ns)


def _count(lane_bytes: dict[str, int], lanes: tuple[str, str], to: Tier | None, size: int) -> None:
    for lane in lanes[: 2 if to is Tier.NVME else 1]:
        lane_bytes[lane] = lane_bytes.get(lane, 0) + size
