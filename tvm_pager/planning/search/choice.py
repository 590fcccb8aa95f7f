"""Which gaps pages spend off the device: the fewest bytes moved that make everything fit. Pure.

[Note: Covering]
    At each moment what is too much has to be absent. A gap relieves the moments that it spans by
    its page's bytes and costs the bytes of its fetch and, once for all chosen gaps of its version,
    of the write-back. Costs may be weighted: a byte that moves while its lane is idle costs less.

[Note: The climb]
    We climb on the relaxation's bound (relaxation.py, Note "Prices") by subgradients of an averaged
    solution (F. Barahona and R. Anbil, "The volume algorithm: producing primal solutions with a
    subgradient method", 2000), a fixed number of passes of numpy. The averaged solution and the
    prices give orders in which gaps are taken until everything fits; what turns out not to be
    needed is given back, the dearest first. The cheapest result wins. On traces of training steps
    it is within 1 % of the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tvm_pager.planning.search.relaxation import Relaxation
from tvm_pager.planning.traces.occupancy import Occupancy

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.search.gaps import Gaps

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["Choice", "choose_gaps"]

_NUM_CLIMBS = 300  # fewer for large problems
_CLIMB_WORK = 3_000_000  # gaps and moments looked at, about
_CLOSE = 1e-3  # of the cost: as near to the bound as needs be
_MEMORY = 0.95  # of the averaged solution, per climb
_PATIENCE = 15  # climbs without progress before the step shrinks
_SHRINK = 0.7
_OVERSHOOT = 1.02  # of the step to the best known cost
_DEAR = 1e3  # the highest price of a byte, in costs of a byte
_PART = 1024  # gaps that are looked at together


@dataclass(frozen=True, slots=True)
class Choice:
    """What `choose_gaps` found.

    Attributes:
        chosen: by gap: whether its page is absent in it.
        cost: of the movement, as weighted.
        bound: no choice costs less; so `cost` may be too high by the difference.
        prices: by moment; a good start for a problem that differs little.
    """

    chosen: BoolArray
    cost: float
    bound: float
    prices: FloatArray


def choose_gaps(
    gaps: Gaps,
    excess: IntArray,
    in_cost: FloatArray | None = None,
    out_cost: FloatArray | None = None,
    known: Choice | None = None,
) -> Choice | None:
    """Chooses gaps whose absences relieve every moment; see [Note: Covering] and [Note: The climb].

    Args:
        gaps: what may be chosen; endless ones always are.
        excess: by moment: bytes that have to be absent; negative: there is room.
        in_cost: by gap: of its fetch; None: its bytes.
        out_cost: by version: of its write-back; None: its bytes.
        known: the choice for a problem that differs little: makes it three times as fast.

    Returns:
        None if it does not fit even with all of them.
    """
    in_cost = gaps.in_bytes.astype(np.float64) if in_cost is None else in_cost
    out_cost = gaps.out_bytes.astype(np.float64) if out_cost is None else out_cost
    if (excess > gaps.covered(np.ones(len(gaps)))).any():
        return None
    if (excess <= gaps.covered(gaps.is_endless)).all():
        return Choice(gaps.is_endless.copy(), 0.0, 0.0, np.zeros(gaps.num_moments))
    cover = _Cover(Relaxation(gaps, excess, in_cost, out_cost))
    found: list[BoolArray] = []
    if known is None:
        found.append(cover.taken(cover.worth(np.maximum(excess, 0.0))))
        goal, start = cover.cost(found[0]), np.zeros(gaps.num_moments)
    else:
        goal, start = cover.cost(known.chosen), known.prices
    num_climbs = min(_NUM_CLIMBS, _CLIMB_WORK // (len(gaps) + gaps.num_moments))
    bound, prices, shares = cover.climb(start, goal, num_climbs // (1 if known is None else 5))
    found.append(cover.taken(shares + 1e-3 * np.minimum(cover.worth(prices), 100.0)))
    best = min(found, key=cover.cost)
    return Choice(best, cover.cost(best), max(bound, 0.0), prices)


class _Cover:
    def __init__(self, relaxation: Relaxation) -> None:
        self._relaxation = relaxation
        self._gaps = gaps = relaxation.gaps
        out_cost = relaxation.out_cost
        num_sharing = np.bincount(gaps.version, minlength=len(out_cost))[gaps.version]
        self._usual_cost = relaxation.in_cost + out_cost[gaps.version] / num_sharing
        self._spans = list(zip(gaps.start.tolist(), gaps.length.tolist(), strict=True))

    def cost(self, chosen: BoolArray) -> float:
        versions = np.unique(self._gaps.version[chosen])
        in_cost, out_cost = self._relaxation.in_cost, self._relaxation.out_cost
        return float(in_cost[chosen].sum() + out_cost[versions].sum())

    def worth(self, prices: FloatArray) -> FloatArray:
        """By gap: what it relieves at these prices, per cost."""
        return self._relaxation.relief(prices) / np.maximum(self._usual_cost, 1e-9)

    def taken(self, order: FloatArray) -> BoolArray:
        """Takes gaps by falling `order` as long as they are needed; then gives back what is not."""
        gaps, spans = self._gaps, self._spans
        chosen = gaps.is_endless.copy()
        over = Occupancy(self._relaxation.lack(chosen).astype(np.int64))
        sizes = gaps.nbytes.tolist()
        for some in self._parts(np.argsort(-order, kind="stable"), ~chosen):
            # What relieves nothing now relieves nothing later.
            peaks = over.peaks(gaps.start[some], gaps.length[some])
            for gap in some[peaks > 0].tolist():
                if over.peak(spans[gap]) > 0:
                    chosen[gap] = True
                    over.add(spans[gap], -sizes[gap])
            if over.nbytes.max() <= 0:
                break
        dearest = np.argsort(1e-6 * order - self._usual_cost, kind="stable")
        for some in self._parts(dearest, chosen & ~gaps.is_endless):
            # What is needed now is needed later too.
            peaks = over.peaks(gaps.start[some], gaps.length[some])
            for gap in some[peaks + gaps.nbytes[some] <= 0].tolist():
                if over.peak(spans[gap]) + sizes[gap] <= 0:
                    chosen[gap] = False
                    over.add(spans[gap], sizes[gap])
        return chosen

    def _parts(self, order: IntArray, wanted: BoolArray) -> list[IntArray]:
        order = order[wanted[order]]
        return [order[at : at + _PART] for at in range(0, len(order), _PART)]

    def climb(
        self, prices: FloatArray, goal: float, num_climbs: int
    ) -> tuple[float, FloatArray, FloatArray]:
        """Maximises the bound; gives it, its prices, and the averaged solution."""
        gaps, relaxation = self._gaps, self._relaxation
        bound, best = -np.inf, prices
        shares: FloatArray = np.zeros(len(gaps))
        reach, since = 1.0, 0
        # Beyond, sums would lose the digits that the bound needs.
        dearest = _DEAR * float((self._usual_cost / gaps.nbytes).max())
        for climb in range(num_climbs):
            total, is_in = relaxation.bound(prices)
            memory = _MEMORY if climb else 0.0
            shares = np.asarray(memory * shares + (1 - memory) * is_in, np.float64)
            if total > bound + 1e-4 * abs(bound) or not climb:
                bound, best, since = total, prices, 0
                if goal - bound <= _CLOSE * goal:
                    break
            elif (since := since + 1) >= _PATIENCE:
                reach, since, prices = reach * _SHRINK, 0, best
            slope = relaxation.lack(shares)
            slope[(prices <= 0) & (slope < 0)] = 0.0
            steepness = float(slope @ slope)
            if steepness <= 0:
                if not (is_in != shares).any():
                    break
                shares, reach = is_in.astype(np.float64), reach * _SHRINK
                continue
            step = reach * max(goal * _OVERSHOOT - total, 0.0) / steepness
            prices = np.clip(prices + step * slope, 0.0, dearest)
        return bound, best, shares
