"""How long a step takes at least, whatever moves when. Pure.

[Note: Three windows]
    Bytes over rate is a poor bound, because a lane cannot be used when it likes. Where memory is
    most short, before some operation c, A bytes are absent. They have all been written back since
    they were last written, and all come back before they are used next. Cut the iteration that
    begins at c into three windows, at d and at e: in the first, what is used before d comes back;
    in the last, what is written after e goes; the middle one takes the rest, both ways at once.

        first  >= max(its operations, in(d) / r_in)
        last   >= max(its operations, out(e) / r_out)
        middle >= max(its operations, (in(e) - r_in first) / r_in, (out(d) - r_out last) / r_out,
                      (in(e) + out(d) - r_in first - r_out last) / r_both)

    where in(x) is what of the A bytes must come back before x, at least: A less the pages that may
    be absent at c and are used later or never; out(x) likewise. A longer first or last window
    shortens the middle one by less, so the sum of the three lower bounds is one. Each c, d and e
    gives one; the largest of some hundred thousand is taken. It holds for movement alone:
    recomputing and work on the host may beat it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvm_pager.planning.hardware.lanes import D2H, D2N, H2D, N2D
from tvm_pager.planning.search.gaps import find_gaps

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.hardware.lanes import LaneRates
    from tvm_pager.planning.search.gaps import Gaps
    from tvm_pager.planning.traces.trace_index import TraceIndex

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["least_step_s"]

_NUM_CUTS = 48
_NUM_ENDS = 48  # of windows, by cut
_LARGE = 1 << 30  # bytes whose rate is the fastest


def least_step_s(index: TraceIndex, device_bytes: int, rates: LaneRates) -> float:
    """The bound in seconds; see [Note: Three windows]. 0.1 s for 5,000 operations.

    Args:
        index: of the trace.
        device_bytes: budget for pages and workspaces.
        rates: of the lanes.
    """
    num_ops = index.num_ops
    ops = index.trace.ops
    launch_s = num_ops * index.trace.launch_ns * 1e-9
    seconds = np.array([op.compute_ns for op in ops], np.float64) * 1e-9
    least = max(float(seconds.sum()), launch_s)
    gaps = find_gaps(index)
    if not len(gaps):
        return least
    both = np.concatenate((seconds, seconds))
    clock = np.concatenate(([0.0], np.cumsum(both)))
    unused = index.resident_bytes - index.named_bytes
    in_gaps = gaps.covered(np.ones(len(gaps)))
    # Pages in gaps that are left out may be absent for nothing.
    absent = index.resident_bytes - device_bytes - (unused - in_gaps)
    cuts = np.concatenate(
        (np.argsort(-absent, kind="stable")[:1], np.linspace(0, num_ops - 1, _NUM_CUTS).astype(int))
    )
    for cut in np.unique(cuts).tolist():
        if absent[cut] > 0:
            window = _Windows(gaps, cut, float(absent[cut]))
            least = max(least, window.bound(clock, rates))
    return least


class _Windows:
    """What must move around one cut. Moments are counted from 0 to 2 N."""

    def __init__(self, gaps: Gaps, cut: int, absent: float) -> None:
        num = gaps.num_moments
        lap = np.where(gaps.start > cut, -num, 0)
        over = (gaps.start + lap <= cut) & (cut < gaps.start + gaps.length + lap)
        lap, self._bytes = lap[over], gaps.nbytes[over].astype(np.float64)
        never = 3 * num
        self._until = np.where(gaps.is_fetched, gaps.start + gaps.length, never)[over] + lap
        is_clean = gaps.out_bytes[gaps.version[over]] == 0
        # As seen from the cut one iteration later.
        self._written = np.where(is_clean, -never, gaps.written[over] + lap + num)
        self._cut, self._num, self._absent = cut, num, absent

    def bound(self, clock: FloatArray, rates: LaneRates) -> float:
        cut, num = self._cut, self._num
        ends = self._ends()
        r_in, r_out, r_both = _rates(rates)
        elapsed = clock[ends] - clock[cut]
        left = clock[cut + num] - clock[ends]
        coming = self._at_least(self._until, ends, is_before=True)
        going = self._at_least(self._written, ends, is_before=False)
        first = np.maximum(elapsed, coming / r_in)[:, None]
        last = np.maximum(left, going / r_out)[None, :]
        inward = coming[None, :] - r_in * first
        outward = going[:, None] - r_out * last
        middle = np.maximum(elapsed[None, :] - elapsed[:, None], inward / r_in)
        middle = np.maximum(middle, outward / r_out)
        middle = np.maximum(middle, (inward + outward) / r_both)
        sums = np.where(ends[None, :] >= ends[:, None], first + middle + last, 0.0)
        return float(sums.max())

    def _ends(self) -> IntArray:
        """Moments between the cut and the next one: where much changes, and evenly."""
        low, high = self._cut, self._cut + self._num
        moments = np.concatenate((self._until, self._written))
        moments = np.sort(moments[(moments >= low) & (moments <= high)])
        even = np.linspace(low, high, _NUM_ENDS).astype(np.int64)
        if not len(moments):
            return even
        places = np.linspace(0, len(moments) - 1, _NUM_ENDS).astype(np.int64)
        return np.unique(np.concatenate((even, moments[places])))

    def _at_least(self, moments: IntArray, ends: IntArray, *, is_before: bool) -> FloatArray:
        """By end: bytes of the absent that have their moment on that side of it, at least."""
        order = np.argsort(moments, kind="stable")
        sums = np.concatenate(([0.0], np.cumsum(self._bytes[order])))
        before = sums[np.searchsorted(moments[order], ends, "right" if is_before else "left")]
        others = sums[-1] - before if is_before else before
        return np.maximum(self._absent - others, 0.0)


def _rates(rates: LaneRates) -> tuple[float, float, float]:
    """Bytes/s in, out and both at once, at their fastest, with the disk beside the link."""
    lanes = [(H2D, D2H), (N2D, D2N)] if rates.has_disk else [(H2D, D2H)]
    r_in = sum(_LARGE / rates.seconds(lane, _LARGE) for lane, _ in lanes)
    r_out = sum(_LARGE / rates.seconds(lane, _LARGE) for _, lane in lanes)
    r_both = sum(_LARGE / rates.duplex_seconds(lane, _LARGE) for pair in lanes for lane in pair)
    return r_in, r_out, max(r_both, r_in, r_out)
