"""The search for constants with which the simulator takes as long as was measured.

[Note: Search]
    First each constant is tried alone at a few places, and a sum of these curves says which
    constants, at which values, would explain the cells; of equally good ones those nearest to 1,
    by their ranges. Others that would do as well are named: these cells cannot tell them apart.
    From there on steps of Gauss and Newton, on differences of simulations, within the ranges. Only
    cells that are fitted are looked at, so the others test the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.simulated_cells import Case, Constants, Simulations
from tvm_pager.errors import PagerError

__all__ = ["CONSTANTS", "Fit", "fit"]

Floats = npt.NDArray[np.float64]

# By name: where it is tried alone, from the least to the most that makes sense.
CONSTANTS = {
    "link": (0.6, 0.8, 1.0, 1.15),
    "compute": (0.9, 1.0, 1.2, 1.5),
    "submit": (0.0, 1.0, 2.0, 4.0),
    "launch": (0.5, 1.0, 1.5, 2.5),
}
_NEAR = 0.002  # of the step's time: near enough
_NUM_ROUNDS = 5
_NUM_PLACES = 41  # of the grid in which a model's least is looked for, each way
_STAY_NEAR = 0.01  # what a departure from 1 by the whole range weighs beside errors of steps
_AS_GOOD = 0.01  # error up to which other constants explain the cells too


@dataclass(frozen=True, slots=True)
class Fit:
    """What came out.

    Attributes:
        names: of the constants that were fitted.
        constants: all of them.
        error: the largest relative error of a step among the cells that were fitted.
        at_limit: names of those that would go farther if they might.
        as_good: what else would explain these cells, as far as curves of each one alone say.
        num_simulations: that it took.
    """

    names: tuple[str, ...]
    constants: Constants
    error: float
    at_limit: tuple[str, ...]
    as_good: tuple[dict[str, float], ...]
    num_simulations: int


@dataclass(frozen=True, slots=True)
class _Axes:
    """The constants that are fitted, with their ranges."""

    names: tuple[str, ...]

    @property
    def low(self) -> Floats:
        return np.array([CONSTANTS[name][0] for name in self.names])

    @property
    def high(self) -> Floats:
        return np.array([CONSTANTS[name][-1] for name in self.names])

    def cost(self, errors: Floats, place: Floats) -> Any:
        """Squares of errors; of two equally good places that which is nearer to 1 is better."""
        away = _STAY_NEAR * (place - 1) / (self.high - self.low)
        return (errors**2).sum(axis=-1) + (away**2).sum(axis=-1)


def fit(
    simulations: Simulations,
    measured_s: Mapping[Case, float],
    names: Sequence[str],
    num_constants: int,
) -> Fit:
    """Fits constants to measured steps; see [Note: Search]. Blocks.

    Args:
        simulations: where to ask.
        measured_s: seconds of a step; at least as many as constants.
        names: of the constants to choose from.
        num_constants: how many of them are fitted.

    Raises:
        PagerError: a case cannot be simulated.
    """
    begun = simulations.num_done
    errors = _Errors(simulations, measured_s)
    (axes, place), *rest = _choose(errors, names, num_constants)
    place, error = _refine(errors, axes, place)
    off = float(np.abs(error).max())
    room = np.minimum(place - axes.low, axes.high - place) / (axes.high - axes.low)
    return Fit(
        axes.names,
        _constants(axes.names, place),
        float(np.abs(np.expm1(error)).max()),
        tuple(n for n, r in zip(axes.names, room, strict=True) if r < 1e-3 and off >= _NEAR),
        tuple(dict(zip(a.names, map(float, x), strict=True)) for a, x in rest),
        simulations.num_done - begun,
    )


def _refine(errors: _Errors, axes: _Axes, place: Floats) -> tuple[Floats, Floats]:
    """Steps of Gauss and Newton; gives the best place, and the errors there."""
    low, high = axes.low, axes.high
    best, error = place, errors.at(axes.names, [place])[0]
    reach = 1.0  # of a step, as a part of the range
    for _ in range(_NUM_ROUNDS):
        if np.abs(error).max() < _NEAR:
            break
        model = _tangent(errors, axes, best, error)
        span = reach * (high - low)
        target = _least(model, axes, np.maximum(low, best - span), np.minimum(high, best + span))
        found = errors.at(axes.names, [target])[0]
        if axes.cost(found, target) < axes.cost(error, best):
            best, error = target, found
        else:
            reach /= 4  # the slopes are known already
    return best, error


class _Errors:
    """Logarithms of simulated over measured steps."""

    def __init__(self, simulations: Simulations, measured_s: Mapping[Case, float]) -> None:
        self._simulations = simulations
        self._measured_s = measured_s

    def at(self, names: Sequence[str], places: Sequence[Floats]) -> list[Floats]:
        """For each place the errors of the cases, all simulated at once.

        Raises:
            PagerError: a case cannot be simulated.
        """
        points = [_constants(names, place) for place in places]
        wanted = list(itertools.product(points, self._measured_s))
        logs = []
        for (_, case), step in zip(
            wanted, self._simulations.run([(c, p) for p, c in wanted]), strict=True
        ):
            if step.refusal:
                raise PagerError(
                    f"{case.policy} under {case.device_bytes:,} B cannot be fitted, the simulator "
                    f"refuses it: {step.refusal}; name another cell"
                )
            logs.append(math.log(step.step_s / self._measured_s[case]))
        return list(np.array(logs).reshape(len(points), -1))


def _choose(
    errors: _Errors, names: Sequence[str], num_constants: int
) -> list[tuple[_Axes, Floats]]:
    """Which constants, and where to begin, by curves of each one alone; then those as good."""
    curves = _curves(errors, names)
    found: list[tuple[float, float, _Axes, Floats]] = []
    for some in itertools.combinations(names, num_constants):
        axes, model = _Axes(some), _sum_of({name: curves[name] for name in some})
        place = _least(model, axes, axes.low, axes.high)
        error = model(place[None])[0]
        found.append((float(axes.cost(error, place)), float(np.abs(error).max()), axes, place))
    first, *rest = sorted(found, key=lambda item: item[0])
    return [first[2:], *(item[2:] for item in rest if item[1] < _AS_GOOD)]


def _curves(errors: _Errors, names: Sequence[str]) -> dict[str, Floats]:
    """The errors where one constant has each of its values and the others are 1."""
    everyone = list(CONSTANTS)
    places = [
        np.array([x if other == name else 1.0 for other in everyone])
        for name in names
        for x in CONSTANTS[name]
    ]
    found = iter(errors.at(everyone, places))
    return {name: np.array([next(found) for _ in CONSTANTS[name]]) for name in names}


def _sum_of(curves: Mapping[str, Floats]) -> Callable[[Floats], Floats]:
    """The errors at places, a row each, as if each constant changed them by itself."""

    def model(x: Floats) -> Floats:
        columns = []
        for case in range(next(iter(curves.values())).shape[1]):
            total = np.zeros(len(x))
            for column, (name, curve) in enumerate(curves.items()):
                base = curve[CONSTANTS[name].index(1.0), case]
                total += np.interp(x[:, column], CONSTANTS[name], curve[:, case] - base)
            columns.append(base + total)
        return np.stack(columns, axis=1)

    return model


def _tangent(
    errors: _Errors, axes: _Axes, place: Floats, error: Floats
) -> Callable[[Floats], Floats]:
    """The errors at places, a row each, as they change near `place`. Differences go inwards."""
    low, high = axes.low, axes.high
    steps = np.where(place > (low + high) / 2, -0.04, 0.04) * (high - low)
    found = errors.at(axes.names, [place + step for step in np.diag(steps)])
    slopes = np.array([(there - error) / step for there, step in zip(found, steps, strict=True)])

    def model(x: Floats) -> Floats:
        result: Floats = error + (x - place) @ slopes
        return result

    return model


def _least(model: Callable[[Floats], Floats], axes: _Axes, low: Floats, high: Floats) -> Floats:
    """Where a model's errors are least within a box: on a grid, then on finer ones around it."""
    a, b = low, high
    best = low
    for _ in range(4):
        sides = [np.linspace(x, y, _NUM_PLACES) for x, y in zip(a, b, strict=True)]
        grid = np.stack([part.ravel() for part in np.meshgrid(*sides)], axis=1)
        best = grid[int(np.argmin(axes.cost(model(grid), grid)))]
        span = (b - a) / 10
        a, b = np.maximum(low, best - span), np.minimum(high, best + span)
    return best


def _constants(names: Sequence[str], place: Floats) -> Constants:
    # Rounded, so that what is simulated can be written down, and is found again.
    return Constants(**{n: round(float(x), 6) for n, x in zip(names, place, strict=True)})
