"""LOOKAHEAD: the pages that move least, moved as early as memory allows.

It plans a whole iteration from its trace. Which pages are absent when is a covering problem, solved
within a percent of the fewest bytes that can move at all; when they leave and return comes from a
list schedule of all copies beside the operations, on the measured rates of the machine; what
operations waited for changes what the next choice counts. `tvm_pager/planning/search/planner.py`
and the files that it names say how.

On demand, where the plan did not foresee something, it is `belady`.

[Note: Feedback]
    If operations wait for much longer than expected although the program does what the trace says,
    copies are slower than the profile promises. The plan is made again for slower lanes, a few
    times; the one that was the fastest as measured stays. The first iteration of a plan does not
    count, because it begins with other pages absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.policies.belady import Belady

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, IterationReport, Limits, MovementPlan, Trace
    from tvm_pager.planning.search.planner import Planner

__all__ = ["Lookahead"]

_TOLERANCE = 0.1  # of the step: how much longer operations may wait than expected
_MAX_PLANS = 4  # for one trace and one budget
_MAX_SLOWNESS = 4.0


class Lookahead(Belady):
    """Plans by the whole occupancy curve. A plan takes 0.3 s for 5,000 operations."""

    name = "lookahead"

    def __init__(self) -> None:
        super().__init__()
        self._planner: Planner | None = None
        self._limits: Limits | None = None
        self._current: MovementPlan | None = None
        self._measured: list[tuple[int, int, MovementPlan]] = []  # step, turn, plan
        self._num_reports = 0
        self._slowness = 1.0

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan | None:
        from tvm_pager.planning.search.planner import Planner  # needs numpy

        planner = self._planner
        if planner is None or planner.trace is not trace or planner.hardware is not hardware:
            planner = self._planner = Planner(trace, hardware)
        self._limits = limits
        self._measured.clear()
        self._slowness, self._num_reports = 1.0, 0
        self._current = planner.plan(limits)
        return self._current

    def feedback(self, report: IterationReport) -> MovementPlan | None:
        current, planner = self._current, self._planner
        if not report.is_complete or current is None or planner is None:
            return None
        if report.limits != self._limits or report.trace is not planner.trace:
            return None
        self._num_reports += 1
        if self._num_reports != 2 or len(self._measured) >= _MAX_PLANS:
            return None  # see [Note: Feedback]
        expected = current.prediction
        self._measured.append((report.step_ns, len(self._measured), current))
        late_ns = report.stall_ns - expected.stall_ns if expected is not None else 0
        if expected is None or late_ns <= _TOLERANCE * expected.step_ns:
            return self._settled()
        slowness = self._slowness * (1 + late_ns / expected.step_ns)
        self._slowness = min(slowness, _MAX_SLOWNESS)
        replanned = None
        if len(self._measured) < _MAX_PLANS:
            replanned = planner.plan(report.limits, self._slowness)
        if replanned is None:
            return self._settled()
        self._current, self._num_reports = replanned, 0
        return replanned

    def _settled(self) -> MovementPlan | None:
        """The fastest plan, if another one is followed now."""
        _, turn, fastest = min(self._measured)[:3]
        is_current = turn == len(self._measured) - 1
        self._current = fastest
        return None if is_current else fastest
