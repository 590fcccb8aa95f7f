"""A hardware profile for tests: round figures, near those of a GPU of 2024."""

from __future__ import annotations

from tvm_pager.planning import HardwareProfile
from tvm_pager.planning.hardware.profile import (
    DeviceRates,
    DiskRates,
    HostRates,
    MachineFacts,
    MatmulRates,
    Overheads,
)
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate, Point

__all__ = ["example_profile"]

_GB, _GIB, _MIB = 10**9, 1 << 30, 1 << 20


def example_profile(
    *,
    link_gb_per_s: float = 50.0,
    duplex_gb_per_s: float = 45.0,
    disk_gb_per_s: float = 3.0,
    latency_s: float = 10e-6,
) -> HardwareProfile:
    """A machine with 140 GB of device memory.

    Args:
        link_gb_per_s: between host and device, each way, the other idle.
        duplex_gb_per_s: each way, both busy.
        disk_gb_per_s: reading, and writing, alone.
        latency_s: of each chunk on the link.
    """
    link = _link(link_gb_per_s, duplex_gb_per_s, latency_s)
    disk = _link(disk_gb_per_s, disk_gb_per_s / 2, 100e-6)
    return HardwareProfile(
        machine=MachineFacts(
            key="example",
            device_names=("Example",),
            driver=None,
            torch_version="2.13.0",
            cuda_version=None,
            python_version="3.11.7",
            kernel="6.1",
            nvme_device=None,
            measured_at="2026-01-01T00:00:00+00:00",
            measure_s=1.0,
            is_quick=False,
        ),
        device=DeviceRates(
            name="Example",
            is_stand_in=False,
            total_bytes=140 * _GB,
            free_bytes=139 * _GB,
            matmul_flop_per_s=MatmulRates(_figure(50e12), None, _figure(700e12), _figure(700e12)),
            copy_bytes_per_s=_figure(2e12),
            adamw_params_per_s=_figure(120e9),
        ),
        host=HostRates(
            cpu_name="Example",
            num_cores=16,
            num_numa_nodes=1,
            physical_bytes=128 * _GIB,
            available_bytes=120 * _GIB,
            memcpy_bytes_per_s=_curve({1: 5e9, 16: 40e9}),
            adamw_params_per_s=_curve({1: 0.4e9, 16: 4e9}),
            bf16_to_fp32_per_s=_curve({1: 1e9, 16: 10e9}),
            fp32_to_bf16_per_s=_curve({1: 1e9, 16: 10e9}),
        ),
        overheads=Overheads(*map(_figure, (7500.0, 20_000.0, 12_000.0, 13_000.0))),
        h2d=link,
        d2h=link,
        duplex_total_bytes_per_s=_curve({32 * _MIB: 2 * duplex_gb_per_s * _GB}),
        disks=(DiskRates("raw", "direct", 4, disk, disk, _figure(disk_gb_per_s * _GB)),),
    )


def _link(gb_per_s: float, duplex_gb_per_s: float, latency_s: float) -> LinkRate:
    """A link that takes the latency per chunk, and one over the rate per byte."""
    chunks = (_MIB, 8 * _MIB, 32 * _MIB)
    alone = _curve({n: n / (latency_s + n / (gb_per_s * _GB)) for n in chunks})
    both = _curve({n: n / (latency_s + n / (duplex_gb_per_s * _GB)) for n in chunks})
    return LinkRate.fitted(alone, both)


def _curve(rates: dict[int, float]) -> Curve:
    return Curve(tuple(Point(x, _figure(rate)) for x, rate in sorted(rates.items())))


def _figure(value: float) -> Figure:
    return Figure(value, value, value)
