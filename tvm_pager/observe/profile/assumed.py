"""A profile that nobody has measured: for plans where CPU tensors stand in for a device.

What moves there are copies within host memory, so the figures are those of an ordinary desktop
machine. Plans made with them are right in kind, and their predictions say nothing of a GPU.
"""

from __future__ import annotations

import os

from tvm_pager.planning.hardware.profile import (
    DeviceRates,
    DiskRates,
    HardwareProfile,
    HostRates,
    MachineFacts,
    MatmulRates,
    Overheads,
)
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate, Point

__all__ = ["assumed_profile"]

_COPY_BYTES_PER_S = 8e9
_DISK_BYTES_PER_S = 1e9
_FLOP_PER_S = 5e10
_PARAMS_PER_S = 4e8
_CALL_NS = 10_000


def assumed_profile(engine: str) -> HardwareProfile:
    """Round figures for a CPU stand-in, with a disk behind the engine `engine`."""
    link = _link(_COPY_BYTES_PER_S, 2e-6)
    disk = _link(_DISK_BYTES_PER_S, 1e-4)
    flops, call = _figure(_FLOP_PER_S), _figure(_CALL_NS)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    params = _curve(_PARAMS_PER_S)
    return HardwareProfile(
        MachineFacts("assumed", (), None, "", None, "", "", None, "", 0.0, True),
        DeviceRates(
            "cpu", True, memory, memory, MatmulRates(flops, None, flops, flops),
            _figure(_COPY_BYTES_PER_S), _figure(_PARAMS_PER_S),
        ),
        HostRates("", 1, None, memory, memory, _curve(_COPY_BYTES_PER_S), params, params, params),
        Overheads(call, call, call, call),
        link,
        link,
        _curve(2 * _COPY_BYTES_PER_S),
        tuple(
            DiskRates(name, "direct", 1, disk, disk, _figure(_DISK_BYTES_PER_S))
            for name in dict.fromkeys(("raw", engine))
        ),
        ("the figures are assumed, not measured",),
    )  # fmt: skip


def _figure(value: float) -> Figure:
    return Figure(value, value, value)


def _curve(value: float) -> Curve:
    return Curve((Point(1, _figure(value)),))


def _link(bytes_per_s: float, latency_s: float) -> LinkRate:
    return LinkRate(_curve(bytes_per_s), _curve(bytes_per_s), latency_s, bytes_per_s)
