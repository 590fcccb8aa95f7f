"""For policies that keep weights and optimizer states below the device: what that makes of a trace.

Pure.

[Note: What is below]
    Weights and states are below when an iteration begins, except for small ones that a policy keeps
    and those that the first operation needs. So an update may run on the host or on the device, and
    the iteration ends in the same way. For the same reason gradients that were below go for good
    after the update, if they live on. The prediction is the iteration model's, with the update on
    the host and the drops carried out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tvm_pager.memory import PageKind, Tier
from tvm_pager.planning.cost.iteration_model import IterationRates, IterationWork, iteration_time
from tvm_pager.planning.hardware.lane_times import LaneTimes, TierRoom
from tvm_pager.planning.plan import Evict, Prediction
from tvm_pager.planning.rules.absences import absences
from tvm_pager.planning.rules.host_updates import run_on_host, update_groups, update_seconds
from tvm_pager.planning.traces.layers import find_layers
from tvm_pager.planning.traces.trace import Phase
from tvm_pager.planning.traces.trace_index import NEVER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.plan import MovementPlan
    from tvm_pager.planning.rules.absences import Absence
    from tvm_pager.planning.rules.host_updates import UpdateGroup
    from tvm_pager.planning.rules.placement import Moves
    from tvm_pager.planning.traces.trace_index import TraceIndex

__all__ = ["STATE_KINDS", "Below"]

STATE_KINDS = frozenset({PageKind.PARAM, PageKind.GRAD, PageKind.OPT_STATE})
_LASTING = frozenset({PageKind.PARAM, PageKind.OPT_STATE})
_SAMPLE_BYTES = 64 << 20  # rates are those of transfers of this size


class Below:
    """A trace whose weights, gradients and states live below the device.

    Attributes:
        index: of the trace.
        layers: of the model.
        groups: of the update.
        room: where pages go.
    """

    def __init__(self, index: TraceIndex, hardware: HardwareProfile, limits: Limits) -> None:
        self.index = index
        self.layers = find_layers(index.trace)
        self.groups = update_groups(index.trace)
        self._times = LaneTimes(hardware, limits)
        self._hardware = hardware
        self.room = TierRoom(limits, self._times.disk is not None)

    def absences(
        self, kinds: Collection[PageKind] = STATE_KINDS, min_bytes: int = 1
    ) -> list[Absence]:
        """Those of the kinds between two calls of layers; see [Note: What is below]."""
        num_ops, pages = self.index.num_ops, self.index.trace.pages
        result = []
        for absence in absences(self.index, kinds, min_bytes):
            if pages[absence.page].kind in _LASTING and absence.until > num_ops:
                result.append(absence._replace(fetch_from=num_ops + 1))
            elif self.layers.crosses(absence.after, absence.until):
                result.append(absence)
        return result

    def housed(
        self, taken: Iterable[Absence], wanted: tuple[Tier, ...] = (Tier.HOST, Tier.NVME)
    ) -> list[Absence]:
        """The same with the first tier that has room for the page."""
        pages = self.index.trace.pages
        return [
            absence._replace(
                to=self.room.tier_for(absence.page, pages[absence.page].nbytes, wanted)
            )
            for absence in taken
        ]

    def rates(self) -> IterationRates:
        """Of the links, and of the disk if there is one."""
        times, size = self._times, _SAMPLE_BYTES
        disk = (math.inf, math.inf)
        if times.disk is not None:
            disk = (
                size * 1e9 / times.in_ns(size, Tier.NVME),
                size * 1e9 / times.out_ns(size, Tier.NVME),
            )
        out, back = times.out_ns(size, Tier.HOST), times.in_ns(size, Tier.HOST)
        return IterationRates(size * 1e9 / out, size * 1e9 / back, *disk)

    def work(
        self, kept_swap_bytes: int = 0, groups: Sequence[UpdateGroup] | None = None
    ) -> IterationWork:
        """For the iteration model.

        Args:
            kept_swap_bytes: of activations that are swapped in any case.
            groups: that are updated on the host, with their pages below; None: all.
        """
        groups = self.groups if groups is None else groups
        on_host = {op for group in groups for op in group.ops}
        forward_ns = backward_ns = 0
        for index, op in enumerate(self.index.trace.ops):
            if op.phase in (Phase.FORWARD, Phase.OTHER):
                forward_ns += op.compute_ns
            elif index not in on_host:
                backward_ns += op.compute_ns
        sizes = self._sizes(groups)
        return IterationWork(
            forward_s=forward_ns / 1e9,
            backward_s=backward_ns / 1e9,
            update_s=update_seconds(groups, self._hardware),
            weight_bytes=sizes[PageKind.PARAM, False] + sizes[PageKind.PARAM, True],
            grad_bytes=sizes[PageKind.GRAD, False] + sizes[PageKind.GRAD, True],
            disk_weight_bytes=sizes[PageKind.PARAM, True],
            disk_state_bytes=sizes[PageKind.OPT_STATE, True],
            kept_swap_bytes=kept_swap_bytes,
            free_host_bytes=self.room.free_bytes(Tier.HOST),
            num_groups=max(1, len(groups)),
        )

    def plan(
        self, moves: Moves, taken: Iterable[Absence], *, is_update_apart: bool = False
    ) -> MovementPlan:
        """The moves, and the update on the host of what is below.

        Args:
            moves: of the absences.
            taken: the absences; some may have come to nothing.
            is_update_apart: whether the update is a stage of its own, after backward.
        """
        gone = {(a.page, a.earliest) for a in moves.actions if isinstance(a, Evict)}
        groups = self._on_host(gone)
        of_groups = {page for group in self.groups for page in group.pages}
        swap_bytes = replay_ns = 0
        for absence in taken:
            if absence.page in of_groups or (absence.page, absence.after + 1) not in gone:
                continue
            if absence.replay_ns is None:
                swap_bytes += self.index.trace.pages[absence.page].nbytes
            else:
                replay_ns += absence.replay_ns
        work = self.work(0, groups)
        step_s = _step_seconds(work, self.rates(), swap_bytes, replay_ns / 1e9, is_update_apart)
        prediction = _prediction(work, step_s, swap_bytes, replay_ns, moves.prediction.peak_bytes)
        more, absent = self._used_up(groups, gone)
        plan = moves.plan([*run_on_host(self.index.trace, groups), *more], prediction)
        return replace(plan, absent=plan.absent | absent)

    def _on_host(self, gone: Collection[tuple[int, int]]) -> list[UpdateGroup]:
        """Groups that leave nothing different behind if they run there; see the note."""
        pages_gone = {page for page, _ in gone}
        result = []
        for group in self.groups:
            moved = [page for page in group.pages if page in group.written or page in pages_gone]
            is_closed = all(self._is_gone_after(group, page, gone) for page in moved)
            if moved and is_closed and self._keeps_to_itself(group):
                result.append(group)
        return result

    def _keeps_to_itself(self, group: UpdateGroup) -> bool:
        """Whether what its operations create is used by none but them, and dies."""
        trace, ops = self.index.trace, set(group.ops)
        return all(
            trace.pages[page].died is not None and ops.issuperset(self.index.uses(page).tolist())
            for op in group.ops
            for page in trace.ops[op].creates
        )

    def _is_gone_after(
        self, group: UpdateGroup, page: int, gone: Collection[tuple[int, int]]
    ) -> bool:
        """Whether the page leaves the device after the group, dies, or is of no use any more."""
        uses = self.index.uses(page)
        after = int(uses[uses <= group.ops[-1]][-1]) + 1
        if (page, after) in gone:
            return True
        died = self.index.trace.pages[page].died
        return after > uses[-1] and (died is not None or self._is_used_up(page))

    def _is_used_up(self, page: int) -> bool:
        """A gradient that lives on and is never used again."""
        entry = self.index.trace.pages[page]
        is_gradient = entry.kind is PageKind.GRAD and entry.becomes is not None
        return is_gradient and int(self.index.next_from_end[page]) == NEVER

    def _used_up(
        self, groups: Iterable[UpdateGroup], gone: Collection[tuple[int, int]]
    ) -> tuple[list[Evict], set[int]]:
        """Gradients that were below and outlive the iteration go after their update."""
        pages_gone = {page for page, _ in gone}
        actions: list[Evict] = []
        absent = set()
        for group in groups:
            for page in group.pages:
                moment = int(self.index.uses(page)[-1]) + 1
                becomes = self.index.trace.pages[page].becomes
                is_moved = page in pages_gone or page in group.written
                if is_moved and self._is_used_up(page) and (page, moment) not in gone:
                    actions.append(Evict(page, moment, moment))
                    absent.add(-1 if becomes is None else becomes)
        return actions, absent

    def _sizes(self, groups: Iterable[UpdateGroup]) -> dict[tuple[PageKind, bool], int]:
        """Bytes of the groups' pages by kind and whether they lie on NVMe."""
        sizes = {(kind, is_disk): 0 for kind in PageKind for is_disk in (False, True)}
        for group in groups:
            for number in group.pages:
                page = self.index.trace.pages[number]
                is_disk = self.room.tier_of(number) is Tier.NVME
                sizes[page.kind, is_disk] += page.nbytes
        return sizes


