"""One measurement from beginning to end: every section in turn, and nothing left behind."""

from __future__ import annotations

import datetime
import os
import platform
import time
from typing import TYPE_CHECKING

import torch

from tvm_pager.errors import PagerError
from tvm_pager.machine import DeviceMemory, available_host_bytes, host_limit_bytes
from tvm_pager.observe.profile.compute import measure_device, release_cached
from tvm_pager.observe.profile.copies import open_copies, open_slab
from tvm_pager.observe.profile.disk import measure_disk
from tvm_pager.observe.profile.dispatch import MakePager, measure_dispatch
from tvm_pager.observe.profile.effort import Effort, share_of
from tvm_pager.observe.profile.host import measure_host
from tvm_pager.observe.profile.links import LinkFigures, measure_links
from tvm_pager.planning.hardware.profile import DiskRates, HardwareProfile, MachineFacts, Overheads
from tvm_pager.runtime.device import device_memory
from tvm_pager.transfer.region import host_node_of
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.observe.profile.identity import Identity

__all__ = ["measure"]


def measure(
    device: torch.device,
    nvme: str | os.PathLike[str] | None,
    identity: Identity,
    effort: Effort,
    make_pager: MakePager,
    say: Callable[[str], None],
) -> HardwareProfile:
    """Measures everything. Blocks for up to a minute, or ten seconds if `effort` is quick.

    Uses at most a quarter of the free device memory, host memory and disk at a time. At the end,
    also after an interrupt or an error, no file, thread, locked memory or cached device memory of
    it is left, and torch's settings are as before.

    Args:
        device: where pages live; the CPU stands in for a GPU.
        nvme: directory on the disk to measure, or None.
        identity: which machine this is; becomes part of the profile.
        effort: how much to measure.
        make_pager: see `MakePager`.
        say: told of progress, a line each.

    Raises:
        ConfigError: the directory cannot be used.
        PagerError: a pager or another dispatch mode of torch's is active in this thread.
        TransferError: page-locked memory or the disk failed.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        raise PagerError(
            "the hardware profile was asked for inside a pager or another dispatch mode, which "
            "would be measured too: ask before entering it"
        )
    started_s = time.perf_counter()
    notices: list[str] = []
    if device.type != "cuda":
        notices.append("no CUDA device: CPU tensors stand in, and stand-in figures are marked")
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            host_memory = DeviceMemory(
                max(1, available_host_bytes().nbytes), host_limit_bytes().nbytes
            )
            memory = device_memory(device) or host_memory
            free_bytes = min(host_memory.free_bytes, memory.free_bytes)
            links, disks = _measure_transfers(device, nvme, effort, free_bytes, say, notices)
            say("host: copies, casts, optimizer updates")
            host = measure_host(effort, host_memory.free_bytes, host_memory.total_bytes)
            say("device: matrix products, copies, optimizer updates")
            rates = measure_device(device, effort, memory)
        say("overhead of single operations")
        launch_ns, dispatched_ns = measure_dispatch(device, make_pager, effort)
    finally:
        release_cached(device)
    return HardwareProfile(
        machine=_facts(identity, time.perf_counter() - started_s, effort),
        device=rates,
        host=host,
        overheads=Overheads(launch_ns, dispatched_ns, links.empty_h2d_ns, links.empty_d2h_ns),
        h2d=links.h2d,
        d2h=links.d2h,
        duplex_total_bytes_per_s=links.duplex_total_bytes_per_s,
        disks=tuple(disks),
        notices=tuple(notices),
    )


def _measure_transfers(
    device: torch.device,
    nvme: str | os.PathLike[str] | None,
    effort: Effort,
    free_bytes: int,
    say: Callable[[str], None],
    notices: list[str],
) -> tuple[LinkFigures, list[DiskRates]]:
    """What needs page-locked memory: links and disk, through the same slab."""
    is_cuda = device.type == "cuda"
    # On a stand-in all four buffers lie in host memory.
    num_buffers, wanted_bytes = 2, effort.link_bytes
    if not is_cuda:
        num_buffers, wanted_bytes = 4, effort.stand_in_link_bytes
    nbytes = share_of(num_buffers * wanted_bytes, free_bytes, num_buffers * 4096) // num_buffers
    with open_slab(nbytes, page_lock=is_cuda, node=host_node_of(device)) as slab:
        if slab.region_bytes < wanted_bytes:
            notices.append(
                f"host buffers of {format_bytes(slab.region_bytes)} instead of "
                f"{format_bytes(wanted_bytes)}: memory is short, or its locking limited"
            )
        say("host <-> device: copies by chunk size, alone and both ways at once")
        with open_copies(device, slab, slab.region_bytes) as copies:
            links = measure_links(copies, effort)
        release_cached(device)
        if nvme is None:
            return links, []
        say(f"disk: {os.fspath(nvme)}")
        disks, disk_notices = measure_disk(os.fspath(nvme), slab, effort, on_gpu=is_cuda)
        notices += disk_notices
        return links, disks


def _facts(identity: Identity, measure_s: float, effort: Effort) -> MachineFacts:
    now = datetime.datetime.now(datetime.UTC)
    return MachineFacts(
        key=identity.key,
        device_names=identity.device_names,
        driver=identity.driver,
        torch_version=identity.torch_version,
        cuda_version=identity.cuda_version,
        python_version=platform.python_version(),
        kernel=platform.release(),
        nvme_device=identity.nvme_device,
        measured_at=now.isoformat(timespec="seconds"),
        measure_s=measure_s,
        is_quick=effort.is_quick,
    )
