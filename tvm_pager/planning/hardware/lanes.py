"""Copy lanes on a clock: how long transfers take, and when each is over. Pure.

[Note: Lanes]
    A lane serves its transfers in the order of submission. Host and device are joined by one lane
    for each direction, the disk by another two; a transfer between disk and device passes through
    host memory in chunks and so takes the disk's time. While both lanes of a pair are busy, each
    is slower by its measured factor, from the moment on at which the other one begins.

[Note: Measured and fitted]
    A profile's time model is fitted over all chunk sizes and may promise more than was measured at
    one of them: 8 % at 16 MiB on one machine. Bytes take as long as the slower of the two says.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tvm_pager.planning.hardware.profile import DiskRates, HardwareProfile
    from tvm_pager.planning.hardware.rates import LinkRate
    from tvm_pager.planning.limits import Limits

__all__ = [
    "D2H",
    "D2N",
    "H2D",
    "LANE_NAMES",
    "N2D",
    "Job",
    "LaneRates",
    "Lanes",
    "disk_rates",
    "lane_rates",
]

H2D: Final = 0
D2H: Final = 1
N2D: Final = 2
D2N: Final = 3
LANE_NAMES: Final = ("h2d", "d2h", "n2d", "d2n")

_CHUNK_BYTES = 16 << 20  # as the lanes divide transfers


class LaneRates:
    """How long bytes take on each lane.

    Args:
        hardware: what was measured.
        disk_engine: which disk; None: there is none.
        slowness: how much longer everything takes than was measured.

    Raises:
        ConfigError: that disk was not measured.
    """

    def __init__(
        self, hardware: HardwareProfile, disk_engine: str | None = None, slowness: float = 1.0
    ) -> None:
        links = [hardware.h2d, hardware.d2h]
        if disk_engine is not None:
            disk = hardware.disk(disk_engine)
            links += [disk.read, disk.write]
        self.links: tuple[LinkRate, ...] = tuple(links)
        self._slowness = slowness
        self.slowdowns = tuple(link.duplex_slowdown(_CHUNK_BYTES) for link in links)
        self.seconds = lru_cache(maxsize=4096)(self._seconds)

    @property
    def has_disk(self) -> bool:
        """Whether the lanes to and from it exist."""
        return len(self.links) > N2D

    def _seconds(self, lane: int, nbytes: int) -> float:
        """How long `nbytes` take on the lane while the opposite one is idle."""
        if not nbytes:
            return 0.0
        link = self.links[lane]
        measured = nbytes / link.by_chunk.at(min(nbytes, _CHUNK_BYTES))
        return max(link.seconds(nbytes, _CHUNK_BYTES), measured) * self._slowness

    def duplex_seconds(self, lane: int, nbytes: int) -> float:
        """How long they take while the opposite lane is busy all the while."""
        return self.seconds(lane, nbytes) * self.slowdowns[lane]


def disk_rates(hardware: HardwareProfile, limits: Limits) -> DiskRates | None:
    """The rates of the disk that the limits allow; None: there is none, or none was measured."""
    if limits.nvme_bytes <= 0:
        return None
    return next((disk for disk in hardware.disks if disk.engine == limits.disk_engine), None)


def lane_rates(hardware: HardwareProfile, limits: Limits, slowness: float = 1.0) -> LaneRates:
    """The lanes that the limits allow: those to a disk only if there is one that was measured.

    Args:
        hardware: the machine.
        limits: whether there is a swap file, and on which disk.
        slowness: how much longer everything takes than was measured.
    """
    disk = disk_rates(hardware, limits)
    return LaneRates(hardware, None if disk is None else disk.engine, slowness)


class Job:
    """A transfer on a lane.

    Attributes:
        begun: when it began; None: not yet.
        ended: when it was over; None: not yet.
        page: what moves, for timelines.
    """

    __slots__ = ("begun", "ended", "left", "page")

    def __init__(self, page: int, seconds: float) -> None:
        self.page = page
        self.left = seconds
        self.begun: float | None = None
        self.ended: float | None = None


class Lanes:
    """Four lanes on one clock; see [Note: Lanes]. Times in seconds.

    Attributes:
        now: the clock. It goes on by `advance` and `wait`.
        backlog: by lane: seconds of work that is left, if the opposite lane is idle.
        busy: by lane: seconds in which it has moved bytes.
        finished: (lane, job) in the order in which they ended, if they are kept.
    """

    def __init__(self, rates: LaneRates, keep_finished: bool = False) -> None:
        self.now = 0.0
        self.backlog = [0.0, 0.0, 0.0, 0.0]
        self.busy = [0.0, 0.0, 0.0, 0.0]
        self.finished: list[tuple[int, Job]] = []
        self._rates = rates
        self._keeps = keep_finished
        self._pairs = [_Pair(H2D, rates.slowdowns)]
        if rates.has_disk:
            self._pairs.append(_Pair(N2D, rates.slowdowns))

    def submit(self, lane: int, page: int, nbytes: int) -> Job:
        """Queues a transfer that may begin now."""
        job = Job(page, self._rates.seconds(lane, nbytes))
        self.backlog[lane] += job.left
        self._pairs[lane >> 1].queues[lane & 1].append(job)
        return job

    def advance(self, until: float) -> None:
        """Lets the clock go on."""
        for pair in self._pairs:
            while pair.now < until:
                self._step(pair, until)
        self.now = max(self.now, until)

    def wait(self, job: Job, lane: int) -> float:
        """Lets the lane's clock go on until the job has ended; gives that time.

        The other pair's clock stays: nothing is submitted meanwhile.
        """
        pair = self._pairs[lane >> 1]
        while job.ended is None:
            self._step(pair, math.inf)
        return job.ended

    def _step(self, pair: _Pair, until: float) -> None:
        """Goes on to the next end of a job, or to `until`."""
        first, second = pair.queues
        is_duplex = bool(first and second)
        elapsed = until - pair.now
        for side, queue in enumerate(pair.queues):
            if queue:
                elapsed = min(elapsed, queue[0].left * (pair.slowdowns[side] if is_duplex else 1.0))
        then = pair.now + elapsed
        for side, queue in enumerate(pair.queues):
            if not queue:
                continue
            job, lane = queue[0], pair.lane + side
            if job.begun is None:
                job.begun = pair.now
            needed = job.left * (pair.slowdowns[side] if is_duplex else 1.0)
            done = job.left if needed <= elapsed else job.left * (elapsed / needed)
            job.left -= done
            self.backlog[lane] -= done
            self.busy[lane] += elapsed
            if needed <= elapsed:
                job.ended = then
                queue.popleft()
                if not queue:
                    self.backlog[lane] = 0.0
                if self._keeps:
                    self.finished.append((lane, job))
        pair.now = then


class _Pair:
    __slots__ = ("lane", "now", "queues", "slowdowns")

    def __init__(self, lane: int, slowdowns: tuple[float, ...]) -> None:
        self.lane = lane
        self.now = 0.0
        self.queues: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self.slowdowns = slowdowns[lane : lane + 2]