def _step_seconds(
    work: IterationWork,
    rates: IterationRates,
    swap_bytes: int,
    replay_s: float,
    is_update_apart: bool,
) -> float:
    if not is_update_apart:
        return iteration_time(work, rates, swap_bytes, replay_s).seconds
    stages = replace(work, update_s=0.0, disk_state_bytes=0)
    disk_s = work.disk_state_bytes * (1 / rates.disk_read + 1 / rates.disk_write)
    time = iteration_time(stages, rates, swap_bytes, replay_s)
    return time.seconds + max(work.update_s, disk_s)


def _prediction(
    work: IterationWork,
    step_s: float,
    swap_bytes: int,
    replay_ns: int,
    peak_bytes: dict[Tier, int],
) -> Prediction:
    """Of a plan whose update runs on the host and whose drops are carried out."""
    spilled = int(max(0, swap_bytes - work.free_host_bytes))
    on_disk = work.disk_weight_bytes + work.disk_state_bytes
    compute_s = work.forward_s + work.backward_s + replay_ns / 1e9
    lane_bytes = {
        "d2h": work.grad_bytes + swap_bytes,
        "h2d": 2 * work.weight_bytes + swap_bytes,
        "h2n": on_disk + spilled,
        "n2h": on_disk + work.disk_weight_bytes + spilled,
    }
    return Prediction(
        step_ns=int(step_s * 1e9),
        stall_ns=int(max(0.0, step_s - compute_s) * 1e9),
        lane_bytes={lane: nbytes for lane, nbytes in lane_bytes.items() if nbytes},
        peak_bytes=peak_bytes,
        replay_ns=replay_ns,
        host_ns=int(work.update_s * 1e9),
    )
