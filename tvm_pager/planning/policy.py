"""The policy API: what a researcher writes.

A policy is a deterministic object. It keeps no tensors and no reference to a `View`, reads no
clock, does no I/O and imports neither torch nor the pager; randomness comes from a seed of its own.
One instance serves one tier.

It decides on demand (`choose_victims`), by plan (`plan`, `feedback`), or both: where a plan is
followed, victims are chosen for what the plan did not foresee. A method that a policy does not
override is left to the pager, which takes LRU for victims and demand for movement.

[Note: Insert, access, remove]
    Between two decisions the pager batches what happened and replays it in order: `on_insert` once
    when a page becomes resident in the policy's tier, `on_access` for each later use, `on_remove`
    when it leaves, by eviction or because its last tensor died. Pages that are born and die between
    two decisions may never be mentioned. So a policy knows exactly the resident pages whenever
    `choose_victims` is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from tvm_pager.memory import PageKind, Tier
    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.plan import MovementPlan
    from tvm_pager.planning.traces.trace import Trace

__all__ = ["Eviction", "IterationReport", "Lineage", "PageView", "Policy", "View"]


class Eviction(NamedTuple):
    """Move a page off the policy's tier. `to` None lets the pager take the next tier with room."""

    page_id: int
    to: Tier | None = None


class PageView(NamedTuple):
    """What a policy may know of a page."""

    page_id: int
    kind: PageKind  # activations and temporaries are told by a trace that is followed, else OTHER
    nbytes: int
    residency: Tier  # the highest tier that holds all its current bytes
    is_clean: bool  # a tier below the device holds the current bytes too: eviction moves nothing
    pins: int
    last_use: int  # index of the last operation that used it; compare `View.operation_index`


class Lineage(NamedTuple):
    """Where a page comes from, by the trace that is followed.

    Attributes:
        name: of the operation that created the page, as torch calls it.
        op: index of that operation in the trace.
        compute_ns: its device time.
        inputs: ids of its operands' pages, each once; None stands for one that is gone.
        is_recomputable: whether that operation alone, run again now, would give the page's bytes:
            it is replayable, all inputs are alive, and by the trace nothing has written them since,
            and nothing ever writes the page.
    """

    name: str
    op: int
    compute_ns: int
    inputs: tuple[int | None, ...]
    is_recomputable: bool


class View(Protocol):
    """Read-only, and valid only during the call it is passed to.

    [Note: What only a trace tells]
        Iterations are recorded and followed for a policy that plans, and for one that has asked
        `next_use`, `lineage`, `seconds_since_use`, `module` or `layer` once, or decides about some
        kinds of pages only. Until they are, and for pages that the trace does not know, nobody
        knows: None or "". Each answer is computed when it is asked for, in O(1) or O(operands);
        the first one of a trace takes a pass over it.
    """

    @property
    def operation_index(self) -> int:
        """How many operations have begun to run."""

    def page(self, page_id: int) -> PageView:
        """Raises KeyError for an id that is not a live page."""

    def evictable(self, page_id: int) -> bool:
        """Whether the page could leave the tier now: neither pinned, nor in use, nor in flight."""

    def frame_bytes(self, page_id: int) -> int:
        """Bytes that its eviction would free in the tier of the call. O(1)."""

    def next_use(self, page_id: int) -> float | None:
        """How many operations from now the page is used again, by the trace that is followed.

        `math.inf`: never, it dies first. None: nobody knows.
        """

    def lineage(self, page_id: int) -> Lineage | None:
        """What made the page. None: the present iteration did not, or nobody knows."""

    def seconds_since_use(self, page_id: int) -> float | None:
        """Device time of the operations of the trace between the page's last use and the present.

        If it was not used in this iteration, the one before is taken to have been alike. None:
        nobody knows.
        """

    def module(self, page_id: int) -> str:
        """Dotted path of the module that made the page, or uses it first; "": unknown."""

    def layer(self, page_id: int) -> int | None:
        """The layer that the page's operation belongs to, as `module`; see `traces.layers`.

        Numbers are in the order of first use. None: unknown, or the trace shows no layers.
        """

    def backlog_bytes(self, lane: str) -> int:
        """Bytes of the transfers that are queued or under way on a lane.

        A transfer counts whole until it is done. Needs no trace and never blocks. O(transfers in
        flight).

        Args:
            lane: "d2h", "h2d", "d2n", "n2d", "h2n" or "n2h", for device, host and NVMe; "r2d" for
                what is computed again.

        Raises:
            ValueError: there is no such lane.
        """


@dataclass(frozen=True, slots=True)
class IterationReport:
    """What became of a plan in one iteration.

    Attributes:
        trace: what the plan was made for.
        limits: what holds now.
        is_complete: whether the program did what the trace says, to the end.
        step_ns: from one boundary to the next, on the host's clock.
        stall_ns: of it, time in which operations waited for bytes or room.
        num_faults: operands that were absent when their operation came.
        late_fetches: pages whose planned fetch had begun and had not ended by then.
        dropped: numbers of pages whose actions had lapsed.
    """

    trace: Trace
    limits: Limits
    is_complete: bool
    step_ns: int
    stall_ns: int
    num_faults: int
    late_fetches: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class Policy:
    """What decides. Subclasses override what they decide; everything else has a default.

    Attributes:
        name: as in the registry.
        kinds: the kinds of pages it decides about; LRU decides about the others. None: all.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[frozenset[PageKind] | None] = None

    # --- on demand -------------------------------------------------------------------------------

    def on_insert(self, page_id: int) -> None:
        """The page became resident in this policy's tier."""

    def on_access(self, page_id: int) -> None:
        """The resident page was used."""

    def on_remove(self, page_id: int) -> None:
        """The page left the tier or died; its id never comes back as another page."""

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        """Names pages whose eviction frees at least `need_bytes` bytes of `tier`.

        Atomic: a policy that returns None (not enough evictable bytes) has changed nothing. The
        pager re-checks each victim and tells the policy of each removal through `on_remove`.
        Not overridden: LRU chooses.
        """
        raise NotImplementedError

    # --- by plan; asked of the device tier's instance only ---------------------------------------

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan | None:
        """Plans the movement of a steady iteration: the state at its end is that at its beginning.

        Called once per recorded iteration and whenever the limits change. None: no plan, the pager
        goes by demand.
        """
        return None

    def feedback(self, report: IterationReport) -> MovementPlan | None:
        """Looks at what became of the plan, after each iteration. None: go on with it."""
        return None
