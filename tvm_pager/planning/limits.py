"""What a plan has to keep to. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tvm_pager.memory import PageKind

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets in bytes.

    Attributes:
        device_bytes: for pages and workspaces on the device; what else lies there is deducted.
        host_bytes: page space of the slab.
        nvme_bytes: of the swap file; 0: there is none.
        quotas: device bytes that pages of a kind may take; a kind that is not named has no quota.
        disk_engine: which of `HardwareProfile.disks` moves bytes to and from NVMe.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int = 0
    quotas: Mapping[PageKind, int] = field(default_factory=dict)
    disk_engine: str = "raw"
