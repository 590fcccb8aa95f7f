"""Prices instead of constraints: what a choice of gaps costs at least. Pure.

[Note: Prices]
    That enough is absent at each moment, at the least cost of movement, is a linear program with
    whole numbers. Its Lagrangian relaxation puts a price u on each byte that is too much at each
    moment; a gap is then worth it if what it relieves costs more than its movement:

        L(u) = sum of u excess + sum over versions of min(0, write-back + sum over its gaps of
               min(0, fetch - bytes * sum of u in the gap))

    Each L(u) with u >= 0 is a bound from below for the cost of any choice, fractions of pages
    included. L is concave; what lacks at each moment, with the gaps that are worth it, is a slope
    of it. It knows movement only: recomputing and work on the host may beat it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.search.gaps import Gaps

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["Relaxation"]


class Relaxation:
    """L of [Note: Prices].

    Attributes:
        gaps: what may be chosen; endless ones always are.
        excess: by moment: bytes that have to be absent; negative: there is room.
        in_cost: by gap: of its fetch.
        out_cost: by version: of its write-back.
    """

    def __init__(
        self, gaps: Gaps, excess: IntArray, in_cost: FloatArray, out_cost: FloatArray
    ) -> None:
        self.gaps = gaps
        self.excess = excess.astype(np.float64)
        self.in_cost = in_cost
        self.out_cost = out_cost
        self._ends = gaps.start + gaps.length
        self._num_laps = gaps.num_laps

    def relief(self, prices: FloatArray) -> FloatArray:
        """By gap: what its page's absence is worth at these prices."""
        sums = np.concatenate(([0.0], np.cumsum(np.concatenate([prices] * self._num_laps))))
        relief: FloatArray = self.gaps.nbytes * (sums[self._ends] - sums[self.gaps.start])
        return relief

    def bound(self, prices: FloatArray) -> tuple[float, BoolArray]:
        """L, and by gap whether it is worth it."""
        gaps, out_cost = self.gaps, self.out_cost
        gain = np.minimum(self.in_cost - self.relief(prices), 0.0)
        value = out_cost + np.bincount(gaps.version, gain, len(out_cost))
        is_in = ((value < 0)[gaps.version] & (gain < 0)) | gaps.is_endless
        return float(np.minimum(value, 0.0).sum() + prices @ self.excess), is_in

    def lack(self, shares: FloatArray | BoolArray) -> FloatArray:
        """By moment: what is too much still if of each gap that share is absent."""
        lack: FloatArray = self.excess - self.gaps.covered(shares)
        return lack
