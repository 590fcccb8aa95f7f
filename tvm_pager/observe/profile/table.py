"""A hardware profile as text for people. Numbers in, lines out; imports no torch.

Figures are medians; behind +- stands half of the distance between the extremes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.observe.table import format_rows
from tvm_pager.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tvm_pager.planning.hardware.profile import DiskRates, HardwareProfile
    from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate

__all__ = ["format_profile"]

_GIGA, _TERA = 1e9, 1e12


def format_profile(profile: HardwareProfile) -> str:
    """Writes the profile as tables, without a newline at the end."""
    stand_in = " (CPU stand-in)" if profile.device.is_stand_in else ""
    sections = [
        _machine(profile),
        [f"host <-> device{stand_in}, GB/s by chunk size", *_links(profile)],
        *([f"disk, {disk.engine}, GB/s by chunk size", *_disk(disk)] for disk in profile.disks),
        ["host, by threads", *_host(profile)],
        [f"device{stand_in}", *_device(profile)],
        [f"overhead{stand_in}", *_overheads(profile)],
        [f"notice: {notice}" for notice in profile.notices],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _machine(profile: HardwareProfile) -> list[str]:
    facts, host, device = profile.machine, profile.host, profile.device
    nodes = "" if host.num_numa_nodes is None else f", NUMA nodes: {host.num_numa_nodes}"
    software = [f"torch {facts.torch_version}"]
    software += [] if facts.cuda_version is None else [f"CUDA {facts.cuda_version}"]
    software += [] if facts.driver is None else [f"driver {facts.driver}"]
    software += [f"Python {facts.python_version}", f"Linux {facts.kernel}"]
    how = "quick" if facts.is_quick else "full"
    return [
        f"hardware profile, {how}, {facts.measured_at}, in {format_seconds(facts.measure_s)}",
        f"device: {'none, CPU tensors stand in' if device.is_stand_in else device.name}, "
        f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free",
        f"host:   {host.cpu_name}, {host.num_cores} cores{nodes}, "
        f"{format_bytes(host.physical_bytes)}, {format_bytes(host.available_bytes)} free",
        ", ".join(software),
    ]


def _links(profile: HardwareProfile) -> list[str]:
    h2d, d2h = profile.h2d, profile.d2h
    rows = [["chunk", "h2d", "d2h", "h2d, duplex", "d2h, duplex", "both"]]
    columns = (
        h2d.by_chunk, d2h.by_chunk, h2d.duplex_by_chunk, d2h.duplex_by_chunk,
        profile.duplex_total_bytes_per_s,
    )  # fmt: skip
    for points in zip(*(column.points for column in columns), strict=True):
        row = [_show(point.figure, _GIGA) for point in points]
        rows.append([format_bytes(points[0].x), *row])
    return [*format_rows(rows), _fit_line("h2d", h2d), _fit_line("d2h", d2h)]


def _disk(disk: DiskRates) -> list[str]:
    rows = [["chunk", "read", "write", "read, duplex", "write, duplex", "both"]]
    for read, write in zip(disk.read.by_chunk.points, disk.write.by_chunk.points, strict=True):
        rows.append([format_bytes(read.x), _show(read.figure, _GIGA), _show(write.figure, _GIGA)])
        rows[-1] += [""] * 3
    rows[-1][3:] = [
        _show(disk.read.duplex_by_chunk.points[-1].figure, _GIGA),
        _show(disk.write.duplex_by_chunk.points[-1].figure, _GIGA),
        _show(disk.duplex_total_bytes_per_s, _GIGA),
    ]
    return [
        *format_rows(rows),
        _fit_line("read", disk.read),
        _fit_line("write", disk.write),
        f"{disk.io} I/O, {disk.num_threads} chunks in flight",
    ]


def _host(profile: HardwareProfile) -> list[str]:
    host = profile.host
    columns: list[tuple[str, Curve]] = [
        ("copy, GB/s", host.memcpy_bytes_per_s),
        ("AdamW, G params/s", host.adamw_params_per_s),
        ("bf16 -> fp32, G/s", host.bf16_to_fp32_per_s),
        ("fp32 -> bf16, G/s", host.fp32_to_bf16_per_s),
    ]
    rows = [["threads", *(name for name, _ in columns)]]
    rows += [
        [str(points[0].x), *(_show(point.figure, _GIGA) for point in points)]
        for points in zip(*(curve.points for _, curve in columns), strict=True)
    ]
    return format_rows(rows)


def _device(profile: HardwareProfile) -> list[str]:
    device = profile.device
    matmul = device.matmul_flop_per_s
    named = {"fp32": matmul.fp32, "tf32": matmul.tf32, "bf16": matmul.bf16, "fp16": matmul.fp16}
    rows = [
        [f"matmul {name}, TFLOP/s", "none" if figure is None else _show(figure, _TERA)]
        for name, figure in named.items()
    ]
    rows.append(["copy, GB/s", _show(device.copy_bytes_per_s, _GIGA)])
    rows.append(["AdamW, G params/s", _show(device.adamw_params_per_s, _GIGA)])
    return format_rows(rows)


def _overheads(profile: HardwareProfile) -> list[str]:
    overheads = profile.overheads
    named = {
        "launch of an operation, us": overheads.launch_ns,
        "the same on pages, us": overheads.dispatched_ns,
        "empty copy to the device, us": overheads.empty_h2d_ns,
        "empty copy from the device, us": overheads.empty_d2h_ns,
    }
    return format_rows([[name, _show(figure, 1e3)] for name, figure in named.items()])


def _fit_line(name: str, link: LinkRate) -> str:
    return (
        f"{name}: {format_seconds(link.latency_s)} a chunk + bytes / "
        f"{link.bytes_per_s / _GIGA:.3g} GB/s, off by {link.fit_error:.0%} at most"
    )


def _show(figure: Figure, unit: float) -> str:
    return f"{figure.median / unit:.3g} +-{figure.spread / 2:.0%}"
