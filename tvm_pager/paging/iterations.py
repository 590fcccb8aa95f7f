"""Iteration after iteration: recorded, followed, planned. The pager's lock is held.

[Note: When what is recorded]
    Nothing is, while everything fits on the device and nobody asks. Else an iteration is recorded
    if none is known that could come now, and a second time when it, or nearly it, comes again: only
    then is the trace planned and followed. Where a known trace is left and not found again, the
    iteration is recorded as a new one, what was followed included; and so it is where the trace was
    left and found again in the same way four times (a token is nearly a batch of evaluation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.errors import TraceError
from tvm_pager.paging.follower import WINDOW, Follower, Onlooker
from tvm_pager.paging.outcomes import Outcomes
from tvm_pager.paging.plan_runner import PlanRunner
from tvm_pager.paging.recorder import Recorder
from tvm_pager.paging.trace_shelf import TraceShelf
from tvm_pager.paging.victims import choose_by_plan
from tvm_pager.paging.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tvm_pager.memory import Page
    from tvm_pager.paging.follower import Departure
    from tvm_pager.paging.known_trace import KnownTrace
    from tvm_pager.paging.pager import DemandPager
    from tvm_pager.paging.planner import Planner
    from tvm_pager.paging.recorder import Entry, Origin
    from tvm_pager.planning import Eviction, Limits, Trace

__all__ = ["Iterations"]

# Of what an iteration creates: from there on its trace is recorded anew. A plan for a quarter less
# moves as many bytes (tools/bench_changing.py, "growing": 362 to 366 MiB from 1.1 to 1.5).
_GROWTH = 1.25


class Iterations:
    """What a pager knows of its program's iterations; see [Note: When what is recorded].

    Args:
        pager: whose. Its `watch` is told of each operation that runs; None where nobody listens.
        planner: asks the policy; kept.
        clock: nanoseconds.

    Attributes:
        recorder: takes down the present iteration; None: nobody does.
        follower: knows where in a trace the program is; None: nobody does.
        runner: does what plans say.
        latest: the trace that was recorded last.
        outcomes: iterations and what became of them.
        names: gives names of parameters and buffers, by page id.
        facts: of traces, for people.
        launch_ns: of an operation, where a driver knows better than who listens; else None.
        on_recording: told when recording begins and ends.
    """

    def __init__(self, pager: DemandPager, planner: Planner, clock: Callable[[], int]) -> None:
        self.recorder: Recorder | None = None
        self.follower: Follower | None = None
        self.runner = PlanRunner(pager)
        self.latest: Trace | None = None
        self.outcomes = Outcomes(clock)
        self.names: Callable[[], Mapping[int, str]] = dict
        self.facts: Mapping[str, str] = {}
        self.launch_ns: int | None = None
        self.on_recording: Callable[[bool], None] = lambda _: None
        self._pager = pager
        self.planner = planner
        self._clock = clock
        self._known = TraceShelf()
        self._origins: dict[int, Origin] = {}
        self._next_origins: dict[int, Origin] = {}
        self._previous: KnownTrace | None = None
        # Follows what is recorded, to tell whether it is nearly what is known, and does nothing.
        self._shadow: Follower | None = None
        self._left_at: tuple[KnownTrace, list[Page | None], int] | None = None
        self._watch = Watch(pager, self.pass_boundary)
        self._num_asked = 0  # iterations to be recorded in any case
        self._told = ""  # the last summary that somebody has asked for
        self._is_closed = False
        self._is_ending = False  # nothing of weight comes in this iteration any more
        self._is_concluded = False  # the iteration has ended, and the next one has not begun
        self._is_resuming = False  # another policy has taken over since an iteration was followed
        self._num_evicted = 0

    # --- what the pager and its drivers tell -----------------------------------------------------

    def enter(
        self,
        name: str,
        pages: Sequence[Page],
        written: Sequence[Page] = (),
        *,
        is_told: bool = False,
    ) -> Entry | None:
        """An operation is about to run; deaths have been drained, nothing is admitted yet.

        Args:
            name: as torch calls it.
            pages: its operands, as passed; none of them leaves by the plan now.
            written: those whose bytes it changes.
            is_told: whether `watch` was called already.

        Returns:
            Where the recorder takes it down, to be filled in; None: it is not recorded.
        """
        pager = self._pager
        if pager.watch is not None and not is_told:
            pager.running.append(pages)
            try:
                pager.watch(name, pages)
            finally:
                pager.running.remove(pages)
        return None if self.recorder is None else self.recorder.begin(name, pages, written)

    def waited(self, num_absent: int, nanoseconds: int) -> None:
        """An operation had to wait for bytes or room."""
        self.outcomes.waited(num_absent, nanoseconds)
        if self.recorder is not None:
            self.recorder.waited(nanoseconds)

    def record(self) -> None:
        """Records the next two iterations, whatever the policy: one to know what came before."""
        self._num_asked = 2

    def end_at_boundary(self) -> None:
        """The iteration is all but over, and `pass_boundary` will be called."""
        self._is_ending = True

    def end_when(self, is_over: Callable[[], bool]) -> None:
        """The iteration is over when an operation comes for which `is_over()`."""
        if self._is_closed:
            return
        if self.planner.wants_traces or self._num_asked or self.follower or self.recorder:
            self._watch.end_when(is_over)
        else:
            self.pass_boundary()

    def pass_boundary(self) -> None:
        """An iteration is over, and another one begins. Plans, where there is a new trace.

        Raises:
            PolicyError: the policy misbehaved, and the pager is strict.
        """
        self._watch.end_when(None)
        self._is_ending = False
        if self._is_closed or self._is_empty():
            return
        self._conclude()
        self._is_concluded = False
        self.outcomes.begin(self._pager.table.created_bytes)
        self._known.pass_boundary()
        self._begin()

    def succeed(self, planner: Planner) -> None:
        """Another policy plans from the next boundary on; until then there is no plan.

        What is recorded stays, and goes on. What the plan has fetched stays where it is.
        """
        self.planner = planner
        self.runner.stop(keep_from=0)
        self._known.forget_plans()
        self._is_resuming = True
        if (self._is_ending or self._watch.is_over) and not self._is_empty():
            self._conclude()  # it has been followed to its end, which counts
        elif self.follower is not None:
            self.follower = self._previous = None
            self._watch.listen(None if self.recorder is None else self._record)

    def close(self) -> None:
        """The pager ends: tells what became of the iterations."""
        if self._is_closed:
            return
        self.runner.stop()
        self._stop_recording()
        self._is_closed, self.follower = True, None
        self._watch.end()
        told, summary = self._told, self.summary()
        if summary and summary != told and self.planner.wants_traces:
            self._pager.notice(summary)

    def summary(self) -> str:
        """One line for people; "" where nothing was recorded."""
        self._told = self.outcomes.summary(len(self._known), self.runner.reasons)
        return self._told

    # --- what others ask -------------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        """Whether a plan is followed now."""
        return self.follower is not None and self.follower.known.book is not None

    def victims(self, need_bytes: int) -> list[Eviction] | None:
        """Who leaves by the plan that is followed; None: the policy has to be asked.

        Always so where it decides about some kinds of pages only: LRU has the others.
        """
        follower = self.follower
        if follower is None or follower.known.book is None or self.planner.kinds is not None:
            return None
        return choose_by_plan(self._pager, follower, self.runner, need_bytes)

    def followed(self) -> Follower | None:
        """The follower, for a policy's view. Who asks wants iterations to be followed."""
        self.planner.wants_traces = True
        return self.follower

    # --- leaving a trace, and coming back --------------------------------------------------------

    def take_over(self, follower: Follower, name: str, pages: Sequence[Page]) -> bool:
        """See `follower.Guide`."""
        for known in self._known:
            if known is follower.known or not known.is_confirmed:
                continue
            other = follower.continued_in(known, name, pages)
            if other is not None:
                self.outcomes.counts["taken over"] += 1
                self.follower = other
                self._watch.listen(other.advance)
                if known.book is None:
                    self.runner.stop()
                else:
                    self.runner.renumber(other)
                    other.begin_plan()
                other.accept(pages)
                return True
        return False

    def departs(self, follower: Follower, departure: Departure) -> bool:
        """See `follower.Guide`."""
        if not self._may_record() or not follower.known.is_left_at(departure):
            return False
        self.runner.stop()
        self.follower = None
        self._record_on(follower)
        self._watch.listen(self._record)
        return True

    def lost(self, follower: Follower, was_exact: bool) -> bool:
        """See `follower.Guide`."""
        if follower.num_lost > WINDOW:
            self._leave(follower)
        elif was_exact and self._may_record():
            self._record_on(follower)
        return self.recorder is None

    def found(self, follower: Follower) -> None:
        """See `follower.Guide`."""
        self._stop_recording()

    def _leave(self, follower: Follower) -> None:
        self.outcomes.departed(follower)
        self._report(follower, is_complete=False)
        self.runner.stop()
        self.follower = None
        self._watch.listen(self._record if self.recorder is not None else None)

    # --- the end of an iteration -----------------------------------------------------------------

    def _conclude(self) -> None:
        if self._is_concluded:
            return
        if self.recorder is not None:
            self._pager.flight.await_copies_down()  # they hold what they read, dead or not
        self._pager.drain()  # what has died since the last operation died in this iteration
        self.outcomes.counts["iterations"] += 1
        known, self._next_origins = None, {}
        try:
            known = self._end()
        finally:
            self._origins = self._next_origins
        if self._previous is not None:
            self._previous.followed_by(known)
        self._previous, self._is_concluded = known, True

    def _is_empty(self) -> bool:
        follower, recorder = self.follower, self.recorder
        if follower is not None:
            return not follower.index and not follower.num_lost
        return recorder is not None and not recorder.entries

    def _end(self) -> KnownTrace | None:
        """What the iteration turned out to be; None: nobody knows."""
        follower = self.follower
        self.follower = None
        self._watch.listen(None)
        if follower is None:
            return self._end_recording() if self.recorder is not None else None
        is_over, instead = follower.is_over, None
        if not is_over and follower.is_exact:
            instead = self._known.with_beginning(follower.known, follower.index)
        if instead is None:
            is_over = is_over or follower.is_nearly_over
        if is_over:
            self.outcomes.counts["complete"] += 1
            self._stop_recording()
            self.runner.run(follower.index)
            self.runner.stop(keep_from=follower.index)
            follower.learn()
            follower.known.followed(follower.departure, follower.deviation)
            created_bytes = self.outcomes.created(self._pager.table.created_bytes)
            if follower.is_exact and created_bytes > follower.known.created_bytes * _GROWTH:
                follower.known.is_confirmed = False  # and so recorded again
        else:
            self.outcomes.departed(follower)
            self.runner.stop()
        self._report(follower, is_complete=is_over)
        if not is_over:
            return self._end_elsewhere(follower, instead)
        self._next_origins = follower.origins()
        return follower.known

    def _end_elsewhere(self, follower: Follower, known: KnownTrace | None) -> KnownTrace | None:
        """An iteration that was followed, and not to the end; `known` is exactly what was done."""
        if self.recorder is None and follower.is_exact:
            if known is not None:
                self._next_origins = known.as_own(follower.origins())
                return known
            if self._may_record():
                self._record_on(follower)
        return None if self.recorder is None else self._end_recording()

    def _end_recording(self) -> KnownTrace | None:
        recorder, left_at, shadow = self.recorder, self._left_at, self._shadow
        assert recorder is not None
        self._stop_recording()
        self._pager.sample_overhead()
        recorder.overhead_bytes = self._pager.overhead_bytes
        try:
            if left_at is not None:
                known, pages, index = left_at
                recorder.recall(known.trace, known.operands, pages, index)
            recording = recorder.finish(self.names(), self.facts, self.launch_ns)
        except TraceError:
            self.outcomes.counts["unusable recordings"] += 1
            return None
        self._num_asked = max(0, self._num_asked - 1)
        self.outcomes.counts["recorded"] += 1
        known = self._known.keep(recording)
        if shadow is not None and shadow.is_alike and not known.is_confirmed:
            known.confirm_as_like(shadow.known, recording, shadow.pages)
            self._known.replace(shadow.known, known)
        self.latest = known.trace
        self._next_origins = known.origins_in(recording)
        return known

    def _report(self, follower: Follower, *, is_complete: bool) -> None:
        runner, known = self.runner, follower.known
        self.outcomes.counts["resyncs"] += follower.num_resyncs
        report = self.outcomes.report(follower, runner, self._limits(), is_complete=is_complete)
        runner.late.clear()
        runner.dropped.clear()
        self.planner.feedback(known, report)

    # --- the beginning of an iteration -----------------------------------------------------------

    def _begin(self) -> None:
        if not self._is_wanted():
            self._previous = None  # what comes next will not be known
            return
        known = self._known.expected(self._previous)
        if known is None and self._is_resuming:
            known = self._known.confirmed()  # nobody has looked meanwhile what the program does
        self._is_resuming = False
        may_follow = known is not None and known.is_confirmed and not self._num_asked
        if not may_follow and self._may_record():
            self._start_recording()
            if known is not None:
                self._shadow = Follower(self._pager.table, known, self._origins, None, Onlooker())
            self._watch.listen(self._record)
            return
        if not may_follow:
            known = self._known.confirmed()
        if known is None:
            return
        self._known.touch(known)
        self.planner.plan(known, self._limits())
        self.outcomes.counts["planned"] += known.book is not None
        self.follower = Follower(self._pager.table, known, self._origins, self.runner, self)
        self._watch.listen(self.follower.advance)
        self.follower.begin_plan()

    def _is_wanted(self) -> bool:
        """Whether following or recording can be of any use; see [Note: When what is recorded]."""
        pager = self._pager
        num_evicted, self._num_evicted = self._num_evicted, pager.mover.num_evicted
        if self._num_asked:
            return True
        if not self.planner.wants_traces or not pager.is_bounded:
            return False
        return num_evicted != self._num_evicted or not all(
            page.is_on_device for page in pager.table.pages.values()
        )

    def _may_record(self) -> bool:
        return self._num_asked > 0 or (self._known.may_record and self.planner.wants_traces)

    def _limits(self) -> Limits:
        pager = self._pager
        return self.planner.limits(pager.table, pager.budget_bytes - pager.overhead_bytes)

    # --- recording -------------------------------------------------------------------------------

    def _start_recording(self) -> None:
        self.recorder = Recorder(self._pager.table, self._clock, self._origins)
        self._pager.recorder = self.recorder
        self.on_recording(True)

    def _record_on(self, follower: Follower) -> None:
        """The same, of an iteration that was followed up to here."""
        self._left_at = follower.known, list(follower.pages), follower.index
        self._start_recording()

    def _stop_recording(self) -> None:
        self._left_at = self._shadow = None
        if self.recorder is not None:
            self.recorder = self._pager.recorder = None
            self.on_recording(False)

    def _record(self, name: str, pages: Sequence[Page]) -> bool:
        """Sends each operation on the general path, where it is taken down."""
        if self.recorder is None or self.recorder.is_full:
            self._stop_recording()
            self._watch.listen(None)
            return True
        if self._shadow is not None:
            self._shadow.advance(name, pages)
        return False
