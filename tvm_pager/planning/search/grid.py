"""A trace in fewer, coarser moments: what a planner computes with. Pure.

[Note: Blocks]
    Operations between which no page that matters comes or goes form a block: its length in time is
    their sum, what it needs is the most that one of them needs. So nothing is lost, except that
    what moves begins between blocks; long blocks are therefore cut.

[Note: Small pages]
    Pages that take next to nothing together stay on the device: moving them frees nothing, and
    each of them would cost decisions. Where a budget is so tight that they matter, the planner uses
    a grid with all pages.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.search.gaps import Gaps
    from tvm_pager.planning.traces.trace_index import TraceIndex

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["Grid", "without_small_pages"]

_SMALL_SHARE = 0.001  # of the peak: what pages that are left out take together, at most
_BLOCK_S = 200e-6  # about the time of a copy of 8 MiB


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of a trace and the gaps between their uses; see [Note: Blocks].

    Attributes:
        gaps: in moments between blocks.
        first_op: by block: its first operation.
        block_of: by operation: its block.
        seconds: by block: device time of its operations.
        launch_s: by block: what they cost the launching thread.
        needed_bytes: by block: device bytes that it takes if nothing is ever absent.
        least_bytes: by block: what it takes if all is absent that may be.
    """

    gaps: Gaps
    first_op: IntArray
    block_of: IntArray
    seconds: FloatArray
    launch_s: FloatArray
    needed_bytes: IntArray
    least_bytes: IntArray

    @classmethod
    def of(cls, index: TraceIndex, gaps: Gaps, seconds: FloatArray) -> Grid:
        """Builds a grid for some gaps of a trace.

        Args:
            index: of the trace, which has at least one operation.
            gaps: those that matter, in moments of operations.
            seconds: by operation.
        """
        num_ops = index.num_ops
        block_of = _blocks(gaps, seconds)
        first_op = np.flatnonzero(np.diff(block_of, prepend=-1))
        needed = index.resident_bytes
        least = needed - gaps.covered(np.ones(len(gaps))).astype(np.int64)
        return cls(
            _in_blocks(gaps, block_of, len(first_op)),
            first_op,
            block_of,
            np.add.reduceat(seconds, first_op),
            np.diff(first_op, append=num_ops) * (index.trace.launch_ns * 1e-9),
            np.maximum.reduceat(needed, first_op),
            np.maximum.reduceat(least, first_op),
        )


def without_small_pages(gaps: Gaps, peak_bytes: int) -> Gaps:
    """Leaves out gaps of pages that do not matter; see [Note: Small pages]."""
    _, places = np.unique(gaps.page, return_index=True)
    sizes, counts = np.unique(gaps.nbytes[places], return_counts=True)
    small = sizes[np.cumsum(sizes * counts) <= peak_bytes * _SMALL_SHARE]
    return gaps.take(gaps.nbytes > (int(small[-1]) if len(small) else 0))


def _in_blocks(gaps: Gaps, block_of: IntArray, num_blocks: int) -> Gaps:
    """The same gaps in moments between blocks; they begin and end where blocks do."""

    def block(moments: IntArray) -> IntArray:
        laps = moments // gaps.num_moments
        return np.asarray(block_of[moments - laps * gaps.num_moments] + laps * num_blocks)

    start = block(gaps.start)
    return dataclasses.replace(
        gaps,
        num_moments=num_blocks,
        start=start,
        length=block(gaps.start + gaps.length) - start,
        written=block(gaps.written),
    )


def _blocks(gaps: Gaps, seconds: FloatArray) -> IntArray:
    """By operation: its block."""
    num_ops = gaps.num_moments
    is_cut = np.zeros(num_ops, np.bool_)
    is_cut[0] = True
    for moments in (gaps.start, gaps.start + gaps.length, gaps.written):
        is_cut[moments % num_ops] = True
    # Time since the last cut, in units of a block: a cut wherever it reaches another unit.
    begins = np.concatenate(([0.0], np.cumsum(seconds)[:-1]))
    since = begins - begins[np.maximum.accumulate(np.where(is_cut, np.arange(num_ops), 0))]
    is_cut |= np.diff(np.floor(since / _BLOCK_S), prepend=0.0) > 0
    return np.cumsum(is_cut) - 1
