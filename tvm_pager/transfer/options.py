"""What tests and unusual machines set of the torch backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.transfer.block_store import BlockStore
    from tvm_pager.transfer.region import PageLocker

__all__ = ["TorchBackendOptions"]


@dataclass(frozen=True, slots=True)
class TorchBackendOptions:
    """What tests and unusual machines set. Sizes in bytes.

    Attributes:
        staging_bytes: of one direction; None for a sixteenth of the host budget, at most 32 MiB.
        region_bytes: see `HostSlab`.
        page_lock: None: where the device is CUDA.
        locker: see `HostSlab`.
        margin_bytes: see `SwapFile`.
        direct: see `SwapFile`.
        num_threads: I/O depth.
        measure: whether the block store is tried and measured at start; costs 30 ms.
        device_io: how NVMe and device exchange bytes: "staged" through host memory, "direct" where
            the engine can, "auto" for the faster of both where GPUDirect is offered.
        wrap_store: puts something between backend and block store, such as a store that fails.
    """

    staging_bytes: int | None = None
    region_bytes: int = 1 << 30
    page_lock: bool | None = None
    locker: PageLocker | None = None
    margin_bytes: int | None = None
    direct: bool = True
    num_threads: int = 4
    measure: bool = True
    device_io: Literal["auto", "direct", "staged"] = "auto"
    wrap_store: Callable[[BlockStore], BlockStore] | None = None
