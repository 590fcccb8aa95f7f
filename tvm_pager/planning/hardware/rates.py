"""Measured rates as values: figures, curves, and one direction of a link with its time model. Pure.

[Note: Time of a transfer]
    Bytes that follow each other in chunks take `latency_s` per chunk and 1 / `bytes_per_s` per
    byte. Both are fitted to the rates measured by chunk size, every size weighing the same. While
    the opposite direction is busy, the time grows by the ratio measured at that chunk size. A
    transfer smaller than the chunk size counts as one chunk of that kind, so more bytes never take
    less time.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Curve", "Figure", "LinkRate", "Point"]

_MIN_SLOPE = 0.5  # a fit may promise twice the fastest measured rate at most


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of several rounds with their extremes, in the unit that its owner names."""

    median: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.median <= self.high < math.inf:
            raise ValueError(f"0 < low <= median <= high is needed: {self}")

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Makes a figure of the results of at least one round."""
        low, high = float(min(values)), float(max(values))
        # Halving the sum of two middle values may round to just outside of them.
        return cls(min(max(float(statistics.median(values)), low), high), low, high)

    @property
    def spread(self) -> float:
        """Highest less lowest, as a fraction of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True, slots=True)
class Point:
    """One figure of a curve, measured at `x`: a chunk size in bytes, or a number of threads."""

    x: int
    figure: Figure


@dataclass(frozen=True, slots=True)
class Curve:
    """Figures by chunk size or by number of threads; `x` rises."""

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        xs = [point.x for point in self.points]
        if not xs or xs[0] < 1 or any(a >= b for a, b in itertools.pairwise(xs)):
            raise ValueError(f"points must exist and rise from 1 on; their x are {xs}")

    @property
    def largest(self) -> int:
        """The last measured x."""
        return self.points[-1].x

    def at(self, x: int) -> float:
        """The median at `x`: between two points by the logarithm of x, beyond the last as there."""
        for left, right in itertools.pairwise(self.points):
            if left.x <= x < right.x:
                low, high = left.figure.median, right.figure.median
                share = math.log(x / left.x) / math.log(right.x / left.x)
                return min(max(low + (high - low) * share, min(low, high)), max(low, high))
        return self.points[0 if x < self.points[0].x else -1].figure.median


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One direction between two memories; see [Note: Time of a transfer].

    Attributes:
        by_chunk: bytes/s by chunk size, the opposite direction idle.
        duplex_by_chunk: bytes/s by chunk size while the opposite direction is busy.
        latency_s: fitted; seconds that each chunk costs beside its bytes.
        bytes_per_s: fitted; the rate that ever larger chunks come close to.
    """

    by_chunk: Curve
    duplex_by_chunk: Curve
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise ValueError(f"{self.latency_s=} must be >= 0 and {self.bytes_per_s=} > 0")

    @classmethod
    def fitted(cls, by_chunk: Curve, duplex_by_chunk: Curve) -> Self:
        """Fits latency and rate to `by_chunk`."""
        latency_s, bytes_per_s = _fit([(p.x, p.figure.median) for p in by_chunk.points])
        return cls(by_chunk, duplex_by_chunk, latency_s, bytes_per_s)

    @property
    def fit_error(self) -> float:
        """The largest deviation of the fit from a measured time, as a fraction of that time."""
        return max(
            abs(self.seconds(p.x, p.x) * p.figure.median / p.x - 1) for p in self.by_chunk.points
        )

    def seconds(
        self, nbytes: int, chunk_bytes: int | None = None, is_duplex: bool = False
    ) -> float:
        """Predicts how long `nbytes` take.

        Args:
            nbytes: 0 takes no time.
            chunk_bytes: size of the pieces; None: the largest that was measured.
            is_duplex: whether the opposite direction is busy all the while.

        Raises:
            ValueError: a size below zero, or an empty chunk.
        """
        chunk_bytes = self.by_chunk.largest if chunk_bytes is None else chunk_bytes
        if nbytes < 0 or chunk_bytes < 1:
            raise ValueError(f"{nbytes=} must be >= 0 and {chunk_bytes=} >= 1")
        seconds = -(-nbytes // chunk_bytes) * self.latency_s + nbytes / self.bytes_per_s
        return seconds * self.duplex_slowdown(chunk_bytes) if is_duplex else seconds

    def duplex_slowdown(self, chunk_bytes: int) -> float:
        """The factor, at least 1, by which a busy opposite direction lengthens a transfer."""
        points = self.duplex_by_chunk.points
        nearest = min(max(chunk_bytes, points[0].x), points[-1].x)
        return max(1.0, self.by_chunk.at(nearest) / self.duplex_by_chunk.at(nearest))


def _fit(rates: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits seconds = latency + chunk / rate to (chunk, rate) pairs; gives latency and rate.

    Least squares of the relative errors. Each measured point reads 1 = latency * u + slope * r with
    u = 1 / seconds and r the measured rate.
    """
    us = [rate / chunk for chunk, rate in rates]
    rs = [rate for _, rate in rates]
    fastest = max(rs)
    # Scaled, so that products neither overflow nor vanish.
    us_scaled = [u / max(us) for u in us]
    rs_scaled = [r / fastest for r in rs]
    uu = sum(u * u for u in us_scaled)
    rr = sum(r * r for r in rs_scaled)
    ur = sum(u * r for u, r in zip(us_scaled, rs_scaled, strict=True))
    u_sum, r_sum = sum(us_scaled), sum(rs_scaled)
    determinant = uu * rr - ur * ur
    latency, slope = 0.0, r_sum / rr  # without latency
    if len(rates) > 1 and determinant > 1e-12 * uu * rr:
        free = (u_sum * rr - r_sum * ur) / determinant, (r_sum * uu - u_sum * ur) / determinant
        if free[0] >= 0:
            latency, slope = free
    if slope < _MIN_SLOPE:
        slope = _MIN_SLOPE
        latency = max(0.0, (u_sum - slope * ur) / uu)
    return latency / max(us), fastest / slope
