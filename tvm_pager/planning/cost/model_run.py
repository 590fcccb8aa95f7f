"""A plan on the model's clock, operation by operation; `cost_model.py` says what the model is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm_pager.memory import Tier
from tvm_pager.planning.cost.model_pages import ModelBooks, ModelPage, first_tiers
from tvm_pager.planning.hardware.lanes import D2H, D2N, H2D, LANE_NAMES, N2D, Lanes
from tvm_pager.planning.plan import Clean, CreateIn, Drop, Evict, Fetch, RunOnHost
from tvm_pager.planning.traces.trace_index import NEVER

if TYPE_CHECKING:
    from tvm_pager.planning.hardware.lanes import LaneRates
    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.plan import Action, MovementPlan
    from tvm_pager.planning.traces.trace_index import TraceIndex

__all__ = ["ModelRun"]


class ModelRun:
    """Runs iterations of a trace under a plan. Times in seconds.

    Args:
        index: of the trace.
        plan: what moves.
        hardware: how fast the host works.
        limits: budgets.
        rates: of the lanes.

    Attributes:
        now: the device's clock.
        began: when the iteration began.
        stall: what the device has waited for bytes or room in this iteration.
        room_stall: of it, for room.
        replayed: device time of what was computed again.
        host_time: of what ran on the host.
        num_faults: operands that were absent when their operation came.
        lane_bytes: submitted in this iteration, by lane.
        books: bytes by tier.
    """

    def __init__(
        self,
        index: TraceIndex,
        plan: MovementPlan,
        hardware: HardwareProfile,
        limits: Limits,
        rates: LaneRates,
    ) -> None:
        self._index, self._limits = index, limits
        self._trace = trace = index.trace
        self._num_ops = len(trace.ops)
        self._has_disk = rates.has_disk
        self._created: list[int] = index.created_bytes.tolist()
        self._on_host = {a.op for a in plan.actions if isinstance(a, RunOnHost)}
        self._actions = self._by_moment(plan)
        self._deaths: list[list[int]] = [[] for _ in range(self._num_ops + 1)]
        for number, page in enumerate(trace.pages):
            if page.died is not None:
                self._deaths[page.died].append(number)
        self._host_rate = max(p.figure.median for p in hardware.host.memcpy_bytes_per_s.points)
        self._lanes = Lanes(rates, keep_finished=True)
        self.now = self._launched = self._host_free = 0.0
        self.books = ModelBooks(index.frame_bytes.tolist())
        self._bytes = self.books.frame_bytes
        self._pages: list[ModelPage | None] = [None] * len(trace.pages)
        self._wanted: list[Fetch] = []
        self._spans: list[tuple[str, float, float, int]] = []
        tiers = first_tiers(plan, trace)
        for number, page in enumerate(trace.pages):
            if page.born is None:
                self._appear(number, tiers.get(number))

    def _by_moment(self, plan: MovementPlan) -> list[list[Action]]:
        moments: list[list[Action]] = [[] for _ in range(self._num_ops + 1)]
        for action in sorted(plan.actions, key=lambda action: action.priority):
            if isinstance(action, Fetch) and action.deadline in self._on_host:
                continue
            if isinstance(action, (Clean, Evict, Fetch, Drop)):
                moments[min(action.earliest, self._num_ops)].append(action)
            elif isinstance(action, CreateIn):
                born = self._trace.pages[action.page].born
                if born is not None and born not in self._on_host:
                    moments[born + 1].append(Evict(action.page, born + 1, born + 1, action.tier))
        return moments

    # --- iterations ------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """From here on everything is counted."""
        self.began = self.now
        self.stall = self.room_stall = self.replayed = self.host_time = 0.0
        self.num_faults = 0
        self.lane_bytes = [0, 0, 0, 0]
        self.books.begin()
        self._spans.clear()
        self._lanes.finished.clear()

    def end_iteration(self) -> None:
        """What lives on gets its number in the next iteration."""
        self._move(self._num_ops)
        self._wanted.clear()
        following: list[ModelPage | None] = [None] * len(self._pages)
        for page, description in zip(self._pages, self._trace.pages, strict=True):
            if page is None:
                continue
            if description.becomes is None:
                self.books.forget(page)
            else:
                page.number = description.becomes
                following[description.becomes] = page
                if page.deadline is not None:
                    page.deadline = 0
        self._pages = following
        for number, description in enumerate(self._trace.pages):
            if description.born is None and self._pages[number] is None:
                self._appear(number)

    def spans(self) -> list[tuple[str, float, float, int]]:
        """All work that ended in the iteration: lane, begin, end, number."""
        moved = [
            (LANE_NAMES[lane], job.begun, job.ended, job.page)
            for lane, job in self._lanes.finished
            if job.begun is not None and job.ended is not None
        ]
        return sorted(self._spans + moved)

    def _appear(self, number: int, tier: Tier | None = None) -> None:
        """The page is there from now on: on the device, or in a tier below."""
        page = self._pages[number] = ModelPage(number, tier is None)
        if tier is None:
            self.books.take(page)
        else:
            self.books.put_below(page, tier)

    # --- one operation ---------------------------------------------------------------------------

    def run(self, op: int) -> None:
        """Moves what is due before the operation, and runs it."""
        began = self.now
        self._move(op)
        self._launched += self._trace.launch_ns * 1e-9
        if op in self._on_host:
            self._run_on_host(op)
            return
        record = self._trace.ops[op]
        operands = [page for number in record.reads if (page := self._pages[number]) is not None]
        nbytes = self._created[op] + record.workspace_bytes
        absent = []
        for page in operands:
            self.books.stay(page)
            if not page.is_here:
                absent.append(page)
                nbytes += self._bytes[page.number]
        self._make_room(nbytes, op, operands)
        self.room_stall += self.now - began
        for page in absent:
            self.num_faults += 1
            self._bring(page)
        most = self.books.used + self._created[op] + record.workspace_bytes
        self.books.peak[Tier.DEVICE] = max(self.books.peak[Tier.DEVICE], most)
        for page in operands:
            self._await(page)
        self.stall += self.now - began
        self.now = max(self.now, self._launched)
        self._compute(op)
        for number in record.writes:
            if (written := self._pages[number]) is not None:
                self.books.spoil(written)
        for number in record.creates:
            self._appear(number)

    def _compute(self, op: int) -> float:
        seconds = self._trace.ops[op].compute_ns * 1e-9
        if seconds > 0:
            self._spans.append(("compute", self.now, self.now + seconds, op))
            self.now += seconds
        return seconds

    def _await(self, page: ModelPage) -> None:
        """The device waits for the page's bytes."""
        if page.up is not None:
            self.now = max(self.now, self._lanes.wait(page.up, self._in_lane(page)))
            page.up = None

    def _run_on_host(self, op: int) -> None:
        record = self._trace.ops[op]
        begun, nbytes = max(self._host_free, self.now), self._created[op]
        for number in record.reads:
            page = self._pages[number]
            if page is None:
                continue
            nbytes += self._bytes[number]
            if page.below is None:
                self._write_back(page, None)
            if page.down is not None:
                begun = max(begun, self._lanes.wait(page.down, self._out_lane(page)))
            begun = max(begun, page.ready)
        ended = begun + nbytes / 2 / self._host_rate
        self._host_free = ended
        self.host_time += ended - begun
        self._spans.append(("host", begun, ended, op))
        for number in (*record.writes, *record.creates):
            page = self._pages[number]
            if page is None:
                page = self._pages[number] = ModelPage(number, False)
            if page.is_here:
                self.books.give_up(page)
            self.books.spoil(page)
            self.books.put_below(page, Tier.HOST)
            page.ready = ended

    # --- movement --------------------------------------------------------------------------------

    def _move(self, moment: int) -> None:
        self._lanes.advance(self.now)
        for number in self._deaths[moment]:
            if (page := self._pages[number]) is not None:
                self.books.forget(page)
                self._pages[number] = None
        for page in self.books.leaving.copy():
            if page.deadline is not None and page.deadline <= moment:
                self._wait_and_give_up(page)
        for action in self._actions[moment]:
            if isinstance(action, Fetch):
                self._fetch(action, moment)
            elif isinstance(action, (Clean, Evict, Drop)):
                self._act(action, moment)
        if self._wanted:
            wanted, self._wanted = self._wanted, []
            for fetch in wanted:
                self._fetch(fetch, moment)

    def _act(self, action: Clean | Evict | Drop, moment: int) -> None:
        page = self._pages[action.page]
        if page is None or not page.is_here or (page.up is not None and page.up.ended is None):
            return
        if isinstance(action, Drop):
            page.is_dropped = page.below is None
            self.books.give_up(page)
            return
        if page.below is None:
            self._write_back(page, action.to)
        if isinstance(action, Evict):
            self.books.leave(page, action.deadline)
            if page.down is None or page.down.ended is not None or action.deadline <= moment:
                self._wait_and_give_up(page)

    def _fetch(self, fetch: Fetch, moment: int) -> None:
        page = self._pages[fetch.page]
        if page is None or fetch.to is not Tier.DEVICE:
            return
        self.books.stay(page)
        if page.is_here:
            return
        if self.books.used + self._bytes[page.number] <= self._limits.device_bytes:
            self._bring(page)
        elif moment < fetch.deadline:
            self._wanted.append(fetch)

    def _bring(self, page: ModelPage) -> None:
        """Takes room that is there, and submits the copy or computes the page again."""
        self.books.take(page)
        if page.is_dropped:
            page.is_dropped = False
            self._replay(page)
            return
        lane = self._in_lane(page)
        # What is ahead of it on the lane waits for the host too; only the rest is its own wait.
        idle = max(0.0, page.ready - self.now - self._lanes.backlog[lane])
        page.up = self._lanes.submit(lane, page.number, self._bytes[page.number])
        page.up.left += idle
        self._lanes.backlog[lane] += idle
        self.lane_bytes[lane] += self._bytes[page.number]

    def _replay(self, page: ModelPage) -> None:
        born = self._trace.pages[page.number].born
        if born is None:
            return
        for number in self._trace.ops[born].reads:
            operand = self._pages[number]
            if operand is not None:
                if not operand.is_here:
                    self._bring(operand)
                self._await(operand)
        self.replayed += self._compute(born)

    def _write_back(self, page: ModelPage, to: Tier | None) -> None:
        self.books.put_below(page, self._tier_for(self._bytes[page.number], to))
        lane = self._out_lane(page)
        page.down = self._lanes.submit(lane, page.number, self._bytes[page.number])
        self.lane_bytes[lane] += self._bytes[page.number]

    def _tier_for(self, nbytes: int, to: Tier | None) -> Tier:
        """Where a copy finds room; copies of pages that are on the device make it."""
        if not self._has_disk or (to is not Tier.NVME and self._has_host_room(nbytes)):
            return Tier.HOST
        if to is Tier.NVME:
            return to
        for page in self._pages:
            if page is None or not page.is_here or page.below is not Tier.HOST:
                continue
            if page.down is None or page.down.ended is not None:
                self.books.spoil(page)
                if self._has_host_room(nbytes):
                    return Tier.HOST
        return Tier.NVME

    def _has_host_room(self, nbytes: int) -> bool:
        return self.books.below[Tier.HOST] + nbytes <= self._limits.host_bytes

    def _make_room(self, nbytes: int, op: int, operands: list[ModelPage]) -> None:
        budget, books = self._limits.device_bytes, self.books
        while books.leaving and books.used + nbytes > budget:
            self._wait_and_give_up(books.leaving[0])
        if books.used + nbytes <= budget:
            return
        in_use = {page.number for page in operands}
        others = [
            page
            for page in self._pages
            if page is not None and page.is_here and page.number not in in_use
        ]
        others.sort(key=lambda page: -self._next_use(page.number, op))
        for page in others:
            if books.used + nbytes <= budget:
                break
            self._await(page)
            if page.below is None:
                self._write_back(page, None)
            self._wait_and_give_up(page)

    def _next_use(self, number: int, op: int) -> float:
        use = self._index.next_use_from(number, op)
        return math.inf if use == NEVER else use

    def _wait_and_give_up(self, page: ModelPage) -> None:
        if page.down is not None:
            self.now = max(self.now, self._lanes.wait(page.down, self._out_lane(page)))
        self.books.give_up(page)

    def _in_lane(self, page: ModelPage) -> int:
        return N2D if page.below is Tier.NVME and self._has_disk else H2D

    def _out_lane(self, page: ModelPage) -> int:
        return D2N if page.below is Tier.NVME and self._has_disk else D2H
