"""How long an iteration takes by how much of its activations is swapped: the traffic-aware model.

Pure arithmetic, no trace and no pages.

Source: Ratel (LoHan, ICDE 2025, arXiv 2403.06504v2), traffic-aware activation swapping. An
iteration is a forward and a backward stage; the weights and the optimizer's states live below the
device, gradients leave as soon as they are made, and the host updates during backward. Each stage
takes as long as its busiest resource. With A bytes swapped, s of them to the disk:

    forward  = max(compute, A/d2h, weights/h2d, weights/read + s/write)
    backward = max(compute + replay(A), gradients/d2h, (weights + A)/h2d,
                   (weights + states + s)/read + (states + weights)/write, update)

The disk reads or writes, so its times add; the two directions of the link do not.

[Note: Ends of the pipeline]
    The update goes in `num_groups` groups: read group i + 1, update i, write i - 1. Its two ends
    overlap with nothing: the last group is updated and written after the last gradient, the first
    one is updated after the first gradient, and the last write waits for the last update. The paper
    has no such terms; with `num_groups` large they vanish.

[Note: Search]
    Pages are taken by falling benefit, replay seconds saved per byte. Then replay(A) is convex, all
    other terms are constant or linear or max(0, linear) in A, and max and sum keep convexity: the
    first step that saves nothing is the minimum. A flat stretch of a convex function is its
    minimum, so the search stops at its beginning, where the fewest bytes move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "IterationRates",
    "IterationTime",
    "IterationWork",
    "SwapCandidate",
    "SwapChoice",
    "by_benefit",
    "choose_swaps",
    "iteration_time",
]


class SwapCandidate(NamedTuple):
    """What may be swapped or computed again.

    Attributes:
        key: the caller's name for it.
        nbytes: moved out in forward and in again in backward, if it is swapped.
        replay_s: device time of computing it again, if it is not.
    """

    key: int
    nbytes: int
    replay_s: float


@dataclass(frozen=True, slots=True)
class IterationRates:
    """Bytes/s of each resource; `math.inf` where it takes no time.

    Attributes:
        d2h: device to host.
        h2d: host to device.
        disk_read: disk to host.
        disk_write: host to disk.
    """

    d2h: float
    h2d: float
    disk_read: float = math.inf
    disk_write: float = math.inf


@dataclass(frozen=True, slots=True)
class IterationWork:
    """What an iteration does beside what is chosen.

    Attributes:
        forward_s: device time of the forward stage.
        backward_s: device time of the backward stage, without replays.
        update_s: host time of all updates.
        weight_bytes: read by either stage, and written by the update.
        grad_bytes: made by backward.
        disk_weight_bytes: of the weights, what lies on the disk.
        disk_state_bytes: states on the disk; read and written once.
        kept_swap_bytes: swapped in any case.
        free_host_bytes: room for swapped bytes in host memory; the rest goes to the disk.
        num_groups: into how many groups the update is divided; see [Note: Ends of the pipeline].
    """

    forward_s: float
    backward_s: float
    update_s: float
    weight_bytes: int
    grad_bytes: int
    disk_weight_bytes: int = 0
    disk_state_bytes: int = 0
    kept_swap_bytes: int = 0
    free_host_bytes: float = math.inf
    num_groups: float = math.inf


@dataclass(frozen=True, slots=True)
class IterationTime:
    """Seconds of either stage by resource; a stage takes the largest."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def seconds(self) -> float:
        """The iteration."""
        return max(self.forward.values()) + max(self.backward.values())

    @property
    def busiest(self) -> tuple[str, str]:
        """What limits forward, and what limits backward."""
        return (
            max(self.forward, key=self.forward.__getitem__),
            max(self.backward, key=self.backward.__getitem__),
        )


@dataclass(frozen=True, slots=True)
class SwapChoice:
    """What the search found.

    Attributes:
        swapped: keys in the order in which they were taken; everything else is computed again.
        swap_bytes: of them and of what is swapped in any case.
        replay_s: device time of what is computed again.
        time: what the model says.
    """

    swapped: tuple[int, ...]
    swap_bytes: int
    replay_s: float
    time: IterationTime


def iteration_time(
    work: IterationWork, rates: IterationRates, swap_bytes: int, replay_s: float
) -> IterationTime:
    """The model; see the head of the file."""
    spilled = max(0.0, swap_bytes - work.free_host_bytes)
    weights_in, states_in = work.disk_weight_bytes, work.disk_state_bytes
    forward = {
        "compute": work.forward_s,
        "d2h": swap_bytes / rates.d2h,
        "h2d": work.weight_bytes / rates.h2d,
        "disk": weights_in / rates.disk_read + spilled / rates.disk_write,
    }
    write_s = (states_in + weights_in) / rates.disk_write
    read_s = (weights_in + states_in + spilled) / rates.disk_read
    compute_s = work.backward_s + replay_s
    backward = {
        "compute": compute_s + (work.update_s + write_s) / work.num_groups,
        "d2h": work.grad_bytes / rates.d2h,
        "h2d": (work.weight_bytes + swap_bytes) / rates.h2d,
        "disk": read_s + write_s + work.update_s / work.num_groups,
        "update": work.update_s + compute_s / work.num_groups,
    }
    return IterationTime(forward, backward)


def by_benefit(candidates: Iterable[SwapCandidate]) -> list[SwapCandidate]:
    """Sorts by replay seconds saved per byte, the largest first, and by key where equal."""

    def rank(candidate: SwapCandidate) -> tuple[float, int]:
        if candidate.nbytes > 0:
            return -candidate.replay_s / candidate.nbytes, candidate.key
        return (-math.inf if candidate.replay_s > 0 else 0.0), candidate.key

    return sorted(candidates, key=rank)


def choose_swaps(
    work: IterationWork, rates: IterationRates, candidates: Iterable[SwapCandidate]
) -> SwapChoice:
    """Finds the amount that makes the iteration shortest; see [Note: Search]."""
    ranked = by_benefit(candidates)
    replays = [0.0]  # of what is left, from the end, so that the sum falls to exactly zero
    for candidate in reversed(ranked):
        replays.append(replays[-1] + candidate.replay_s)
    replays.reverse()
    swap_bytes = work.kept_swap_bytes
    best = iteration_time(work, rates, swap_bytes, replays[0])
    num_swapped = 0
    for index, candidate in enumerate(ranked):
        more_bytes = swap_bytes + candidate.nbytes
        time = iteration_time(work, rates, more_bytes, replays[index + 1])
        if time.seconds >= best.seconds:
            break
        num_swapped, swap_bytes, best = index + 1, more_bytes, time
    return SwapChoice(
        tuple(candidate.key for candidate in ranked[:num_swapped]),
        swap_bytes,
        replays[num_swapped],
        best,
    )
