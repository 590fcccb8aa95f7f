"""Pages and their bytes on the model's clock. Pure state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.memory import Tier
from tvm_pager.planning.plan import Clean, Evict

if TYPE_CHECKING:
    from tvm_pager.planning.hardware.lanes import Job
    from tvm_pager.planning.plan import MovementPlan
    from tvm_pager.planning.traces.trace import Trace

__all__ = ["ModelBooks", "ModelPage", "first_tiers"]


def first_tiers(plan: MovementPlan, trace: Trace) -> dict[int, Tier]:
    """By page that is absent when an iteration begins: where the one before has put it.

    A page that no action moves, or that goes to the next tier with room, is in host memory.
    """
    latest: dict[int, tuple[int, Tier | None]] = {}
    for action in plan.actions:
        if (
            isinstance(action, (Clean, Evict))
            and action.earliest >= latest.get(action.page, (0,))[0]
        ):
            latest[action.page] = action.earliest, action.to
    tiers = dict.fromkeys(sorted(plan.absent), Tier.HOST)
    for number, (_, tier) in latest.items():
        becomes = trace.pages[number].becomes
        if becomes in tiers and tier is not None:
            tiers[becomes] = tier
    return tiers


class ModelPage:
    """A page on its way through the iterations.

    Attributes:
        number: in this iteration.
        is_here: whether its device memory is taken; its bytes may be on their way still.
        below: where a current copy is, or will be when `down` has ended; None: nowhere.
        up: the fetch that nothing has waited for yet.
        down: the write-back of the copy below, if it was made while the page was here.
        deadline: while it is leaving: the moment at which its memory is given up at the latest.
        is_dropped: whether it has to be computed again.
        ready: when work on the host has made its bytes, in seconds.
    """

    __slots__ = ("below", "deadline", "down", "is_dropped", "is_here", "number", "ready", "up")

    def __init__(self, number: int, is_here: bool) -> None:
        self.number = number
        self.is_here = is_here
        self.below: Tier | None = None
        self.up: Job | None = None
        self.down: Job | None = None
        self.deadline: int | None = None
        self.is_dropped = False
        self.ready = 0.0


class ModelBooks:
    """Which bytes of which tier are taken.

    Attributes:
        frame_bytes: by page.
        used: on the device.
        below: by tier.
        peak: by tier, since `begin`.
        leaving: pages with a deadline, those first that began to leave first.
    """

    def __init__(self, frame_bytes: list[int]) -> None:
        self.frame_bytes = frame_bytes
        self.used = 0
        self.below = {Tier.HOST: 0, Tier.NVME: 0}
        self.peak = {Tier.DEVICE: 0, Tier.HOST: 0, Tier.NVME: 0}
        self.leaving: list[ModelPage] = []

    def begin(self) -> None:
        """From here on peaks count; on the device those of operations."""
        self.peak = {Tier.DEVICE: 0, **self.below}

    def take(self, page: ModelPage) -> None:
        """The page's device memory is taken."""
        page.is_here = True
        self.used += self.frame_bytes[page.number]

    def give_up(self, page: ModelPage) -> None:
        """The page's device memory is free."""
        self.stay(page)
        page.is_here, page.down, page.up = False, None, None
        self.used -= self.frame_bytes[page.number]

    def leave(self, page: ModelPage, deadline: int) -> None:
        """The page gives its memory up by the deadline."""
        if page.deadline is None:
            self.leaving.append(page)
        page.deadline = deadline

    def stay(self, page: ModelPage) -> None:
        """The page does not leave, after all."""
        if page.deadline is not None:
            page.deadline = None
            self.leaving.remove(page)

    def put_below(self, page: ModelPage, tier: Tier) -> None:
        """A copy of the page takes room below."""
        page.below = tier
        self.below[tier] += self.frame_bytes[page.number]
        self.peak[tier] = max(self.peak[tier], self.below[tier])

    def spoil(self, page: ModelPage) -> None:
        """The copy below is no longer current."""
        if page.below is not None:
            self.below[page.below] -= self.frame_bytes[page.number]
            page.below = page.down = None

    def forget(self, page: ModelPage) -> None:
        """The page is dead."""
        self.spoil(page)
        if page.is_here:
            self.give_up(page)
