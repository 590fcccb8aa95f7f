"""Repetition: warm-up, rounds of a fitting length, and rates of things that run side by side.

[Note: Rounds]
    What is timed is called often enough to fill a round. The calls that find out how often are the
    warm-up, the last of them at least half a round long: they wake clocks, fault memory in, load
    kernels, and count for nothing. A machine so slow that the rounds would take three times as long
    as planned gets fewer of them, at least one.

[Note: Side by side]
    Two directions, or several threads, never end together, and what the last one does alone says
    nothing about sharing. So each leaves spans (bytes moved from then to then), and rates are taken
    in a window in which all were busy; a span that reaches out of the window counts in part.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.planning.hardware.rates import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.observe.profile.effort import Effort

__all__ = ["Span", "bytes_within", "cost_ns", "overlap_rates", "rate", "repeat"]

_PATIENCE = 3.0  # times the planned length of all rounds
_MIN_S = 1e-9  # a clock that stood still
_MAX_CALLS = 1 << 20


class Span(NamedTuple):
    """Bytes that moved between two moments, in seconds of any clock."""

    start_s: float
    end_s: float
    nbytes: int


def bytes_within(spans: Sequence[Span], start_s: float, end_s: float) -> float:
    """Bytes that moved in the window; see [Note: Side by side]."""
    total = 0.0
    for span in spans:
        inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        if inside_s >= 0:
            length_s = span.end_s - span.start_s
            total += span.nbytes * (inside_s / length_s if length_s > 0 else 1.0)
    return total


def overlap_rates(sides: Sequence[Sequence[Span]], end_s: float = math.inf) -> list[float]:
    """Bytes/s of each side while all were busy, at most until `end_s`.

    Sides that never met (rounds too short for the clock) give what each did in its own time.
    """
    starts = [min(span.start_s for span in side) for side in sides]
    ends = [max(span.end_s for span in side) for side in sides]
    start, end = max(starts), min(*ends, end_s)
    if end - start <= _MIN_S or any(not bytes_within(side, start, end) for side in sides):
        windows = list(zip(starts, ends, strict=True))
    else:
        windows = [(start, end)] * len(sides)
    return [
        bytes_within(side, *window) / max(window[1] - window[0], _MIN_S)
        for side, window in zip(sides, windows, strict=True)
    ]


def repeat(
    run_round: Callable[[], Sequence[float]], num_rounds: int, round_s: float
) -> list[Figure]:
    """Runs rounds, which each give the same number of values; gives a figure for each value.

    Blocks for `num_rounds` rounds of `round_s` seconds, or somewhat longer; see [Note: Rounds].
    """
    results = []
    deadline_s = time.perf_counter() + _PATIENCE * num_rounds * round_s
    for _ in range(num_rounds):
        results.append(run_round())
        if time.perf_counter() > deadline_s:
            break
    return [Figure.of(values) for values in zip(*results, strict=True)]


def rate(time_calls: Callable[[int], float], units_per_call: float, effort: Effort) -> Figure:
    """Units/s. `time_calls(n)` makes n calls and gives the seconds that they took. Blocks."""
    num_calls = _calibrate(time_calls, effort.round_s)

    def run_round() -> list[float]:
        return [units_per_call * num_calls / max(time_calls(num_calls), _MIN_S)]

    return repeat(run_round, effort.num_rounds, effort.round_s)[0]


def cost_ns(time_calls: Callable[[int], float], effort: Effort) -> Figure:
    """Nanoseconds per call; otherwise as `rate`."""
    num_calls = _calibrate(time_calls, effort.round_s)

    def run_round() -> list[float]:
        return [max(time_calls(num_calls), _MIN_S) / num_calls * 1e9]

    return repeat(run_round, effort.num_rounds, effort.round_s)[0]


def _calibrate(time_calls: Callable[[int], float], round_s: float) -> int:
    """Finds how many calls fill a round, warming up on the way."""
    time_calls(1)  # loads kernels and libraries: no measure of anything
    num_calls = 1
    while True:
        seconds = max(time_calls(num_calls), _MIN_S)
        wanted = min(_MAX_CALLS, max(1, int(num_calls * round_s / seconds)))
        if seconds >= round_s / 2 or num_calls == _MAX_CALLS:
            return wanted
        # In steps, because the first calls are still slower than the rest.
        num_calls = max(num_calls + 1, min(wanted, 16 * num_calls))
