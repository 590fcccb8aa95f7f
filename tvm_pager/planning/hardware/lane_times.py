"""How long pages take on the lanes of a machine, for planners. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Self

from tvm_pager.memory import Tier
from tvm_pager.planning.hardware.lanes import D2H, D2N, H2D, N2D, disk_rates, lane_rates

if TYPE_CHECKING:
    from tvm_pager.planning.hardware.profile import HardwareProfile
    from tvm_pager.planning.limits import Limits
    from tvm_pager.planning.traces.trace import Trace

__all__ = ["Clock", "LaneTimes", "TierRoom"]


class Clock:
    """When each operation begins; moments and times go on past the end of the iteration.

    Args:
        times: nanoseconds by operation, and the end; they do not fall.
    """

    def __init__(self, times: list[int]) -> None:
        self.times = times
        self.whole = times[-1]
        self._num_ops = len(times) - 1

    @classmethod
    def undisturbed(cls, trace: Trace) -> Self:
        """The clock of an iteration in which nothing moves."""
        times, now = [], 0
        for index, op in enumerate(trace.ops):
            now = max(now, index * trace.launch_ns)
            times.append(now)
            now += op.compute_ns
        return cls([*times, now])

    def at(self, moment: int) -> int:
        """The time of a moment."""
        if moment <= self._num_ops:
            return self.times[moment]
        return self.times[moment - self._num_ops] + self.whole

    def first_from(self, time: float) -> int:
        """The first moment that is not earlier."""
        if time <= self.whole:
            return bisect_left(self.times, time)
        return self._num_ops + bisect_left(self.times, time - self.whole, hi=self._num_ops)

    def last_until(self, time: float) -> int:
        """The last moment that is not later; 0 if there is none."""
        if time < self.whole:
            return max(0, bisect_right(self.times, time, hi=self._num_ops) - 1)
        after = bisect_right(self.times, time - self.whole, hi=self._num_ops)
        return self._num_ops + max(0, after - 1)


class LaneTimes:
    """Nanoseconds that bytes take between the device and a tier below, both directions busy.

    A page on NVMe passes through host memory in chunks, so that it takes as long as the slower of
    link and disk.
    """

    def __init__(self, hardware: HardwareProfile, limits: Limits) -> None:
        self.disk = disk_rates(hardware, limits)
        self._rates = lane_rates(hardware, limits)

    def out_ns(self, nbytes: int, to: Tier | None) -> int:
        """From the device to the tier; None: the host."""
        return self._ns(nbytes, D2H, D2N if to is Tier.NVME else D2H)

    def in_ns(self, nbytes: int, source: Tier | None) -> int:
        """From the tier to the device."""
        return self._ns(nbytes, H2D, N2D if source is Tier.NVME else H2D)

    def _ns(self, nbytes: int, link: int, lane: int) -> int:
        seconds = self._rates.duplex_seconds(link, nbytes)
        if lane != link and self.disk is not None:
            seconds = max(seconds, self._rates.duplex_seconds(lane, nbytes))
        return int(seconds * 1e9)


class TierRoom:
    """Gives pages their place below the device, while there is room. A page keeps its tier.

    Careful: pages that are below at different times count together.

    Args:
        limits: bytes of either tier.
        has_disk: whether NVMe can be used.
    """

    def __init__(self, limits: Limits, has_disk: bool) -> None:
        self._free = {Tier.HOST: limits.host_bytes, Tier.NVME: limits.nvme_bytes * has_disk}
        self._tiers: dict[int, Tier | None] = {}

    def has(self, tier: Tier, nbytes: int) -> bool:
        """Whether the tier has that much left."""
        return self._free[tier] >= nbytes

    def free_bytes(self, tier: Tier) -> int:
        """What the tier has left."""
        return self._free[tier]

    def tier_of(self, page: int) -> Tier | None:
        """Where the page was given room; None: nowhere."""
        return self._tiers.get(page)

    def tier_for(
        self, page: int, nbytes: int, wanted: tuple[Tier, ...] = (Tier.HOST, Tier.NVME)
    ) -> Tier | None:
        """Takes room in the first of the tiers that has it; None: in none."""
        if page not in self._tiers:
            self._tiers[page] = next((tier for tier in wanted if self.has(tier, nbytes)), None)
            tier = self._tiers[page]
            if tier is not None:
                self._free[tier] -= nbytes
        return self._tiers[page]
