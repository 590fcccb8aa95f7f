"""What a plan makes of an iteration: its time, its traffic and its peaks. Pure.

[Note: Model]
    Device, lanes and launching thread have clocks of their own; an operation begins when the one
    before it has ended, when it has been launched and when its operands have arrived. What moves at
    a moment is submitted when the operations before it have ended. Memory of an evicted page is
    free from the deadline on, for which the device waits if the copy is not over, or earlier if
    room is needed; that is stream order, which does not depend on what the host has seen. A fetch
    without room is tried again at each later moment. An absent operand is fetched when its
    operation comes, and what is needed last leaves if there is no other room.

    Two iterations run; the second one counts. The first begins with the plan's absent pages in
    host memory.

[Note: Host memory]
    A copy takes host memory until its page is written or dies. Where it does not fit, copies of
    pages that are on the device are given up, and then pages go to NVMe, if there is one.

[Note: Work elsewhere]
    An operation that runs on the host takes as long as copying its operands there; what it reads
    is written back first, what it writes is absent afterwards. A fetch for it is left out. A
    dropped page is made again by its operation, which takes its time once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.planning.cost.model_run import ModelRun
from tvm_pager.planning.hardware.lanes import LANE_NAMES, lane_rates
from tvm_pager.planning.plan import Prediction
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning.hardware.lanes import LaneRates
    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.plan import MovementPlan
    from tvm_pager.planning.traces.trace import Trace

__all__ = ["Evaluation", "Span", "evaluate"]

_NUM_CYCLES = 2


class Span(NamedTuple):
    """One piece of work in a timeline.

    Attributes:
        lane: "compute", "host", or a lane's name.
        begin_ns: from the beginning of the iteration; negative: in the one before.
        end_ns: likewise.
        number: of the operation on "compute" and "host", of the page on a lane.
    """

    lane: str
    begin_ns: int
    end_ns: int
    number: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` computed of one steady iteration.

    Attributes:
        prediction: time, traffic and peaks.
        timeline: of all work that ended in the iteration, by lane and time.
        num_faults: operands that were absent when their operation came.
        room_stall_ns: of the stall, what operations waited for room.
    """

    prediction: Prediction
    timeline: tuple[Span, ...]
    num_faults: int
    room_stall_ns: int


def evaluate(
    trace: Trace,
    plan: MovementPlan,
    hardware: HardwareProfile,
    limits: Limits,
    index: TraceIndex | None = None,
    rates: LaneRates | None = None,
) -> Evaluation:
    """Computes what becomes of an iteration under a plan; see [Note: Model].

    Args:
        trace: the iteration.
        plan: any; what does not fit is made up for as the pager would.
        hardware: the machine.
        limits: budgets.
        index: of the trace, if there is one already.
        rates: of the lanes, if they are not as measured.
    """
    index = TraceIndex(trace) if index is None else index
    rates = lane_rates(hardware, limits) if rates is None else rates
    run = ModelRun(index, plan, hardware, limits, rates)
    for _ in range(_NUM_CYCLES):
        run.begin_iteration()
        for op in range(len(trace.ops)):
            run.run(op)
        run.end_iteration()
    began = run.began
    prediction = Prediction(
        step_ns=_ns(run.now - began),
        stall_ns=_ns(run.stall),
        lane_bytes=dict(zip(LANE_NAMES, run.lane_bytes, strict=True)),
        peak_bytes=dict(run.books.peak),
        replay_ns=_ns(run.replayed),
        host_ns=_ns(run.host_time),
    )
    timeline = tuple(
        Span(lane, _ns(begin - began), _ns(end - began), number)
        for lane, begin, end, number in run.spans()
    )
    return Evaluation(prediction, timeline, run.num_faults, _ns(run.room_stall))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
