"""One simulation: a trace, a machine, budgets and a policy; what a steady iteration comes to."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tvm_pager.events import TeeSink
from tvm_pager.memory import Tier
from tvm_pager.paging import DemandPager
from tvm_pager.paging.limits import write_behind_bytes
from tvm_pager.planning import load_policy
from tvm_pager.simulation.feeder import Feeder
from tvm_pager.simulation.program import Program
from tvm_pager.simulation.tally import Tally
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.virtual_backend import VirtualBackend, VirtualOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.events import EventSink
    from tvm_pager.planning import HardwareProfile, Limits, Policy, Trace
    from tvm_pager.transfer.virtual_lane import Chunk

__all__ = ["SimulationOptions", "SimulationResult", "simulate"]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """How a trace is simulated.

    Attributes:
        policy: its name, or what makes it.
        num_iterations: how often the trace is run.
        num_measured: the last ones of them are what the result is about.
        segment_bytes: pages are split into parts of this size below the device.
        is_strict: a misbehaving policy is an error, else LRU takes over.
        launch_ns: host time of an operation; None: what the trace says, else the profile.
        submit_ns: host time of a copy; None: what the profile says.
        compute_factor: device time of operations over the trace's, of which policies are not told.
        planned_hardware: what policies plan with; None: the rates that copies have here.
        is_awaited: whether the host waits for the device after each iteration, as a loop does that
            reads its loss; else one iteration's copies overlap with the next one's.
        sink: takes the pager's events too.
        on_kernel: takes name, begin and end of each operation on the device.
        on_copy: takes each chunk that moved, with its begin and end.
    """

    policy: str | Callable[[], Policy] = "lru"
    num_iterations: int = 8
    num_measured: int = 3
    segment_bytes: int = 32 << 20
    is_strict: bool = True
    launch_ns: int | None = None
    submit_ns: int | None = None
    compute_factor: float = 1.0
    planned_hardware: HardwareProfile | None = None
    is_awaited: bool = True
    sink: EventSink | None = None
    on_kernel: Callable[[str, int, int], None] | None = None
    on_copy: Callable[[Chunk, int, int], None] | None = None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Means over the measured iterations. Times in nanoseconds, sizes in bytes.

    Attributes:
        step_ns: from the end of one iteration on the device to the end of the next.
        compute_ns: of it, in operations.
        stall_ns: of it, waiting for copies while there was an operation to run.
        lane_bytes: moved, by lane.
        num_faults: operands that were neither on the device nor on their way to it.
        num_evictions: pages that left the device.
        num_clean_evictions: of these, without a copy.
        peak_bytes: since the first iteration began to be built up, by tier; workspaces included.
        step_ns_each: of every iteration, the first ones too.
        num_operations: simulated in all.
        wall_s: what that took.
        notices: what the pager had to say.
    """

    step_ns: int
    compute_ns: int
    stall_ns: int
    lane_bytes: dict[str, int]
    num_faults: float
    num_evictions: float
    num_clean_evictions: float
    peak_bytes: dict[Tier, int]
    step_ns_each: tuple[int, ...]
    num_operations: int
    wall_s: float
    notices: tuple[str, ...] = field(default=())


def simulate(
    trace: Trace,
    hardware: HardwareProfile,
    limits: Limits,
    options: SimulationOptions | None = None,
) -> SimulationResult:
    """Runs a trace several times and says what a steady iteration comes to.

    Args:
        trace: one iteration.
        hardware: the machine's rates.
        limits: budgets: the device's with what is no page, the host's without staging.
        options: everything else.

    Raises:
        BudgetError: an operation does not fit on the device.
        CommitError: all tiers together cannot back the pages.
        ConfigError: the profile has no such disk.
        PolicyError: the policy is unknown, raised, or decided something illegal.
    """
    simulation = _Simulation(trace, hardware, limits, options or SimulationOptions())
    return simulation.run()


