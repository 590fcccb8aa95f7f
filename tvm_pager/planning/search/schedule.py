"""When chosen pages leave and return: a list schedule of copies beside the operations. Pure.

[Note: List schedule]
    The blocks of a grid run in order on a clock, with the copies on their lanes. Before each block

    1. pages whose gap has begun and whose copy has ended give up their memory; if the block does
       not fit, it waits for copies until it does;
    2. what it needs and is absent is fetched (late);
    3. fetches are issued in the order of their needs, as long as their lane has little to do,
       there is room now, and there will be room until the need beside all that is to come;
    4. write-backs are issued in the order in which their gaps begin, as long as their lane has
       little to do. They begin as soon as the last write is over, also while the page is still
       used: so leaving later costs nothing;
    5. it waits for what it needs.

    So fetches come as early as memory allows and the lanes are as busy as it allows. The memory
    that the next blocks need while write-backs are under way is counted as taken.

[Note: Steady state]
    Two iterations are scheduled, and each decision of the second one counts. The first begins with
    all pages absent whose gaps span the boundary.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tvm_pager.planning.hardware.lanes import D2H, D2N, H2D, N2D, Job, Lanes

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.hardware.lanes import LaneRates
    from tvm_pager.planning.search.grid import Grid

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["STAYS", "Timetable", "make_timetable"]

STAYS = -(1 << 40)  # in place of a moment: it does not happen

_NUM_CYCLES = 2
_LEAD_S = 8e-3  # of work that a lane is given beyond the block that comes
_SCAN = 12  # fetches that are passed over because their page has not left yet
_WINDOW = 300  # blocks ahead in which write-backs under way are counted
_HERE, _LEAVING, _AWAY, _COMING = range(4)
_DIRTY, _MOVING, _CLEAN = range(3)


@dataclass(frozen=True, slots=True)
class Timetable:
    """What was decided, in moments of the grid, and what became of it.

    Moments are counted from the beginning of the iteration in which the gap begins, and go on past
    its end; `STAYS`: not at all.

    Attributes:
        copied: by gap: when the write-back of its version begins.
        released: by gap: when the memory is given up.
        fetched: by gap: when its fetch is issued.
        step_s: duration of an iteration.
        begins_s: by block: when it begins.
        in_stall_s: by block: how long it waits for operands.
        out_stall_s: by block: how long it waits for room.
        in_busy: by block: whether the lane to the device is behind.
        out_busy: by block: the other one.
    """

    copied: IntArray
    released: IntArray
    fetched: IntArray
    step_s: float
    begins_s: FloatArray
    in_stall_s: FloatArray
    out_stall_s: FloatArray
    in_busy: BoolArray
    out_busy: BoolArray


def make_timetable(grid: Grid, on_disk: BoolArray, budget: int, rates: LaneRates) -> Timetable:
    """Schedules the movement of chosen gaps; see [Note: List schedule].

    Args:
        grid: of the chosen gaps; everything fits if all their pages are absent all the time.
        on_disk: by version: whether it is written to NVMe instead of the host.
        budget: of the device, in bytes.
        rates: of the lanes.

    Raises:
        ValueError: it does not fit.
    """
    run = _Run(grid, on_disk, budget, rates)
    for block in range(_NUM_CYCLES * run.num_blocks):
        run.step(block)
    return run.timetable()


class _Run:
    def __init__(self, grid: Grid, on_disk: BoolArray, budget: int, rates: LaneRates) -> None:
        gaps = grid.gaps
        self.num_blocks = num = gaps.num_moments
        base = grid.needed_bytes - gaps.covered(np.ones(len(gaps))).astype(np.int64)
        if int(base.max()) > budget:
            raise ValueError(f"{int(base.max())} B are needed at once, the budget is {budget} B")
        self._gaps, self._budget = gaps, budget
        self._lanes = Lanes(rates, keep_finished=True)
        self._seconds, self._launch = grid.seconds.tolist(), grid.launch_s.tolist()
        self._needed: list[int] = grid.needed_bytes.tolist()
        self._drain = 1 / rates.duplex_seconds(D2H, 1 << 30) * (1 << 30)  # bytes/s
        # Ahead: what every block of the coming cycles will take, with the fetches issued so far.
        self._ahead = np.tile(base, _NUM_CYCLES + 2)
        self._clock = np.concatenate(([0.0], np.cumsum(np.tile(grid.seconds, _NUM_CYCLES + 2))))
        self._ids = np.flatnonzero(~gaps.is_endless)
        self._away = int(gaps.nbytes[gaps.is_endless].sum())
        self._list_gaps(on_disk)
        self._list_versions(on_disk)
        self._now = self._host_now = 0.0
        self._pending = 0  # bytes of pages that are leaving
        self._leaving: dict[int, None] = {}  # in the order in which their gaps began
        self._moving: dict[int, None] = {}  # versions, in the order of issue
        self._stats = np.zeros((5, num))
        for gap in range(len(self._ids)):
            if self._start[gap] + self._length[gap] > num:
                self._place[gap], self._begun[gap] = _AWAY, self._start[gap] - num
                self._away += self._size[gap]
                self._copy[self._version[gap]] = _CLEAN
        self._queue_old_versions()

    # --- the gaps, by their place among the chosen -----------------------------------------------

    def _list_gaps(self, on_disk: BoolArray) -> None:
        gaps, ids, num = self._gaps, self._ids, self.num_blocks
        self._start: list[int] = gaps.start[ids].tolist()
        self._length: list[int] = gaps.length[ids].tolist()
        self._size: list[int] = gaps.nbytes[ids].tolist()
        self._is_fetched: list[bool] = gaps.is_fetched[ids].tolist()
        self._in_lane = np.where(on_disk[gaps.version[ids]], N2D, H2D).tolist()
        self._place = [_HERE] * len(ids)
        self._begun = [0] * len(ids)
        self._jobs: list[Job | None] = [None] * len(ids)
        self._released = [STAYS] * len(ids)
        self._fetched = [STAYS] * len(ids)
        self._begins: list[list[int]] = [[] for _ in range(num)]
        self._ends: list[list[int]] = [[] for _ in range(num)]
        ends = []
        for gap, (start, length) in enumerate(zip(self._start, self._length, strict=True)):
            end = (start + length) % num
            self._begins[start].append(gap)
            self._ends[end].append(gap)
            if self._is_fetched[gap]:
                ends.append((end, gap))
        ends.sort()
        self._wanted: tuple[deque[tuple[int, int]], ...] = (deque(), deque())
        for cycle in range(_NUM_CYCLES + 1):
            for end, gap in ends:
                self._wanted[self._in_lane[gap] == N2D].append((cycle * num + end, gap))

    def _list_versions(self, on_disk: BoolArray) -> None:
        gaps, ids, num = self._gaps, self._ids, self.num_blocks
        numbers, first, places = np.unique(
            gaps.version[ids], return_index=True, return_inverse=True
        )
        self._version: list[int] = places.tolist()
        self._gaps_of: list[list[int]] = [[] for _ in numbers]
        for gap, version in enumerate(self._version):
            self._gaps_of[version].append(gap)
        self._out_size: list[int] = gaps.out_bytes[numbers].tolist()
        self._out_lane = np.where(on_disk[numbers], D2N, D2H).tolist()
        self._copy = [_DIRTY if size else _CLEAN for size in self._out_size]
        self._copies: list[Job | None] = [None] * len(numbers)
        self._copied_at = [STAYS] * len(numbers)
        self._writes: list[list[int]] = [[] for _ in range(num)]
        for version, gap in enumerate(first.tolist()):
            if self._out_size[version]:
                self._writes[int(gaps.written[ids[gap]]) % num].append(version)
        self._unwritten: tuple[list[tuple[int, int]], ...] = ([], [])  # heaps: gap begins, version

    def _queue_old_versions(self) -> None:
        """What the iteration before has written."""
        for version, copy in enumerate(self._copy):
            first = self._ids[self._gaps_of[version][0]]
            if copy == _DIRTY and self._gaps.written[first] < 0:
                self._queue(version, 0)

    def _queue(self, version: int, block: int) -> None:
        gaps, num = self._gaps_of[version], self.num_blocks
        begin = min((self._start[gap] - block) % num for gap in gaps) + block
        heapq.heappush(self._unwritten[self._out_lane[version] == D2N], (begin, version))

    # --- one block -------------------------------------------------------------------------------

    def step(self, block: int) -> None:
        """Decides what happens before the block, and runs it."""
        at = block % self.num_blocks
        if not at:
            self._began = self._now
        begun = self._now
        self._lanes.advance(begun)
        self._note_copied(block)
        late = self._turn_over(block, at)
        self._make_room(block, at)
        has_room = self._now
        for gap in late:
            self._jobs[gap] = self._lanes.submit(self._in_lane[gap], gap, self._size[gap])
        seconds = self._seconds[at]
        for kind in (1, 0) if self._wanted[1] else (0,):
            self._prefetch(block, at, seconds, self._wanted[kind], 2 * kind)
        for kind in (1, 0) if self._unwritten[1] else (0,):
            self._write_back(block, seconds, self._unwritten[kind], 2 * kind + 1)
        self._host_now += self._launch[at]
        self._now = max(self._now, self._host_now)
        ready = self._now
        for gap in self._ends[at]:
            job = self._jobs[gap]
            if self._place[gap] == _COMING and job is not None:
                self._now = max(self._now, self._lanes.wait(job, self._in_lane[gap]))
                self._place[gap] = _HERE
        backlog = self._lanes.backlog
        self._stats[:, at] = (
            begun,
            self._now - ready,
            has_room - begun,
            backlog[H2D] + backlog[N2D] > 1e-6,
            backlog[D2H] + backlog[D2N] > 1e-6,
        )
        self._now += seconds

    def _turn_over(self, block: int, at: int) -> list[int]:
        """Writes, gaps that end and gaps that begin; gives those whose page is late."""
        for version in self._writes[at]:
            self._copy[version] = _DIRTY
            self._moving.pop(version, None)
            self._queue(version, block)
        late = []
        for gap in self._ends[at]:
            place = self._place[gap]
            if place == _LEAVING:
                self._place[gap] = _HERE
                del self._leaving[gap]
                self._pending -= self._size[gap]
                self._released[gap] = self._fetched[gap] = STAYS
            elif place == _AWAY:
                self._away -= self._size[gap]
                self._place[gap] = _COMING if self._is_fetched[gap] else _HERE
                if self._is_fetched[gap]:
                    self._fetched[gap] = block - self._begun[gap]
                    late.append(gap)
        for gap in self._begins[at]:
            self._place[gap], self._begun[gap] = _LEAVING, block
            self._leaving[gap] = None
            self._pending += self._size[gap]
            if self._copy[self._version[gap]] == _CLEAN:
                self._release(gap, block)
        return late

    def _release(self, gap: int, block: int) -> None:
        self._place[gap] = _AWAY
        self._away += self._size[gap]
        del self._leaving[gap]
        self._pending -= self._size[gap]
        self._released[gap] = block - self._begun[gap]
        if not self._is_fetched[gap]:
            self._fetched[gap] = STAYS

    def _note_copied(self, block: int) -> None:
        """Pages whose write-back has ended give up their memory, if their gap has begun."""
        finished = self._lanes.finished
        for lane, job in finished:
            version = job.page
            if lane in (D2H, D2N) and self._copies[version] is job:
                self._moving.pop(version, None)
                if self._copy[version] == _MOVING:
                    self._copy[version] = _CLEAN
                    for gap in self._gaps_of[version]:
                        if self._place[gap] == _LEAVING:
                            self._release(gap, block)
        finished.clear()

    def _make_room(self, block: int, at: int) -> None:
        """Waits for write-backs until the block fits, those that were issued first."""
        while self._needed[at] - self._away > self._budget:
            gap = self._next_out()
            if gap is None:
                raise ValueError(f"block {at} does not fit and nothing is leaving")
            version = self._version[gap]
            if self._copy[version] == _DIRTY:
                self._issue_copy(version, block)
            job = self._copies[version]
            if self._copy[version] == _MOVING and job is not None:
                self._now = max(self._now, self._lanes.wait(job, self._out_lane[version]))
                self._copy[version] = _CLEAN
            self._release(gap, block)

    def _next_out(self) -> int | None:
        """The page that is leaving and whose write-back ends first."""
        for version in self._moving:
            for gap in self._gaps_of[version]:
                if self._place[gap] == _LEAVING and self._copy[version] == _MOVING:
                    return gap
        return next(iter(self._leaving), None)

    def _issue_copy(self, version: int, block: int) -> None:
        lane = self._out_lane[version]
        self._copies[version] = self._lanes.submit(lane, version, self._out_size[version])
        self._copy[version] = _MOVING
        self._moving[version] = None
        self._copied_at[version] = block

    def _prefetch(
        self, block: int, at: int, seconds: float, wanted: deque[tuple[int, int]], lane: int
    ) -> None:
        passed: list[tuple[int, int]] = []
        while wanted and len(passed) < _SCAN and self._lanes.backlog[lane] <= seconds + _LEAD_S:
            end, gap = wanted[0]
            if end <= block:
                wanted.popleft()
            elif self._place[gap] != _AWAY or self._begun[gap] + self._length[gap] != end:
                passed.append(wanted.popleft())
            elif self._fits(self._size[gap], block, at, end):
                wanted.popleft()
                self._away -= self._size[gap]
                self._place[gap] = _COMING
                self._fetched[gap] = block - self._begun[gap]
                self._ahead[block:end] += self._size[gap]
                self._jobs[gap] = self._lanes.submit(lane, gap, self._size[gap])
            else:
                break
        wanted.extendleft(reversed(passed))

    def _fits(self, nbytes: int, block: int, at: int, end: int) -> bool:
        """Whether the bytes may be taken now and until `end`, beside all that is to come."""
        most = self._budget - nbytes
        if self._needed[at] - self._away > most:
            return False
        ahead = self._ahead[block + 1 : end]
        if not len(ahead):
            return True
        if self._pending > 0:
            soon = ahead[:_WINDOW]
            elapsed = self._clock[block + 1 : block + 1 + len(soon)] - self._clock[block]
            left = np.maximum(self._pending - elapsed * self._drain, 0.0)
            if float((soon + left).max()) > most:
                return False
        return int(ahead.max()) <= most

    def _write_back(
        self, block: int, seconds: float, unwritten: list[tuple[int, int]], lane: int
    ) -> None:
        while unwritten and self._lanes.backlog[lane] <= seconds + _LEAD_S:
            _, version = heapq.heappop(unwritten)
            if self._copy[version] == _DIRTY:
                self._issue_copy(version, block)

    # --- results ---------------------------------------------------------------------------------

    def timetable(self) -> Timetable:
        """What the last cycle decided."""
        gaps, ids, num = self._gaps, self._ids, self.num_blocks
        copied, released, fetched = (np.full(len(gaps), STAYS, np.int64) for _ in range(3))
        start = gaps.start[ids]
        for target, offsets in ((released, self._released), (fetched, self._fetched)):
            values = np.array(offsets, np.int64)
            target[ids] = np.where(values == STAYS, STAYS, values + start)
        # A write-back follows its write by less than an iteration.
        at = np.array(self._copied_at, np.int64)[np.array(self._version, np.int64)]
        written = gaps.written[ids]
        copied[ids] = np.where(at == STAYS, STAYS, written + (at - written) % num)
        stays = released == STAYS
        fetched[stays] = STAYS
        begun, in_stall, out_stall, in_busy, out_busy = self._stats
        return Timetable(
            copied,
            released,
            fetched,
            self._now - self._began,
            begun - self._began,
            in_stall,
            out_stall,
            in_busy > 0,
            out_busy > 0,
        )
