"""A lane's time as it is given away: free slots between what is planned already. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

__all__ = ["BusyLane"]


class BusyLane:
    """Busy stretches of one lane. Stretches that touch are one, so a search passes few of them."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def earliest(self, begin: float, length: float) -> float:
        """The first time from `begin` on at which the lane is free for `length`."""
        place = bisect_right(self._ends, begin)
        while place < len(self._begins) and begin + length > self._begins[place]:
            begin = max(begin, self._ends[place])
            place += 1
        return begin

    def latest(self, end: float, length: float) -> float:
        """The last time at which to begin so that `length` is over by `end`."""
        place = bisect_left(self._begins, end) - 1
        while place >= 0 and end - length < self._ends[place]:
            end = min(end, self._begins[place])
            place -= 1
        return end - length

    def reserve(self, begin: float, length: float) -> None:
        """Takes a slot that one of the searches has found."""
        end = begin + length
        place = bisect_left(self._begins, begin)
        before = self._ends[place - 1] if place else -math.inf
        after = self._begins[place] if place < len(self._begins) else math.inf
        if before >= begin and after <= end:
            self._ends[place - 1] = self._ends.pop(place)
            del self._begins[place]
        elif before >= begin:
            self._ends[place - 1] = end
        elif after <= end:
            self._begins[place] = begin
        else:
            self._begins.insert(place, begin)
            self._ends.insert(place, end)