class _Simulation:
    def __init__(
        self, trace: Trace, hardware: HardwareProfile, limits: Limits, options: SimulationOptions
    ) -> None:
        if not 0 < options.num_measured <= options.num_iterations:
            raise ValueError(f"{options.num_measured=} of {options.num_iterations=}")
        self._options = options
        self._tally = Tally()
        self._copied: list[tuple[str, int, int]] = []  # lane, end and bytes of each chunk
        self._backend = VirtualBackend(
            hardware,
            limits.host_bytes,
            limits.nvme_bytes,
            options=VirtualOptions(
                disk_engine=limits.disk_engine,
                submit_ns=options.submit_ns,
                overhead_bytes=trace.overhead_bytes,
            ),
            on_kernel=options.on_kernel,
            on_copy=self._note_copy,
        )
        policy, planned = options.policy, options.planned_hardware or hardware
        sink = options.sink
        self._pager = DemandPager(
            self._backend,
            limits.device_bytes,
            load_policy(policy) if isinstance(policy, str) else policy,
            segment_bytes=options.segment_bytes,
            sink=self._tally if sink is None else TeeSink(self._tally, sink),
            strict=options.is_strict,
            clock=self._backend.clock,
            write_behind_bytes=write_behind_bytes(limits.device_bytes),
            hardware=lambda: planned,
            disk_engine=limits.disk_engine,
        )
        self._pager.sample_overhead()
        launch_ns = options.launch_ns
        if launch_ns is None:
            launch_ns = trace.launch_ns or round(hardware.overheads.dispatched_ns.median)
        program = Program(trace, options.compute_factor)
        self._feeder = Feeder(self._pager, self._backend, program, launch_ns)

    def run(self) -> SimulationResult:
        started_s = time.perf_counter()
        options = self._options
        backend = self._backend
        backend.synchronize()
        marks, before = [backend.stream.mark()], self._counts()
        for iteration in range(options.num_iterations):
            if iteration == options.num_iterations - options.num_measured:
                before = self._counts()
            self._feeder.run_iteration()
            marks.append(backend.stream.mark())
            if options.is_awaited:
                backend.synchronize()
        num = options.num_measured
        after = self._counts()
        counts = {name: (after[name] - number) / num for name, number in before.items()}
        ends = [backend.reach(mark) for mark in marks]
        first, last = marks[-1 - num], marks[-1]
        lane_bytes = {lane.value: 0 for lane in Lane}
        for lane, end_ns, nbytes in self._copied:
            lane_bytes[lane] += nbytes * (ends[-1 - num] < end_ns <= ends[-1])
        table = self._pager.table
        peaks = {
            Tier.DEVICE: max(table.device_peak_bytes, self._feeder.workspace_peak_bytes),
            Tier.HOST: table.frames[Tier.HOST].peak_bytes,
            Tier.NVME: table.frames[Tier.NVME].peak_bytes,
        }
        result = SimulationResult(
            step_ns=(ends[-1] - ends[-1 - num]) // num,
            compute_ns=round((last.busy_ns - first.busy_ns) / num),
            stall_ns=round((last.stall_ns - first.stall_ns) / num),
            lane_bytes={lane: round(nbytes / num) for lane, nbytes in lane_bytes.items()},
            num_faults=counts["faults"],
            num_evictions=counts["evictions"],
            num_clean_evictions=counts["clean"],
            peak_bytes=peaks,
            step_ns_each=tuple(b - a for a, b in itertools.pairwise(ends)),
            num_operations=self._feeder.num_operations,
            wall_s=time.perf_counter() - started_s,
            notices=tuple(self._tally.notices),
        )
        self._pager.close()
        return result

    def _counts(self) -> dict[str, int]:
        """What the host has counted: in its order, so that it is the same in every iteration."""
        tally = self._tally
        return {
            "faults": self._feeder.num_faults,
            "evictions": tally.num_evictions,
            "clean": tally.num_clean_evictions,
        }

    def _note_copy(self, chunk: Chunk, begin_ns: int, end_ns: int) -> None:
        self._copied.append((chunk.ticket.transfer.lane.value, end_ns, chunk.nbytes))
        if self._options.on_copy is not None:
            self._options.on_copy(chunk, begin_ns, end_ns)
