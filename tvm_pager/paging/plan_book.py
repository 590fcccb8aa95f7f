"""A movement plan, checked against its trace and sorted by moments.

[Note: The occupancy to expect]
    If every eviction is over at its deadline and every fetch begins at its own, the pages on the
    device take `base_bytes[i]` right before operation i, and `busy` says what they take then with
    what it needs, creates and works in. The present occupancy less `base_bytes` says how far the
    run is from the plan; what later operations will need is told from `busy` and that difference.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any

from tvm_pager.memory import Tier
from tvm_pager.planning.plan import Clean, CreateIn, Drop, Evict, Fetch, Keep, RunOnHost
from tvm_pager.planning.traces.occupancy import Occupancy

if TYPE_CHECKING:
    from tvm_pager.paging.known_trace import KnownTrace
    from tvm_pager.planning import MovementPlan, Trace

__all__ = ["PlanBook"]

_TARGETS: dict[type, tuple[Tier | None, ...]] = {
    Evict: (None, Tier.HOST, Tier.NVME),
    Clean: (None, Tier.HOST, Tier.NVME),
    Fetch: (Tier.DEVICE, Tier.HOST),
}
_NOT_EXECUTED = (Drop, RunOnHost, CreateIn)


class PlanBook:
    """What is to be done at each moment; see [Note: The occupancy to expect].

    Args:
        known: the trace that the plan is for.
        plan: may hold anything: what makes no sense is left out and counted.

    Attributes:
        at: by moment, what may begin there, in order.
        keeps: by page, the moments between which it is kept.
        evictions: by page, in order.
        num_illegal: actions that name no page, moment or tier of the trace.
        first_illegal: one of them, for people; "" if there is none.
        num_ignored: actions that nobody executes yet, by their class's name.
        has_moves: whether anything moves by this plan.
    """

    def __init__(self, known: KnownTrace, plan: MovementPlan) -> None:
        trace = known.trace
        self._num_ops, self._num_pages = len(trace.ops), len(trace.pages)
        self.at: list[list[Evict | Fetch | Clean] | None] = [None] * (self._num_ops + 1)
        self.keeps: dict[int, list[tuple[int, int]]] = {}
        self.evictions: dict[int, list[Evict]] = {}
        self.num_illegal, self.first_illegal = 0, ""
        self.num_ignored: Counter[str] = Counter()
        self._fetches: dict[int, list[Fetch]] = {}
        self._absent = {
            number
            for number in plan.absent
            if _is_int(number, self._num_pages - 1) and trace.pages[number].born is None
        }
        for action in sorted((a for a in plan.actions if self._is_known(a)), key=_order):
            self._enter(action)
        self.has_moves = bool(self.evictions or self._fetches or any(self.at))
        self._changes: dict[int, tuple[list[int], list[bool]]] = {}
        self.base_bytes = [0] * (self._num_ops + 1)
        self.busy = Occupancy.of(self._expect(known))

    def is_present(self, number: int, moment: int) -> bool:
        """Whether the page should be on the device right before the operation."""
        changes = self._changes.get(number)
        if changes is not None:
            at = bisect_right(changes[0], moment)
            if at:
                return changes[1][at - 1]
        return number not in self._absent

    def open_at(self, moment: int) -> list[Evict | Fetch | Clean]:
        """What might have begun before the moment and is not due yet. O(actions before it)."""
        return [
            action
            for actions in self.at[:moment]
            for action in actions or ()
            if action.deadline > moment
        ]

    def is_kept(self, number: int, moment: int) -> bool:
        """Whether the page should stay while anything else can go."""
        return any(begin <= moment < end for begin, end in self.keeps.get(number, ()))

    def next_eviction(self, number: int, moment: int) -> int | None:
        """When the plan lets the page go, now or later; None: not again."""
        for eviction in self.evictions.get(number, ()):
            if eviction.deadline >= moment:
                return eviction.earliest
        return None

    # --- checking --------------------------------------------------------------------------------

    def _is_known(self, action: Any) -> bool:
        """Whether it is one of the actions, with moments and pages of this trace."""
        kind = type(action)
        is_legal = False
        if kind in (Clean, Evict, Fetch, Keep, *_NOT_EXECUTED):
            subject = action.op if kind is RunOnHost else action.page
            last = self._num_ops - 1 if kind is RunOnHost else self._num_pages - 1
            is_legal = (
                _is_int(subject, last)
                and _is_int(action.deadline, self._num_ops)
                and _is_int(action.earliest, action.deadline)
                and isinstance(action.priority, int)
                and (kind not in _TARGETS or action.to in _TARGETS[kind])
            )
        if is_legal and kind in _NOT_EXECUTED:
            self.num_ignored[kind.__name__] += 1
            return False
        if not is_legal:
            self.num_illegal += 1
            self.first_illegal = self.first_illegal or repr(action)[:200]
        return is_legal

    def _enter(self, action: Any) -> None:
        if isinstance(action, Keep):
            self.keeps.setdefault(action.page, []).append((action.earliest, action.deadline))
            return
        actions = self.at[action.earliest]
        if actions is None:
            actions = self.at[action.earliest] = []
        actions.append(action)
        if isinstance(action, Evict):
            self.evictions.setdefault(action.page, []).append(action)
        elif isinstance(action, Fetch) and action.to is Tier.DEVICE:
            self._fetches.setdefault(action.page, []).append(action)

    # --- what to expect --------------------------------------------------------------------------

    def _expect(self, known: KnownTrace) -> list[int]:
        """Sets `base_bytes`, and gives what is busy."""
        trace = known.trace
        before = [0] * (self._num_ops + 2)  # changes right before an operation
        needed = [0] * (self._num_ops + 2)  # of them, what comes for the operation itself
        for number, page in enumerate(trace.pages):
            if number in self.evictions or number in self._fetches or number in self._absent:
                self._follow(known, number, before, needed)
                continue
            born = 0 if page.born is None else page.born + 1
            before[born] += page.frame_bytes
            if page.died is not None:
                before[page.died] -= page.frame_bytes
        base = itertools.accumulate(before[: self._num_ops + 1])
        busy_bytes = []
        for moment, present in enumerate(base):
            self.base_bytes[moment] = present - needed[moment]
            busy_bytes.append(present + _created_bytes(trace, moment))
        return busy_bytes

    def _follow(self, known: KnownTrace, number: int, before: list[int], needed: list[int]) -> None:
        """Enters one page that moves: where it is expected from which moment on."""
        page = known.trace.pages[number]
        end = self._num_ops if page.died is None else page.died
        begin = 0 if page.born is None else page.born + 1
        events = [(e.deadline, 0) for e in self.evictions.get(number, ())]
        events += [(f.deadline, 1) for f in self._fetches.get(number, ())]
        events += [(use, 2) for use in known.uses[number]]
        is_here = number not in self._absent
        moments, states = [begin], [is_here]
        if is_here:
            before[begin] += page.frame_bytes
        for moment, kind in sorted(events):
            if not begin <= moment < end or is_here == (kind > 0):
                continue
            is_here = kind > 0
            change = page.frame_bytes if is_here else -page.frame_bytes
            before[moment] += change
            if is_here:
                needed[moment] += change
            moments.append(moment)
            states.append(is_here)
        if page.died is not None and is_here:
            before[end] -= page.frame_bytes
        self._changes[number] = moments, states


def _created_bytes(trace: Trace, index: int) -> int:
    if index == len(trace.ops):
        return 0
    op = trace.ops[index]
    return op.workspace_bytes + sum(trace.pages[number].frame_bytes for number in op.creates)


def _order(action: Any) -> int:
    return int(action.priority)  # the sort is stable


def _is_int(value: object, last: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= last
