"""Whether a plan can be carried out as it stands. Pure.

A plan that cannot is no danger (plan.py, Note "Advice"), but something is wrong with its policy.

[Note: What is checked]
    Actions name pages that are alive then; what leaves is on the device and not in use until it is
    gone; what comes is not there; operands are there; no operation takes more than the budget,
    counting a page from its fetch to its eviction's deadline; what has to lie below fits there; the
    iteration ends as it begins.

    Two iterations are walked through, so that each page's tier below is known at the beginning of
    the second one. Copies of pages that are on the device do not count: they may be given up.

    A plan may move the pages of an operation that runs on the host, and those that it drops, for a
    pager that does neither. Such fetches are left out, and such evictions find nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.memory import Tier
from tvm_pager.planning.cost.model_pages import first_tiers
from tvm_pager.planning.plan import Clean, CreateIn, Drop, Evict, Fetch, Keep, RunOnHost

if TYPE_CHECKING:
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.plan import Action, MovementPlan
    from tvm_pager.planning.traces.trace import Trace

__all__ = ["check"]


def check(plan: MovementPlan, trace: Trace, limits: Limits) -> list[str]:
    """Finds what is wrong with a plan; see [Note: What is checked].

    Returns:
        One sentence for each problem, in the order of the moments; empty if there is none.
    """
    problems = _misplaced(plan, trace)
    if problems:
        return problems
    walk = _Walk(plan, trace, limits)
    if walk.iterate():
        walk.problems.clear()
        walk.iterate()
    return walk.problems


def _misplaced(plan: MovementPlan, trace: Trace) -> list[str]:
    """Pages and moments that the trace does not have."""
    num_ops, num_pages = len(trace.ops), len(trace.pages)
    problems = [
        f"page {number} is absent at the beginning, when it is not alive"
        for number in sorted(plan.absent)
        if not 0 <= number < num_pages or trace.pages[number].born is not None
    ]
    for action in plan.actions:
        if not 0 <= action.earliest <= action.deadline <= num_ops:
            problems.append(f"{action} lies outside of the moments 0 to {num_ops}")
        elif isinstance(action, RunOnHost):
            if not 0 <= action.op < num_ops:
                problems.append(f"{action} names one of {num_ops} operations")
        elif not 0 <= action.page < num_pages:
            problems.append(f"{action} names one of {num_pages} pages")
        elif not isinstance(action, (CreateIn, Keep)) and not _is_alive(trace, action):
            problems.append(f"{action} names a page that is not alive at {action.earliest}")
    return problems


def _is_alive(trace: Trace, action: Clean | Evict | Fetch | Drop) -> bool:
    page = trace.pages[action.page]
    is_born = page.born is None or page.born < action.earliest
    return is_born and (page.died is None or page.died > action.earliest)


class _Walk:
    def __init__(self, plan: MovementPlan, trace: Trace, limits: Limits) -> None:
        self.problems: list[str] = []
        self._plan, self._trace, self._limits = plan, trace, limits
        self._num_ops = len(trace.ops)
        self._bytes = [page.frame_bytes for page in trace.pages]
        self._actions: list[list[Action]] = [[] for _ in range(self._num_ops + 1)]
        for action in sorted(plan.actions, key=lambda action: action.priority):
            self._actions[action.earliest].append(action)
        self._on_host = {a.op for a in plan.actions if isinstance(a, RunOnHost)}
        self._elsewhere = {a.page: a.tier for a in plan.actions if isinstance(a, CreateIn)}
        self._deaths: list[list[int]] = [[] for _ in range(self._num_ops + 1)]
        for number, page in enumerate(trace.pages):
            if page.died is not None:
                self._deaths[page.died].append(number)
        self._here: set[int] = set()
        self._away: dict[int, Tier] = {}  # DEVICE: it is computed again and takes nothing below
        self._copies: dict[int, Tier] = {}  # current below, of pages that are here
        self._leaving: dict[int, int] = {}  # deadlines
        self._excused: set[int] = set()  # what only pagers move that do all on the device
        self._taken = dict.fromkeys(Tier, 0)
        self._begin(first_tiers(plan, trace), {})

    def _begin(self, away: dict[int, Tier], copies: dict[int, Tier]) -> None:
        outside = {n for n, page in enumerate(self._trace.pages) if page.born is None}
        self._here = outside - set(away)
        self._excused.clear()
        self._away, self._copies = away, copies
        self._taken = dict.fromkeys(Tier, 0)
        self._taken[Tier.DEVICE] = sum(self._bytes[number] for number in self._here)
        for number, tier in away.items():
            if tier is not Tier.DEVICE:
                self._taken[tier] += self._bytes[number]

    def iterate(self) -> bool:
        """Walks through one iteration, and begins the next; whether it ends as it began."""
        for op in range(self._num_ops):
            self._move(op)
            self._run(op)
        self._move(self._num_ops)
        becomes = [page.becomes for page in self._trace.pages]
        away, copies = (
            {then: tier for n, tier in books.items() if (then := becomes[n]) is not None}
            for books in (self._away, self._copies)
        )
        different = sorted(set(away) ^ self._plan.absent)
        for page in different:
            end, begin = ("absent", "there") if page in away else ("there", "absent")
            self._note(self._num_ops, f"page {page} is {end} at the end and {begin} at the start")
        self._begin(away, copies)
        return not different

    def _note(self, moment: int, problem: str) -> None:
        self.problems.append(f"moment {moment}: {problem}")

    # --- moments ---------------------------------------------------------------------------------

    def _move(self, moment: int) -> None:
        for number in self._deaths[moment]:
            self._forget(number)
        if self._leaving:
            for number in [n for n, deadline in self._leaving.items() if deadline <= moment]:
                self._leave(number)
        for action in self._actions[moment]:
            if isinstance(action, Fetch):
                self._fetch(action)
            elif isinstance(action, (Clean, Evict, Drop)):
                self._act(action)

    def _act(self, action: Clean | Evict | Drop) -> None:
        page, moment = action.page, action.earliest
        if page in self._excused and not isinstance(action, Drop):
            return
        if page not in self._here or page in self._leaving:
            is_kept_away = moment == action.deadline == 0 and page in self._plan.absent
            if not (isinstance(action, Evict) and is_kept_away):
                self._note(moment, f"{action}, but the page is not on the device")
            return
        if isinstance(action, Drop):
            born = self._trace.pages[page].born
            if born is None or not self._trace.ops[born].is_replayable:
                self._note(moment, f"{action}, but nothing can make the page again")
            self._here.remove(page)
            self._taken[Tier.DEVICE] -= self._bytes[page]
            self._away[page] = Tier.DEVICE
            self._excused.add(page)
            return
        tier = self._copies.setdefault(page, Tier.HOST if action.to is None else action.to)
        if isinstance(action, Evict):
            self._leaving[page] = action.deadline
            self._taken[tier] += self._bytes[page]
            self._check_below(tier, moment)
            if action.deadline <= moment:
                self._leave(page)

    def _fetch(self, action: Fetch) -> None:
        page = action.page
        if action.deadline in self._on_host:
            self._excused.add(page)
            return
        self._excused.discard(page)
        if page not in self._away:
            self._note(action.earliest, f"{action}, but the page is there")
        elif action.to is Tier.DEVICE:
            tier = self._away.pop(page)
            if tier is not Tier.DEVICE:
                self._copies[page] = tier
                self._taken[tier] -= self._bytes[page]
            self._here.add(page)
            self._taken[Tier.DEVICE] += self._bytes[page]

    def _leave(self, page: int) -> None:
        del self._leaving[page]
        self._here.remove(page)
        self._taken[Tier.DEVICE] -= self._bytes[page]
        self._away[page] = self._copies.pop(page)

    def _forget(self, page: int) -> None:
        if page in self._here:
            self._here.remove(page)
            self._taken[Tier.DEVICE] -= self._bytes[page]
        is_below = self._leaving.pop(page, None) is not None
        copy = self._copies.pop(page, None)
        self._excused.discard(page)
        tier = self._away.pop(page, copy if is_below else None)
        if tier is not None and tier is not Tier.DEVICE:
            self._taken[tier] -= self._bytes[page]

    def _put_away(self, page: int, tier: Tier, moment: int) -> None:
        self._forget(page)
        self._excused.add(page)
        self._away[page] = tier
        self._taken[tier] += self._bytes[page]
        self._check_below(tier, moment)

    def _check_below(self, tier: Tier, moment: int) -> None:
        limits = {Tier.HOST: self._limits.host_bytes, Tier.NVME: self._limits.nvme_bytes}
        if self._taken[tier] > limits[tier]:
            self._note(
                moment, f"{self._taken[tier]} B have to lie in {tier.name}, of {limits[tier]} B"
            )

    # --- operations ------------------------------------------------------------------------------

    def _run(self, index: int) -> None:
        op = self._trace.ops[index]
        is_on_host = index in self._on_host
        for number in op.reads:
            if number in self._leaving:
                self._note(index, f"{op.name} uses page {number}, which is leaving")
            elif number in self._away and not is_on_host:
                self._note(index, f"{op.name} uses page {number}, which is absent")
        if is_on_host:
            for number in (*op.writes, *op.creates):
                self._put_away(number, self._elsewhere.get(number, Tier.HOST), index)
            return
        born = sum(self._bytes[number] for number in op.creates)
        total = self._taken[Tier.DEVICE] + born + op.workspace_bytes
        if total > self._limits.device_bytes:
            self._note(index, f"{op.name} takes {total} B of {self._limits.device_bytes} B")
        for number in op.writes:
            self._copies.pop(number, None)
        for number in op.creates:
            if number in self._elsewhere:
                self._put_away(number, self._elsewhere[number], index)
            else:
                self._here.add(number)
                self._taken[Tier.DEVICE] += self._bytes[number]
