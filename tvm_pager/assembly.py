"""What a pager is made of: backend, core, torch side and counters, wired for one configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.events import TeeSink
from tvm_pager.machine import available_host_bytes, host_limit_bytes
from tvm_pager.observe.counters import Counters
from tvm_pager.observe.profile.assumed import assumed_profile
from tvm_pager.observe.profile.cache import load_or_measure
from tvm_pager.paging import DemandPager
from tvm_pager.paging.limits import write_behind_bytes
from tvm_pager.paging.pager import UNLIMITED_BYTES
from tvm_pager.paging.succession import change_policy
from tvm_pager.planning import HardwareProfile, Policy, load_policy
from tvm_pager.runtime.context import PagingContext
from tvm_pager.runtime.device import (
    check_device_budget,
    device_memory,
    prepare_cuda,
    resolve_device,
)
from tvm_pager.runtime.device_room import DeviceRoom
from tvm_pager.transfer.checksum import Checksums
from tvm_pager.transfer.swap_file import usable_bytes
from tvm_pager.transfer.torch_backend import TorchBackend
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    import torch

    from tvm_pager.config import PagerConfig, ResolvedBudgets
    from tvm_pager.events import EventSink
    from tvm_pager.observe.profile.dispatch import MakePager

__all__ = ["Parts", "assemble"]

_log = logging.getLogger("tvm_pager")


@dataclass(slots=True)
class Parts:
    """The parts of one pager.

    Attributes:
        room: adapts the device budget; None on the CPU.
        hardware: what policies plan with; None: no policy so far has needed it.
    """

    device: torch.device
    budgets: ResolvedBudgets
    backend: TorchBackend
    core: DemandPager
    context: PagingContext
    counters: Counters
    room: DeviceRoom | None
    hardware: HardwareProfile | None

    def set_policy(self, config: PagerConfig, make_pager: MakePager) -> None:
        """See `Pager.set_policy`. The other options of `config` are those of the open pager."""
        make_policy = load_policy(config.policy)
        if self.hardware is None and make_policy.plan is not Policy.plan:
            self.hardware = _hardware(config, self.device, make_pager, may_measure=False)
        hardware = self.hardware
        change_policy(
            self.core,
            make_policy,
            hardware=None if hardware is None else lambda: hardware,
            disk_engine=_disk_engine(hardware, self.backend.engine),
        )

    def set_budgets(self, device_bytes: int | None, host_bytes: int | None) -> None:
        """See `Pager.set_budgets`."""
        with self.core.lock:
            if host_bytes is not None:
                self.core.budgets.set_host(self.backend.page_space_of(host_bytes))
            if device_bytes is not None:
                check_device_budget(device_bytes, self.device)
                self.core.budgets.set_device(device_bytes)
                if self.room is not None:
                    self.room.asked_bytes = device_bytes


def assemble(config: PagerConfig, make_pager: MakePager, sink: EventSink | None = None) -> Parts:
    """Opens slab, swap file and lanes, and wires a pager over them.

    Page-locked memory of a host budget that was asked for is built in the background.

    Args:
        config: all options.
        make_pager: makes the plain pager that is measured where there is no hardware profile yet.
        sink: takes every event too.

    Raises:
        ConfigError: an option or budget cannot be used on this machine.
        PolicyError: the policy is unknown or broken.
    """
    make_policy = load_policy(config.policy)  # first: a misspelt name costs no slab
    device = resolve_device(config.torch_device)
    is_cuda = device.type == "cuda"
    hardware = None
    if make_policy.plan is not Policy.plan:
        hardware = _hardware(config, device, make_pager)  # while nothing is taken yet
    host_limit = host_limit_bytes()
    memory = device_memory(device)
    budgets = config.resolve(memory, host_limit, available_host_bytes())
    check_device_budget(budgets.device_bytes, device)
    if is_cuda:
        prepare_cuda(device)
    device_bytes = UNLIMITED_BYTES if budgets.device_bytes is None else budgets.device_bytes
    nvme_bytes = budgets.nvme_bytes
    if budgets.nvme_directory is not None and nvme_bytes is None:
        known = min(device_bytes, host_limit.nbytes) + budgets.host_bytes
        nvme_bytes = min(4 * known, usable_bytes(budgets.nvme_directory) // 2)
    backend = TorchBackend(
        device, budgets.host_bytes, budgets.nvme_directory, nvme_bytes or 0, engine=config.engine
    )
    owner = backend.current_executor()
    counters = Counters()
    core = DemandPager(
        backend,
        device_bytes,
        make_policy,
        segment_bytes=budgets.segment_bytes,
        sink=counters if sink is None else TeeSink(counters, sink),
        strict=config.strict,
        owner_executors=() if owner is None else (owner,),
        current_executor=backend.current_executor if is_cuda else None,
        write_behind_bytes=write_behind_bytes(device_bytes),
        checker=Checksums(device) if config.check else None,
        hardware=None if hardware is None else lambda: hardware,
        disk_engine=_disk_engine(hardware, backend.engine),
    )
    counters.fetches.table = core.table
    backend.accounted_bytes = lambda: core.table.device_used_bytes
    context = PagingContext(
        core,
        device,
        num_allocated=backend.num_allocated_bytes if is_cuda else None,
        current_executor=backend.current_executor if is_cuda else None,
        owner_executor=owner,
        check=config.check,
    )
    room = None
    if memory is not None:
        room = DeviceRoom(core, device, config.headroom_bytes(memory))
        if config.host is not None:
            backend.build_host(_tell)
    return Parts(device, budgets, backend, core, context, counters, room, hardware)


def _hardware(
    config: PagerConfig, device: torch.device, make_pager: MakePager, *, may_measure: bool = True
) -> HardwareProfile:
    """See `PagerConfig.profile`. Blocks where it has to measure."""
    if config.profile is not None:
        return HardwareProfile.load(config.profile)
    if device.type == "cpu":
        return assumed_profile(config.engine)
    return load_or_measure(
        make_pager,
        torch_device=str(device),
        nvme=config.nvme,
        is_quick=True,
        may_measure=may_measure,
        say=_log.info,
        announce=_log.warning,
    )


def _disk_engine(hardware: HardwareProfile | None, engine: str) -> str:
    """Which of the profile's disks is the swap file's."""
    disks = () if hardware is None else hardware.disks
    return engine if any(disk.engine == engine for disk in disks) else "raw"


def _tell(done_bytes: int, total_bytes: int) -> None:
    _log.info(
        "host slab: %s of %s are page-locked", format_bytes(done_bytes), format_bytes(total_bytes)
    )
