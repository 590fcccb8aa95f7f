"""The entry points: `Pager`, `page`, `unpage`.

Wires a backend, the pager, the torch runtime and the counters.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tvm_pager.config import PagerConfig
from tvm_pager.errors import ConfigError, PagerClosedError, PagerError
from tvm_pager.memory import Tier
from tvm_pager.observe.counters import Counters, Stats
from tvm_pager.paging import DemandPager
from tvm_pager.paging.pager import UNLIMITED_BYTES
from tvm_pager.planning import load_policy
from tvm_pager.runtime import adoption, closing
from tvm_pager.runtime.checkpoint import LoadReport, load
from tvm_pager.runtime.compilation import allow_compilation, refuse_compilation
from tvm_pager.runtime.context import PagingContext
from tvm_pager.runtime.device import (
    check_device_budget,
    free_device_bytes,
    prepare_cuda,
    resolve_device,
)
from tvm_pager.runtime.dispatch import PagingMode
from tvm_pager.runtime.exports import plain_copy
from tvm_pager.runtime.reentry import ModuleEntry
from tvm_pager.runtime.storage import page_of
from tvm_pager.transfer.checksum import Checksums
from tvm_pager.transfer.swap_file import usable_bytes
from tvm_pager.transfer.torch_backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

__all__ = ["Pager", "page", "unpage"]

_active = threading.local()


class Pager:
    """One address space over device memory, page-locked DRAM and an NVMe swap file.

    As a context manager, everything created on its device inside the context becomes pages; the
    exit closes it. Without the context, `page()` makes pages of a model and its optimizer, and what
    they compute.

    Args:
        device: budget of the device tier: "4GiB", bytes, or a fraction of the free memory. None:
            all of it.
        host: budget of page-locked DRAM, staging included. None: half of the physical memory.
        nvme: directory for the swap file; None: two tiers. The file has no name, mode 0600, and
            vanishes with the process. Its blocks are not wiped: use an encrypted volume where that
            matters.
        nvme_bytes: size of the swap file. None: four times device and host, at most half of the
            free space.
        policy: name of the replacement policy: "lru", "clock" or an installed entry point.
        torch_device: "cuda", "cuda:1", "cpu". None: CUDA if there is a device, else CPU tensors
            stand in for it.
        engine: "posix", "kvikio" or "auto".
        segment_bytes: pages move below the device in pieces of this size.
        check: 0 nothing, 1 checksums and poison, 2 also all invariants after each operation.
        strict: a policy that fails raises instead of being replaced by LRU.
        config: a `PagerConfig`, a dict or a JSON file; options given here win. See `PagerConfig`.

    Raises:
        ConfigError: an option or budget cannot be used on this machine.
        PolicyError: the policy is unknown or broken.
    """

    def __init__(
        self,
        device: int | float | str | None = None,
        host: int | float | str | None = None,
        nvme: str | os.PathLike[str] | None = None,
        *,
        nvme_bytes: int | float | str | None = None,
        policy: str = "lru",
        torch_device: str | torch.device | None = None,
        engine: str = "auto",
        segment_bytes: int | str = "32MiB",
        check: int | None = None,
        strict: bool = False,
        config: PagerConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> None:
        options = {
            "device": device,
            "host": host,
            "nvme": nvme,
            "nvme_bytes": nvme_bytes,
            "policy": policy,
            "torch_device": None if torch_device is None else str(torch_device),
            "engine": engine,
            "segment_bytes": segment_bytes,
            "check": check,
            "strict": strict,
        }
        self.config = PagerConfig.from_options(options, config=config, environ=os.environ)
        make_policy = load_policy(self.config.policy)  # first: a misspelt name costs no slab
        self.torch_device = resolve_device(self.config.torch_device)
        is_cuda = self.torch_device.type == "cuda"
        budgets = self.config.resolve(
            free_device_bytes(self.torch_device), psutil.virtual_memory().total
        )
        self._budgets = budgets
        check_device_budget(budgets.device_bytes, self.torch_device)
        self._counters = Counters()
        if is_cuda:
            prepare_cuda(self.torch_device)
        device_bytes = UNLIMITED_BYTES if budgets.device_bytes is None else budgets.device_bytes
        nvme_budget = budgets.nvme_bytes
        if budgets.nvme_directory is not None and nvme_budget is None:
            known = min(device_bytes, psutil.virtual_memory().total) + budgets.host_bytes
            nvme_budget = min(4 * known, usable_bytes(budgets.nvme_directory) // 2)
        self._backend = TorchBackend(
            self.torch_device,
            budgets.host_bytes,
            budgets.nvme_directory,
            nvme_budget or 0,
            engine=self.config.engine,
        )
        owner = self._backend.current_executor()
        self._core = DemandPager(
            self._backend,
            device_bytes,
            make_policy,
            segment_bytes=budgets.segment_bytes,
            sink=self._counters,
            strict=self.config.strict,
            owner_executors=() if owner is None else (owner,),
            checker=Checksums(self.torch_device) if self.config.check else None,
        )
        self._backend.accounted_bytes = lambda: self._core.table.device_used_bytes
        self._context = PagingContext(
            self._core,
            self.torch_device,
            num_allocated=self._backend.num_allocated_bytes if is_cuda else None,
            current_executor=self._backend.current_executor if is_cuda else None,
            owner_executor=owner,
            check=self.config.check,
        )
        for text in self._backend.notices:
            self._core.notice(text)
        self._entry = ModuleEntry(self._context)
        self._mode: PagingMode | None = None
        refuse_compilation()
        # Through a weak reference: the hook is global, and must not keep a forgotten pager's slab
        # and file.
        after_step = weakref.WeakMethod(self._after_step)
        self._hook = register_optimizer_step_post_hook(
            lambda *call: None if (after := after_step()) is None else after(*call)
        )

    # --- context ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._refuse_closed("enter")
        active = active_pager()
        if active is not None:
            if active is not self:
                self.close()  # nobody else can: the name of a refused context was never bound
            raise PagerError(
                "a pager is active already in this thread; pagers do not nest. Close it first, or "
                "page single models with tvm_pager.page(model, pager=...)"
            )
        self._mode = PagingMode(self._context)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's method has no types
        self._entry.watches_all = True
        _active.pager = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mode is None:
            raise AssertionError("exit of a pager that was never entered")
        mode, self._mode = self._mode, None
        _active.pager = None
        self._entry.watches_all = False
        mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # as above
        self.close()

    # --- paging ----------------------------------------------------------------------------------

    def page(self, *owners: Any, copy: bool = False) -> int:
        """Adopts live modules, optimizers and tensors; returns how many tensors became pages.

        Storages that torch cannot resize (safetensors, gguf, numpy, mmap) stay where they are, with
        one notice; `copy` moves their bytes into pages, and arrays that share the memory are no
        longer seen.

        `id(p)`, `isinstance(p, Parameter)`, hooks, gradients and every reference to them stay. See
        `tvm_pager.page`.
        """
        self._refuse_closed("page")
        self._entry.watch(owners)
        return adoption.adopt(self._context, owners, copy=copy)

    def load(
        self,
        model: torch.nn.Module,
        checkpoint: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        strict: bool = True,
    ) -> LoadReport:
        """Fills a model from safetensors files, whose tensors stay there until they are used.

        Build the model on the meta device (`with torch.device("meta")`): its parameters get the
        files' dtypes, as with `load_state_dict(assign=True)`, and become pages backed by the files.
        None is read before an operation needs it, none is written anywhere while it is unchanged,
        and none counts in what host and NVMe must back. A parameter that is not on the meta device
        is file-backed too where dtype and layout agree and nothing else shares its storage; else
        its values are copied in. The objects stay the same. Do not change the files meanwhile: that
        is detected at the next read. Blocks.

        Args:
            model: what to fill.
            checkpoint: a file, several, or a directory with `*.safetensors`.
            strict: whether missing and unexpected names are an error.

        Raises:
            ConfigError: no file, or none in that format.
            PagerError: names or shapes do not match; nothing has changed.
        """
        self._refuse_closed("load")
        self._backend.stage_files()
        self._entry.watch([model])
        return load(self._context, model, checkpoint, strict=strict)

    def unpage(self, *owners: Any) -> int:
        """Makes plain tensors of the pages of `owners`, same objects; returns their number.

        Blocks for the faults. The bytes are outside every budget from then on.
        """
        self._entry.forget(owners)
        return adoption.restore(self._context, owners)

    def is_paged(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is a page of this pager."""
        page = page_of(tensor)
        return page is not None and page.pager is self._context

    def residency(self, tensor: torch.Tensor) -> Tier:
        """The highest tier that holds all current bytes of the tensor's storage."""
        page = page_of(tensor)
        if page is None or page.pager is not self._context:
            raise PagerError(
                f"the tensor of shape {tuple(tensor.shape)} is not paged by this pager"
            )
        with self._core.lock:
            return self._core.table.tier_of(page)

    def evict_all(self) -> int:
        """Pushes every evictable page off the device; returns the bytes freed. Blocks.

        For tests and benchmarks.
        """
        self._refuse_closed("evict_all")
        return self._core.evict_all()

    def release(self, tensor: torch.Tensor) -> bool:
        """Ends the pin that `tensor.data_ptr()` took; True if there was one.

        The pointer is stale from now on.
        """
        page = page_of(tensor)
        return page is not None and self._context.release(page)

    def step(self) -> None:
        """Marks an iteration boundary: pointers taken before it end.

        `optimizer.step()` does this by itself.
        """
        self._context.step()

    def recover(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain CPU copy of a paged tensor, also after a `close` that found no room for it."""
        page = page_of(tensor)
        kept = page.kept if page is not None else None
        if kept is None:
            return plain_copy(tensor).cpu()
        item = tensor.element_size()
        flat = kept[: kept.numel() // item * item].view(tensor.dtype)
        seen = torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())
        return seen.clone()

    # --- looking ---------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """A snapshot of the counters; its `str` is a table."""
        core, counters = self._core, self._counters
        with core.lock:
            if not self._context.is_closed:
                core.drain()
            return Stats(
                device_budget_bytes=core.budget_bytes,
                device_peak_bytes=core.table.device_peak_bytes,
                host_budget_bytes=self._budgets.host_bytes,
                host_peak_bytes=self._backend.host_mapped_bytes,
                nvme_budget_bytes=self._backend.nvme_capacity_bytes,
                nvme_peak_bytes=core.table.frames[Tier.NVME].peak_bytes,
                bytes_by_lane=dict(counters.bytes_by_lane),
                num_faults=counters.num("fault"),
                num_evictions=counters.num("evict"),
                num_write_backs=counters.num("write_back"),
                num_clean_evictions=counters.num_clean_evictions,
                num_failures=counters.num("failure"),
                stall_s=counters.stall_ns / 1e9,
                num_pages=len(core.table.pages),
                num_operations=core.operation_index,
                num_exposed=self._context.num_exposed,
                num_policy_errors=sum(policy.num_errors for policy in core.policies.values()),
                notices=list(counters.notices),
                engine=self._backend.engine_text,
            )

    def check_invariants(self) -> None:
        """Raises AssertionError if the books contradict docs/states.md. O(pages)."""
        self._core.check_invariants()

    def translate(self, va: int) -> Any:
        """Tier, frame offset and page of a virtual address, as in errors and traces.

        KeyError if nobody owns it.
        """
        with self._core.lock:
            return self._core.table.translate(va)

    @property
    def closed(self) -> bool:
        return self._context.is_closed

    # --- end -------------------------------------------------------------------------------------

    def close(self, *, restore: bool = True) -> None:
        """Gives every live page's bytes back to torch, then slab, swap file and threads.

        Idempotent. Blocks. Pages come back to the device as plain memory, outside the budget. What
        does not fit there is kept in ordinary host memory: using such a tensor raises
        `PagerClosedError`, `recover(tensor)` copies it out. Nothing is lost.

        Args:
            restore: False gives up what is not on the device, for a process that is about to end:
                nothing is read back, and using such a tensor raises `PagerClosedError`.
        """
        if self._context.is_closed:
            return
        self._hook.remove()
        self._entry.close()
        allow_compilation()
        gc.collect()  # dead cycles must not be read back
        with self._core.lock:
            closing.end(self._context, self._backend, restore=restore)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Learns what pages hold; takes the end of `optimizer.step()` for an iteration boundary."""
        self._context.classify_optimizer(optimizer)
        self._context.step()

    def _refuse_closed(self, what: str) -> None:
        if self._context.is_closed:
            raise PagerClosedError(f"{what}: this pager has been closed; open a new one")


def active_pager() -> Pager | None:
    """The pager whose context is open in this thread."""
    return getattr(_active, "pager", None)


def page(
    model: torch.nn.Module,
    *others: Any,
    pager: Pager | None = None,
    copy: bool = False,
    **options: Any,
) -> Pager:
    """Makes pages of a model's parameters, buffers and gradients, and of an optimizer's states.

    Uses `pager`, else the open context, else a new pager with `options` (those of `Pager`), which
    the caller closes. `copy` also takes storages that cannot be resized, such as those of CPU
    weights from safetensors; see `Pager.page`. The objects stay the same: optimizers made before,
    tied weights, hooks and `isinstance` keep working.

    Raises:
        PagerError: a parameter is held by a graph that is alive.
    """
    if pager is None:
        pager = active_pager()
    if pager is None:
        pager = Pager(**options)
    elif options:
        raise ConfigError(
            f"options {sorted(options)} were given along with an open pager; give them to Pager()"
        )
    pager.page(model, *others, copy=copy)
    return pager


def unpage(model: torch.nn.Module, *others: Any) -> None:
    """Makes plain tensors of everything paged in a model and its optimizer, under the same objects.

    Blocks for the faults. The pager stays open.
    """
    adoption.restore(None, (model, *others))
