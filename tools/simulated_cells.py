"""Cells simulated in several processes, with constants that make the simulator like a real run.

[Note: Constants]
    Each is a factor on what the simulator takes without it, and stands for one thing that a real
    step has and the simulator lacks:
    `link`: rates of copies between device and DRAM, both ways, one way and duplex. The profile's
    are those of a link that never idles; between two chunks of a lane it does.
    `compute`: device time of operations. The trace's was taken while little moved; copies beside
    kernels take bandwidth of the device's memory from them.
    `submit`: host time of a copy, with what the pager does for it (20 dispatched operations).
    `launch`: host time of an operation: the least of all traces of the program, else the profile's.
    It launches as fast under every budget, but is taken down more slowly the more moves meanwhile.
    Policies are not told of them: they plan with the profile and the trace, as in the real run.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from tvm_pager.errors import PagerError
from tvm_pager.planning import HardwareProfile, Limits, Policy, Trace, load_policy
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate, Point
from tvm_pager.simulation.simulator import SimulationOptions, simulate

__all__ = ["Case", "Constants", "Simulated", "Simulations"]

# Plans begin with the fourth, and reports mend them up to the sixth. On demand steps differ: the
# hand of `clock` is elsewhere in each.
_NUM_ITERATIONS, _NUM_PLANNED, _NUM_ON_DEMAND = 10, 2, 6  # of these the last are measured
_DISPATCHES_PER_COPY = 20  # as in virtual_backend.py


class Constants(NamedTuple):
    """Factors; see [Note: Constants]."""

    link: float = 1.0
    compute: float = 1.0
    submit: float = 1.0
    launch: float = 1.0

    def physical(
        self, traces: Mapping[str, Trace], key: str, hardware: HardwareProfile
    ) -> dict[str, float]:
        """What they come to on a machine: seconds, bytes/s, factors."""
        host = _host_ns(traces, key, hardware)
        link = _scaled(hardware, self.link)
        chunk_bytes = hardware.h2d.by_chunk.largest
        return {
            "h2d_bytes_per_s": link.h2d.by_chunk.at(chunk_bytes),
            "d2h_bytes_per_s": link.d2h.by_chunk.at(chunk_bytes),
            "compute_factor": self.compute,
            "submit_s": self.submit * host["submit"] / 1e9,
            "launch_s": self.launch * host["launch"] / 1e9,
        }


class Case(NamedTuple):
    """What is simulated: a trace by its key, under a policy and limits."""

    trace: str
    policy: str
    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    disk_engine: str


@dataclass(frozen=True, slots=True)
class Simulated:
    """A steady step.

    Attributes:
        step_s: from the end of an iteration on the device to that of the next.
        compute_s: of it, in operations.
        stall_s: of it, waiting for copies while there was an operation to run.
        lane_bytes: moved, by lane.
        refusal: why it could not run; the rest is 0 then.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    stall_s: float = 0.0
    lane_bytes: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""


class Simulations:
    """Simulates cases in several processes and keeps what came out. A context manager.

    Args:
        traces: by key.
        hardware: as measured.
        num_jobs: processes; 1: this one.
    """

    def __init__(
        self, traces: Mapping[str, Trace], hardware: HardwareProfile, num_jobs: int
    ) -> None:
        self._known: dict[tuple[Case, Constants], Simulated] = {}
        self._work = _Work(traces, hardware)
        self._pool: ProcessPoolExecutor | None = None
        if num_jobs > 1:  # fresh ones, as in sweep.py
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_jobs, context, _take, (self._work,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def num_done(self) -> int:
        """How many there were."""
        return len(self._known)

    def run(self, wanted: Sequence[tuple[Case, Constants]]) -> list[Simulated]:
        """Simulates what is not known yet; gives all, in order. Blocks."""
        new = [item for item in dict.fromkeys(wanted) if item not in self._known]
        if self._pool is None:
            found = [_simulate(self._work, item) for item in new]
        else:
            found = list(self._pool.map(_run, new))
        self._known |= dict(zip(new, found, strict=True))
        return [self._known[item] for item in wanted]


# --- in the processes ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    traces: Mapping[str, Trace]
    hardware: HardwareProfile


_work: _Work | None = None  # of this process


def _take(work: _Work) -> None:
    global _work
    _work = work


def _run(item: tuple[Case, Constants]) -> Simulated:
    assert _work is not None
    return _simulate(_work, item)


def _simulate(work: _Work, item: tuple[Case, Constants]) -> Simulated:
    case, constants = item
    trace, hardware = work.traces[case.trace], work.hardware
    host = _host_ns(work.traces, case.trace, hardware)
    is_planned = load_policy(case.policy).plan is not Policy.plan
    options = SimulationOptions(
        policy=case.policy,
        num_iterations=_NUM_ITERATIONS,
        num_measured=_NUM_PLANNED if is_planned else _NUM_ON_DEMAND,
        is_strict=False,
        launch_ns=round(constants.launch * host["launch"]),
        submit_ns=round(constants.submit * host["submit"]),
        compute_factor=constants.compute,
        planned_hardware=hardware,
        is_awaited=False,  # as in bench_policies.py
    )
    limits = Limits(
        case.device_bytes, case.host_bytes, case.nvme_bytes, disk_engine=case.disk_engine
    )
    try:
        result = simulate(trace, _scaled(hardware, constants.link), limits, options)
    except PagerError as error:
        return Simulated(refusal=str(error))
    return Simulated(
        result.step_ns / 1e9, result.compute_ns / 1e9, result.stall_ns / 1e9, result.lane_bytes
    )


def _host_ns(traces: Mapping[str, Trace], key: str, hardware: HardwareProfile) -> dict[str, float]:
    """What is taken where nobody says otherwise, for the program of one of the traces."""
    dispatched_ns = hardware.overheads.dispatched_ns.median
    names = [op.name for op in traces[key].ops]
    alike = [trace for trace in traces.values() if [op.name for op in trace.ops] == names]
    launch_ns = min((trace.launch_ns for trace in alike if trace.launch_ns), default=0)
    return {
        "submit": _DISPATCHES_PER_COPY * dispatched_ns,
        "launch": launch_ns or dispatched_ns,
    }


def _scaled(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """A machine whose link between device and DRAM has other rates."""

    def curve(old: Curve) -> Curve:
        return Curve(tuple(Point(p.x, figure(p.figure)) for p in old.points))

    def figure(old: Figure) -> Figure:
        return Figure(old.median * factor, old.low * factor, old.high * factor)

    def rate(old: LinkRate) -> LinkRate:
        return LinkRate(
            curve(old.by_chunk),
            curve(old.duplex_by_chunk),
            old.latency_s / factor,
            old.bytes_per_s * factor,
        )

    return dataclasses.replace(
        hardware,
        h2d=rate(hardware.h2d),
        d2h=rate(hardware.d2h),
        duplex_total_bytes_per_s=curve(hardware.duplex_total_bytes_per_s),
    )
