"""A movement plan: what should move when, bound to the operations of a trace. Pure values.

[Note: When]
    `earliest` and `deadline` are moments of the trace: an action with `earliest` i may begin right
    before operation i, after everything of the operations before it; moment N is the end. The
    deadline is the moment at which it should be over. Actions of one moment run in the order of
    `priority` (the smaller first), then in the order of the plan.

    On a device with streams "before operation i" means before it on the device too: a copy that is
    issued there begins when the operations before it have ended. So a plan holds whatever lead the
    launching thread has.

[Note: Advice]
    A plan cannot make anything wrong. What cannot be done when its moment comes (no room yet, the
    page is gone, in use or elsewhere) is tried again at each later moment up to the deadline, and
    is then dropped; an operation that finds an operand absent fetches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tvm_pager.memory import Tier

__all__ = [
    "Action",
    "Clean",
    "CreateIn",
    "Drop",
    "Evict",
    "Fetch",
    "Keep",
    "MovementPlan",
    "Prediction",
    "RunOnHost",
]


class Clean(NamedTuple):
    """Write back and stay on the device: a later eviction moves nothing."""

    page: int
    earliest: int
    deadline: int
    to: Tier | None = None  # None: the next tier with room
    priority: int = 0


class Evict(NamedTuple):
    """Leave the device.

    The write-back begins at `earliest`; the device memory is given up as soon as the copy has
    ended, and at `deadline` at the latest, for which the device waits then. A clean page goes at
    `earliest`.
    """

    page: int
    earliest: int
    deadline: int
    to: Tier | None = None
    priority: int = 0


class Fetch(NamedTuple):
    """Come to the device, or with `to` HOST from NVMe to the slab only.

    Begins at `earliest` or as soon afterwards as there is room.
    """

    page: int
    earliest: int
    deadline: int  # the operation that needs it
    to: Tier = Tier.DEVICE
    priority: int = 0


class Keep(NamedTuple):
    """Do not evict the page between the two moments while anything else can go."""

    page: int
    earliest: int
    deadline: int
    priority: int = 0


class Drop(NamedTuple):
    """Give the page up; its next use runs the operation that created it again."""

    page: int
    earliest: int
    deadline: int
    priority: int = 0


class RunOnHost(NamedTuple):
    """Run operation `op` on the host, on what of its operands lies there."""

    op: int
    earliest: int
    deadline: int
    segments: tuple[int, ...] = ()  # of its pages; empty: all
    priority: int = 0


class CreateIn(NamedTuple):
    """Let the page be born in a tier below the device."""

    page: int
    tier: Tier
    earliest: int
    deadline: int
    priority: int = 0


Action: TypeAlias = Clean | Evict | Fetch | Keep | Drop | RunOnHost | CreateIn


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner expects of one steady iteration.

    Attributes:
        step_ns: how long it takes.
        stall_ns: of it, what the device waits for bytes or room.
        lane_bytes: bytes moved, by the lane's name ("d2h", "h2d", "h2n", "n2h", "d2n", "n2d").
        peak_bytes: by tier.
        replay_ns: device time of what is computed again.
        host_ns: host time of what runs there.
    """

    step_ns: int
    stall_ns: int
    lane_bytes: dict[str, int]
    peak_bytes: dict[Tier, int]
    replay_ns: int = 0
    host_ns: int = 0


@dataclass(frozen=True, slots=True)
class MovementPlan:
    """All advice for one iteration; see [Note: When] and [Note: Advice].

    Attributes:
        actions: in any order.
        absent: numbers of the pages that are expected off the device when the iteration begins (a
            plan for a steady state begins where it ends).
        prediction: None if the policy makes none.
    """

    actions: tuple[Action, ...]
    absent: frozenset[int] = frozenset()
    prediction: Prediction | None = None
