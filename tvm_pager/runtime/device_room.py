"""How much of the device this process may use now, beside what other processes have taken.

[Note: Neighbours on the device]
    A budget is set once, and other processes come and go. So at each iteration boundary the driver
    is asked what is free; where the budget has become more than can be had, it shrinks, and the
    blocks that torch keeps go back to the driver; when the neighbours leave, it grows again up to
    what was asked. Between two boundaries an operation that the device refuses evicts and tries
    again (runtime/execution.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvm_pager.errors import PagerError
from tvm_pager.paging.pager import UNLIMITED_BYTES
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from tvm_pager.paging import DemandPager

__all__ = ["DeviceRoom"]

_SLACK_BYTES = 512 << 20  # what a budget may be off by: libraries of this process take some too
_GROWTH_BYTES = 512 << 20  # the least that is worth a larger budget, so that it does not flutter


class DeviceRoom:
    """Adapts one pager's device budget to its neighbours; see [Note: Neighbours on the device].

    Args:
        pager: whose budget.
        device: a CUDA device.
        headroom_bytes: what has to stay free.
    """

    def __init__(self, pager: DemandPager, device: torch.device, headroom_bytes: int) -> None:
        self.asked_bytes = pager.budget_bytes
        self._pager = pager
        self._device = device
        self._headroom_bytes = headroom_bytes

    def room_bytes(self) -> int:
        """What this process could hold: what is free, and what torch has taken already. 30 us."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, free + torch.cuda.memory_reserved(self._device) - self._headroom_bytes)

    def adapt(self) -> None:
        """Shrinks the budget to what can be had, or lets it grow back. The lock is held."""
        pager = self._pager
        if self.asked_bytes >= UNLIMITED_BYTES:
            return
        wanted = min(self.asked_bytes, self.room_bytes())
        if pager.budget_bytes - _SLACK_BYTES <= wanted < pager.budget_bytes + _GROWTH_BYTES and (
            wanted < self.asked_bytes or pager.budget_bytes == self.asked_bytes
        ):
            return
        is_less = wanted < pager.budget_bytes
        try:
            pager.budgets.set_device(wanted)
        except PagerError as error:
            pager.notice(
                f"device memory was taken by others: {format_bytes(wanted)} of the budget "
                f"of {format_bytes(self.asked_bytes)} can be had, and it cannot shrink to that: "
                f"{error}"
            )
            return
        if is_less:
            torch.cuda.empty_cache()
            pager.notice(
                f"device memory was taken by others: the device budget is now "
                f"{format_bytes(wanted)} instead of {format_bytes(self.asked_bytes)}"
            )
