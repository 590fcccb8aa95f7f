"""Random demand histories: what a policy is told of its tier, and when it is asked for victims.

[Note: Histories]
    Steps name resident pages by their place in the order of arrival, counted round, because which
    pages are resident depends on the policy. What a failing history came to is written down call by
    call. Pages of kinds that are not the policy's are not mentioned to it.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hypothesis import strategies as st

from tvm_pager.memory import PageKind, Tier
from tvm_pager.planning import Eviction, Lineage, PageView
from tvm_pager.testing.strategies import page_bytes
from tvm_pager.transfer.protocol import Lane

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from tvm_pager.planning import Policy

__all__ = ["Access", "Ask", "DemandRun", "History", "Insert", "PolicyFaultError", "Remove"]
__all__ += ["histories"]

_NUM_SHOWN = 60  # calls


class PolicyFaultError(AssertionError):
    """A policy broke its contract."""


class Insert(NamedTuple):
    """A page arrives."""

    nbytes: int
    kind: PageKind
    is_clean: bool


class Access(NamedTuple):
    """A resident page is used."""

    place: int


class Remove(NamedTuple):
    """A resident page dies."""

    place: int


class Ask(NamedTuple):
    """The policy is asked for victims, of which the first `num_leaving` leave."""

    need_bytes: int
    held: frozenset[int] = frozenset()  # places of pages that cannot leave
    num_leaving: int = 10


Step: TypeAlias = Insert | Access | Remove | Ask


class History(NamedTuple):
    """What happens to one tier."""

    tier: Tier
    foresees: bool  # whether the view knows what only a trace tells
    steps: tuple[Step, ...]


def histories(max_steps: int = 30) -> SearchStrategy[History]:
    """Histories; see [Note: Histories]."""
    places = st.integers(0, 9)
    inserts = st.builds(
        Insert, page_bytes(), st.sampled_from([PageKind.OTHER, *PageKind]), st.booleans()
    )
    asks = st.builds(
        Ask,
        st.integers(1, 8).map(lambda num_frames: num_frames * 512),
        st.frozensets(places, max_size=3),
        st.integers(0, 10),
    )
    accesses = places.map(Access)
    # What comes first counts as the simplest: a question changes nothing, and can then be left out.
    step = asks | accesses | places.map(Remove) | accesses | inserts | inserts
    steps = st.lists(step, max_size=max_steps).map(tuple)
    return st.builds(History, st.sampled_from([Tier.DEVICE, Tier.HOST]), st.booleans(), steps)


class _Page(NamedTuple):
    nbytes: int
    kind: PageKind
    is_clean: bool
    last_use: int

    @property
    def frame_bytes(self) -> int:
        return -(-self.nbytes // 512) * 512


class _Seen:
    """What one call's view shows; void afterwards.

    What a trace would tell is whatever, but the same every time.
    """

    def __init__(self, run: DemandRun, held: set[int]) -> None:
        self.operation_index = run.now
        self._run: DemandRun | None = run
        self._held = held

    @property
    def _valid(self) -> DemandRun:
        if self._run is None:
            raise PolicyFaultError("a View was used after the call that it was passed to")
        return self._run

    def page(self, page_id: int) -> PageView:
        run = self._valid
        page = run.pages[page_id]
        pins = int(page_id in self._held)
        return PageView(
            page_id, page.kind, page.nbytes, run.tier, page.is_clean, pins, page.last_use
        )

    def evictable(self, page_id: int) -> bool:
        page = self._valid.pages.get(page_id)
        return page is not None and page.nbytes > 0 and page_id not in self._held

    def frame_bytes(self, page_id: int) -> int:
        return self._valid.pages[page_id].frame_bytes

    def next_use(self, page_id: int) -> float | None:
        run = self._valid
        if not run.foresees:
            return None
        distance = (page_id * 7 + run.now) % 11
        return math.inf if distance == 10 else float(distance)

    def lineage(self, page_id: int) -> Lineage | None:
        run = self._valid
        if not run.foresees or page_id % 4 == 3:
            return None
        before = [other for other in (page_id - 1, page_id - 2) if other >= 0]
        inputs = tuple(other if other in run.pages else None for other in before)
        is_recomputable = None not in inputs and page_id % 5 != 4
        return Lineage("test::make", page_id, page_id * 13 % 7 * 1000, inputs, is_recomputable)

    def seconds_since_use(self, page_id: int) -> float | None:
        run = self._valid
        page = run.pages.get(page_id)
        return None if page is None or not run.foresees else (run.now - page.last_use) * 1e-6

    def module(self, page_id: int) -> str:
        return f"layers.{page_id % 3}" if self._valid.foresees and page_id % 4 else ""

    def layer(self, page_id: int) -> int | None:
        return page_id % 3 if self._valid.foresees and page_id % 4 else None

    def backlog_bytes(self, lane: str) -> int:
        return (self._valid.now * 7 + len(Lane(lane).name)) % 5 * 4096

    def end(self) -> None:
        self._run = None


class DemandRun:
    """One policy in one history.

    Args:
        policy: fresh.
        history: what it is told.
        asks_in_vain: whether it is also asked for more than can leave.

    Attributes:
        decisions: what was asked and answered, where that was possible.
    """

    def __init__(self, policy: Policy, history: History, *, asks_in_vain: bool = True) -> None:
        self.tier, self.foresees, self._steps = history
        self.now = 0
        self.pages: dict[int, _Page] = {}  # by id; the policy knows exactly these
        self.decisions: list[tuple[int, list[Eviction]]] = []
        self._policy = policy
        self._name = policy.name or type(policy).__name__
        self._asks_in_vain = asks_in_vain
        self._num_ids = 0
        self._calls: list[str] = []

    def run(self) -> None:
        """Goes through the history.

        Raises:
            PolicyFaultError: the policy raised, or decided something illegal; with all calls.
        """
        kinds = self._policy.kinds
        for step in self._steps:
            if isinstance(step, Insert):
                if kinds is None or step.kind in kinds:
                    self._insert(step)
            elif isinstance(step, Ask):
                self._ask(step)
            elif self.pages:
                self.now += 1
                page_id = self._at(step.place)
                if isinstance(step, Access):
                    self.pages[page_id] = self.pages[page_id]._replace(last_use=self.now)
                    self._tell("on_access", page_id)
                else:
                    self._remove(page_id)

    def _at(self, place: int) -> int:
        return list(self.pages)[place % len(self.pages)]

    def _insert(self, step: Insert) -> None:
        self.now += 1
        page_id, self._num_ids = self._num_ids, self._num_ids + 1
        self.pages[page_id] = _Page(*step, self.now)
        self._tell("on_insert", page_id)

    def _remove(self, page_id: int) -> None:
        # The real pager's page is gone from the tier, and may be dead, when the policy is told.
        del self.pages[page_id]
        self._tell("on_remove", page_id)

    def _tell(self, hook: str, page_id: int) -> None:
        comment = ""
        if hook == "on_insert":
            page = self.pages[page_id]
            comment = f"  # {page.nbytes} B, {page.kind.name}{', clean' if page.is_clean else ''}"
        self._calls.append(f"{hook}({page_id}){comment}")
        try:
            getattr(self._policy, hook)(page_id)
        except Exception as error:
            raise self._fault(f"{hook} raised {error!r}") from error

    # --- decisions -------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        held = {self._at(place) for place in ask.held} if self.pages else set()
        view = _Seen(self, held)
        movable = sum(self.pages[i].frame_bytes for i in self.pages if view.evictable(i))
        if movable < ask.need_bytes and not self._asks_in_vain:
            return
        cannot = f", pages {sorted(held)} cannot leave" if held else ""
        self._calls.append(
            f"choose_victims(Tier.{self.tier.name}, {ask.need_bytes}, view)"
            f"  # {movable} B can leave{cannot}"
        )
        victims = self._answer(ask.need_bytes, view)
        self._calls[-1] += f" -> {_short(victims)}"
        if victims is None and movable >= ask.need_bytes:
            raise self._fault(
                f"choose_victims gave None where {ask.need_bytes} B were asked and {movable} B "
                "can leave"
            )
        chosen = [] if victims is None else self._legal(victims, ask.need_bytes, view)
        view.end()
        if victims is not None:
            self.decisions.append((ask.need_bytes, list(chosen)))
        for victim in chosen[: ask.num_leaving]:
            self._remove(victim.page_id)

    def _answer(self, need_bytes: int, view: _Seen) -> Any:
        try:
            return self._policy.choose_victims(self.tier, need_bytes, view)
        except Exception as error:
            raise self._fault(f"choose_victims raised {error!r}") from error

    def _legal(self, victims: Any, need_bytes: int, view: _Seen) -> list[Eviction]:
        if not isinstance(victims, list) or not all(isinstance(v, Eviction) for v in victims):
            raise self._fault(f"choose_victims gave {victims!r}, not a list of Eviction, or None")
        freed, seen = 0, set()
        for page_id, to in victims:
            if page_id not in self.pages:
                raise self._fault(f"choose_victims named page {page_id}, which is not in the tier")
            if page_id in seen:
                raise self._fault(f"choose_victims named page {page_id} twice")
            if not view.evictable(page_id):
                raise self._fault(f"choose_victims named page {page_id}, which is not evictable")
            if to is not None and not (isinstance(to, Tier) and to > self.tier):
                raise self._fault(
                    f"choose_victims sent page {page_id} to {to!r}, which is not a tier below "
                    f"{self.tier.name}"
                )
            seen.add(page_id)
            freed += view.frame_bytes(page_id)
        if freed < need_bytes:
            raise self._fault(
                f"choose_victims frees {freed} B where {need_bytes} B were asked; None says that "
                "there is not enough"
            )
        return victims

    def kept_view(self) -> bool:
        """Whether the policy still holds the view of a call; asks once more, for one frame."""
        view = _Seen(self, set())
        reference = weakref.ref(view)
        self._answer(512, view)
        view.end()
        del view
        if reference() is not None:
            gc.collect()  # a cycle of the call's own is no harm
        return reference() is not None

    def calls(self) -> str:
        """What the policy was told and asked, a call to a line."""
        left_out = len(self._calls) - _NUM_SHOWN
        lines = self._calls[-_NUM_SHOWN:]
        if left_out > 0:
            lines.insert(0, f"... {left_out} calls before ...")
        return "\n".join(f"    policy.{line}" for line in lines)

    def _fault(self, what: str) -> PolicyFaultError:
        return PolicyFaultError(f"policy {self._name}: {what}\n{self.calls()}")


def _short(victims: object) -> str:
    if isinstance(victims, list) and all(isinstance(v, Eviction) for v in victims):
        return str([v.page_id if v.to is None else (v.page_id, v.to.name) for v in victims])
    return repr(victims)[:200]
