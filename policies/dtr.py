"""DTR: when memory runs out, give up what is cheap to compute again, large and long unused.

Source: Dynamic Tensor Rematerialization (ICLR 2021), section 4.1. Before an operation its absent
operands are computed again, and theirs before them; then the page with the smallest

    h(t) = c(t) / (m(t) s(t))        compute time / (bytes x time since its last use)

goes, again and again, until the operation fits.

Simplified: c is the cost of the page's own chain of operations from what is alive ("h local"); the
costs of neighbours that are gone too are not added. Pages are compared by m/c in steps of a fifth.
The recorded iteration says which pages are used again and that a page that will be given up can go
right after its last use. Where DTR is asked on demand, c is the cost of the one operation that made
the page; what that cannot make again, because an operand is gone or was written, goes last. Among
these, and where no trace is followed, h = 1 / (m s), with s in operations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm_pager.planning import Eviction, MovementPlan, PageKind, Policy, Tier, View
from tvm_pager.planning.hardware.lane_times import Clock
from tvm_pager.planning.rules.absences import Absence, Pressure, absences, reachable_bytes
from tvm_pager.planning.rules.placement import place
from tvm_pager.planning.rules.replays import Replays
from tvm_pager.planning.traces.trace_index import TraceIndex

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Limits, Trace

__all__ = ["DTR"]

_STEPS = 1 / math.log(1.2)


class DTR(Policy):
    """Recomputes activations and temporaries; LRU decides about everything else."""

    name = "dtr"
    kinds = frozenset({PageKind.ACTIVATION, PageKind.TEMPORARY})

    def __init__(self) -> None:
        self._residents: dict[int, None] = {}  # in the order of insertion

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        index = TraceIndex(trace)
        taken = _Run(index, limits).taken
        return place(index, hardware, limits, taken).plan()

    def on_insert(self, page_id: int) -> None:
        self._residents[page_id] = None

    def on_remove(self, page_id: int) -> None:
        del self._residents[page_id]

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        movable = [page_id for page_id in self._residents if view.evictable(page_id)]
        victims, freed = [], 0
        for page_id in sorted(movable, key=lambda page_id: _inverse_h(page_id, view), reverse=True):
            if freed >= need_bytes:
                break
            victims.append(Eviction(page_id))
            freed += view.frame_bytes(page_id)
        return victims if freed >= need_bytes else None


def _inverse_h(page_id: int, view: View) -> tuple[bool, float]:
    """Sorts before pages that are given up rather."""
    nbytes = view.frame_bytes(page_id)
    lineage, stale_s = view.lineage(page_id), view.seconds_since_use(page_id)
    if lineage is not None and lineage.is_recomputable and stale_s is not None:
        return True, nbytes * (stale_s * 1e9 + 1) / max(1, lineage.compute_ns)
    return False, nbytes * (max(0, view.operation_index - view.page(page_id).last_use) + 1)


class _Run:
    """The iteration under DTR: what is given up between which uses."""

    def __init__(self, index: TraceIndex, limits: Limits) -> None:
        self.taken: list[Absence] = []
        self._index = index
        self._clock = Clock.undisturbed(index.trace)
        self._replays = Replays(index.trace)
        self._found = self._candidates()
        # What cannot be reached by giving up pages is left to others, and not striven for.
        reachable = reachable_bytes(index, self._found.values())
        self._pressure = Pressure(index, max(limits.device_bytes, reachable))
        self._lost: dict[int, Absence] = {}
        # By step of m/c: pages that may go, the one that was used longest ago first.
        self._queues: dict[int, dict[int, Absence]] = {}
        self._step_of: dict[int, int] = {}
        for op in range(index.num_ops):
            self._run(op)

    def _candidates(self) -> dict[tuple[int, int], Absence]:
        """(page, use) -> absence after that use, with what computing it again costs."""
        found = {}
        for absence in absences(self._index, DTR.kinds):
            replay = self._replays.of(absence.page, absence.until)
            if replay is not None and absence.until < self._index.num_ops:
                found[absence.page, absence.after] = absence._replace(replay_ns=replay.compute_ns)
        return found

    def _run(self, op: int) -> None:
        entry = self._index.trace.ops[op]
        for page in entry.reads:
            self._restore(page, op)
            self._forget(page)
        while self._pressure.at(op) > self._pressure.budget_bytes:
            if not self._give_up_one(op):
                break
        for page in (*entry.reads, *entry.creates):
            absence = self._found.get((page, op))
            if absence is not None:
                step = self._step_of[page] = self._step(absence)
                self._queues.setdefault(step, {})[page] = absence

    def _restore(self, page: int, op: int) -> None:
        """Computes a page that was given up; what its chain needs and is gone too, on the way."""
        absence = self._lost.pop(page, None)
        if absence is not None:
            replay = self._replays.of(page, op, self._lost) or self._replays.of(page, op)
            if replay is not None:
                absence = absence._replace(replay_ns=replay.compute_ns)
            self.taken.append(absence)

    def _forget(self, page: int) -> None:
        """The page is in use."""
        step = self._step_of.pop(page, None)
        if step is not None:
            self._queues[step].pop(page, None)

    def _step(self, absence: Absence) -> int:
        cost = max(1, absence.replay_ns or 0)
        return round(math.log(int(self._index.frame_bytes[absence.page]) / cost) * _STEPS)

    def _give_up_one(self, op: int) -> bool:
        """Gives up the page with the smallest h; False if there is none."""
        now = self._clock.at(op)
        best: tuple[float, int] | None = None
        for step, queue in self._queues.items():
            if queue:
                absence = next(iter(queue.values()))
                stale_ns = now - self._clock.at(absence.after + 1) + 1
                inverse_h = step / _STEPS + math.log(stale_ns)
                if best is None or (inverse_h, step) > best:
                    best = inverse_h, step
        if best is None:
            return False
        page, absence = next(iter(self._queues[best[1]].items()))
        self._forget(page)
        self._lost[page] = absence
        self._pressure.take(absence)
        return True
