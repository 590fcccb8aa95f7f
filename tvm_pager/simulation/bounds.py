"""What no policy can beat: bytes that must move, and time that a step must take.

[Note: The fractional bound]
    At each operation the pages that are alive and do not fit are away. Bringing a page back costs
    its bytes; to leave, it must have been written down since its last write. With whole pages of
    different sizes the least traffic is hard to compute. Let fractions of pages move, and any
    prices give a bound from below (planning/search/relaxation.py). We climb on it for a fixed
    number of steps and keep the best: a valid bound wherever we stop. On traces of training steps
    it was within 1 % of the linear program's optimum. Where even its own pages leave no room for
    its workspace, an operation gets less of it.

[Note: Belady]
    Where all pages have one size, evicting what is used last (MIN) fetches least. Counted over
    several iterations that begin with whatever is best on the device, and divided.

[Note: The roofline]
    A step takes at least what its kernels take, what its launches take, and what the bytes of the
    bounds take at the fastest rate that was measured for their direction, each alone or both
    together. Bytes that fit neither the device nor DRAM must go through the disk.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tvm_pager.memory import PageTable
from tvm_pager.planning.search.gaps import all_gaps
from tvm_pager.planning.search.relaxation import Relaxation
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvm_pager.planning import HardwareProfile, Limits, Trace
    from tvm_pager.planning.hardware.profile import DiskRates
    from tvm_pager.planning.hardware.rates import LinkRate
    from tvm_pager.planning.search.gaps import Gaps

__all__ = [
    "Bounds",
    "least_below_bytes",
    "least_device_bytes",
    "least_traffic",
    "min_fetched_bytes",
    "roofline",
]

_NUM_STEPS = 1250
_STEP = 0.1  # of the cost of a byte
_NUM_ITERATIONS = 8  # for Belady


@dataclass(frozen=True, slots=True)
class Bounds:
    """From below, of one steady iteration.

    Attributes:
        name: what kind of traffic bound it is: "fractional" or "Belady".
        in_bytes: to the device.
        out_bytes: from it.
        both_bytes: together; at least the sum.
        disk_in_bytes: from NVMe, whether to DRAM or to the device.
        disk_out_bytes: to NVMe.
        step_ns: how long the iteration takes.
        limit: what makes it take that long: "compute", "launch", "h2d", "d2h", "link", "disk".
    """

    name: str
    in_bytes: int
    out_bytes: int
    both_bytes: int
    disk_in_bytes: int
    disk_out_bytes: int
    step_ns: int
    limit: str


def roofline(trace: Trace, hardware: HardwareProfile, limits: Limits) -> Bounds:
    """All bounds of a trace under budgets; see the notes above. A second or two.

    Raises:
        ConfigError: the profile has no such disk.
    """
    index = TraceIndex(trace)
    gaps = all_gaps(index)
    device_bytes = limits.device_bytes - trace.overhead_bytes
    name = "fractional"
    excess = excess_bytes(index, device_bytes)
    moved = [least_traffic(gaps, excess, *costs) for costs in ((1, 0), (0, 1), (1, 1))]
    fetched_bytes = min_fetched_bytes(index, device_bytes)
    if fetched_bytes is not None:
        name, moved[0] = "Belady", max(moved[0], fetched_bytes)
    in_bytes, out_bytes, both_bytes = moved
    both_bytes = max(both_bytes, in_bytes + out_bytes)
    launch_ns = trace.launch_ns or round(hardware.overheads.dispatched_ns.median)
    duplex_rate = max(point.figure.median for point in hardware.duplex_total_bytes_per_s.points)
    seconds = {
        "compute": trace.compute_ns / 1e9,
        "launch": launch_ns * len(trace.ops) / 1e9,
        "h2d": in_bytes / _fastest(hardware.h2d),
        "d2h": out_bytes / _fastest(hardware.d2h),
        "link": both_bytes / max(duplex_rate, _fastest(hardware.h2d), _fastest(hardware.d2h)),
    }
    below = [0, 0]
    if limits.nvme_bytes:
        excess = excess_bytes(index, device_bytes + limits.host_bytes)
        below = [least_traffic(gaps, excess, *costs) for costs in ((1, 0), (0, 1))]
        seconds["disk"] = _disk_seconds(hardware.disk(limits.disk_engine), *below)
    limit = max(seconds, key=lambda name: seconds[name])
    step_ns = math.floor(seconds[limit] * 1e9)
    return Bounds(name, in_bytes, out_bytes, both_bytes, below[0], below[1], step_ns, limit)


def _disk_seconds(disk: DiskRates, in_bytes: int, out_bytes: int) -> float:
    read, write = _fastest(disk.read), _fastest(disk.write)
    both = max(disk.duplex_total_bytes_per_s.median, read, write)
    return max(in_bytes / read, out_bytes / write, (in_bytes + out_bytes) / both)


def _fastest(rate: LinkRate) -> float:
    return max(point.figure.median for point in rate.by_chunk.points)


def least_device_bytes(trace: Trace) -> int:
    """The smallest device budget with which every operation fits: operands and results."""
    pages = trace.pages
    return trace.overhead_bytes + max(
        (sum(pages[n].frame_bytes for n in {*op.reads, *op.creates}) for op in trace.ops),
        default=0,
    )


def least_below_bytes(trace: Trace, limits: Limits) -> int:
    """The smallest DRAM and NVMe together that back every page beside the device."""
    sizes = [PageTable.commit_of(page.nbytes) for page in trace.pages]
    change = [0] * (len(trace.ops) + 1)
    for size, page in zip(sizes, trace.pages, strict=True):
        change[0 if page.born is None else page.born] += size
        if page.died is not None:
            change[page.died] -= size
    most_bytes = max(itertools.accumulate(change))
    if most_bytes <= limits.device_bytes:
        return 0
    below_bytes = most_bytes - limits.device_bytes + 2 * max(sizes, default=0)
    return PageTable.commit_of(below_bytes)  # see commit_limit_bytes


def excess_bytes(index: TraceIndex, device_bytes: int) -> NDArray[np.int64]:
    """By operation: how much must be away; below zero: how much is free."""
    lacking = np.maximum(index.named_bytes - device_bytes, 0)  # for operands and workspace
    excess: NDArray[np.int64] = index.resident_bytes - device_bytes - lacking
    return excess


def least_traffic(gaps: Gaps, excess: NDArray[np.int64], in_cost: float, out_cost: float) -> int:
    """A bound from below of in_cost * bytes in + out_cost * bytes out per iteration.

    See [Note: The fractional bound]. Costs are 0 or 1, or whatever a byte shall count.

    Args:
        gaps: all of them.
        excess: of `excess_bytes`.
        in_cost: of a byte to the device.
        out_cost: of a byte from it.
    """
    if (excess <= gaps.covered(gaps.is_endless)).all():
        return 0
    costs = gaps.in_bytes * np.float64(in_cost), gaps.out_bytes * np.float64(out_cost)
    relaxation = Relaxation(gaps, excess, *costs)
    u = np.zeros(gaps.num_moments)
    u[np.argmax(excess)] = max(in_cost, out_cost)  # the fullest moment alone is a start
    best, drift, scale = 0.0, np.zeros_like(u), np.zeros_like(u)
    for step in range(1, _NUM_STEPS + 1):
        value, is_in = relaxation.bound(u)
        slope = relaxation.lack(is_in)
        best = max(best, value)
        drift = 0.9 * drift + 0.1 * slope
        scale = 0.999 * scale + 0.001 * slope * slope
        ahead = drift / (1 - 0.9**step) / (np.sqrt(scale / (1 - 0.999**step)) + 1e-12)
        u = np.maximum(0.0, u + _STEP * (1 - step / _NUM_STEPS) * ahead)
    return math.floor(best * (1 - 1e-9))  # what rounding may have added


def min_fetched_bytes(index: TraceIndex, device_bytes: int) -> int | None:
    """What MIN fetches per iteration; None where pages differ in size. See [Note: Belady]."""
    trace = index.trace
    sizes = {page.frame_bytes for page in trace.pages if page.nbytes}
    if len(sizes) != 1 or index.workspace_bytes.any():
        return None
    (size,) = sizes
    num_fetches = _Min(index, device_bytes // size).run(_NUM_ITERATIONS)
    return num_fetches * size // _NUM_ITERATIONS


class _Min:
    """Belady's MIN on a trace that repeats, beginning with what is best on the device."""

    def __init__(self, index: TraceIndex, num_frames: int) -> None:
        self._index = index
        self._num_frames = num_frames

    def run(self, num_iterations: int) -> int:
        trace = self._index.trace
        pages, num_ops = trace.pages, len(trace.ops)
        here = {n for n, page in enumerate(pages) if page.born is None and page.nbytes}
        kept = {page.becomes for page in pages}
        anew = {n for n in here if n not in kept}
        deaths: list[list[int]] = [[] for _ in range(num_ops + 1)]
        for number, page in enumerate(pages):
            if page.died is not None:
                deaths[page.died].append(number)
        num_fetches = 0
        for iteration in range(num_iterations):
            here |= anew if iteration else set()
            for index, op in enumerate(trace.ops):
                here.difference_update(deaths[index])
                operands = {n for n in (*op.reads, *op.creates) if pages[n].nbytes}
                num_fetches += len(operands - here - set(op.creates))
                here |= operands
                self._shrink(here, operands, index)
            here.difference_update(deaths[num_ops])
            here = {n for page_ in here if (n := pages[page_].becomes) is not None}
        return num_fetches

    def _shrink(self, here: set[int], operands: set[int], index: int) -> None:
        while len(here) > self._num_frames and here > operands:
            next_use = self._index.next_use_from
            here.remove(max(here - operands, key=lambda n: (next_use(n, index + 1), n)))
