"""`Pager`: wires a backend, the pager, the torch runtime and the counters."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from tvm_pager.assembly import assemble
from tvm_pager.config import PagerConfig
from tvm_pager.errors import PagerClosedError, PagerError, TransferError
from tvm_pager.interrupts import Shield
from tvm_pager.observe.inspection import Inspection
from tvm_pager.runtime import adoption, closing
from tvm_pager.runtime.boundaries import Boundaries
from tvm_pager.runtime.checkpoint import LoadReport, load
from tvm_pager.runtime.compilation import allow_compilation, refuse_compilation
from tvm_pager.runtime.composites import cover_raw_reads, uncover_raw_reads
from tvm_pager.runtime.device import trace_facts
from tvm_pager.runtime.dispatch import PagingMode
from tvm_pager.runtime.exports import recovered
from tvm_pager.runtime.reentry import ModuleEntry
from tvm_pager.runtime.storage import page_of
from tvm_pager.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    import torch

    from tvm_pager.events import EventSink

__all__ = ["Pager", "active_pager", "plain_pager"]

_active = threading.local()


class Pager(Inspection):
    """One address space over device memory, page-locked DRAM and an NVMe swap file.

    As a context manager, everything created on its device inside the context becomes pages; the
    exit closes it. Without the context, `page()` makes pages of a model and its optimizer, and what
    they compute.

    Args:
        device: budget of the device tier: "4GiB", bytes, or a fraction of what is free on the
            card less `headroom`. None: all of that.
        host: budget of page-locked DRAM, staging included. None: half of what the machine, its
            control group (container) and ulimits allow, or of what of that is free now.
        nvme: directory for the swap file; None: two tiers. The file has no name, mode 0600, and
            vanishes with the process. Its blocks are not wiped: use an encrypted volume.
        nvme_bytes: size of the swap file. None: four times device and host, or half of the space.
        headroom: device memory to leave free where `device` is a fraction or None. None: 512 MiB or
            2 % of the card, whichever is more.
        policy: name of a policy: "lookahead" records an iteration, plans its movement and follows
            the plan; "lru" and "clock" move what is needed when it is needed; others:
            `tvm_pager.planning.available_policies()`. Or a class: "path/to/mine.py:Mine".
        torch_device: "cuda", "cuda:1", "cpu". None: CUDA if there is a device, else CPU tensors
            stand in for it.
        engine: "posix", "kvikio" or "auto".
        segment_bytes: pages move below the device in pieces of this size.
        check: 0 nothing, 1 checksums and poison, 2 also all invariants after each operation.
        strict: a policy that fails raises instead of being replaced by LRU.
        profile: a file of `tvm-pager profile --json`, for policies that plan. None: what was
            measured on this machine, or is now, in ten seconds; on the CPU, assumed figures.
        config: a `PagerConfig`, a dict or a JSON file; options given here win. See `PagerConfig`.
        sink: takes every event too, such as an `observe.timeline.Timeline`. The caller closes it.

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
        headroom: int | float | str | None = None,
        policy: str = "lookahead",
        torch_device: str | torch.device | None = None,
        engine: str = "auto",
        segment_bytes: int | str = "32MiB",
        check: int | None = None,
        strict: bool = False,
        profile: str | os.PathLike[str] | None = None,
        config: PagerConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        sink: EventSink | None = None,
    ) -> None:
        options = {
            "device": device,
            "host": host,
            "nvme": nvme,
            "nvme_bytes": nvme_bytes,
            "headroom": headroom,
            "policy": policy,
            "torch_device": None if torch_device is None else str(torch_device),
            "engine": engine,
            "segment_bytes": segment_bytes,
            "check": check,
            "strict": strict,
            "profile": profile,
        }
        self.config = PagerConfig.from_options(options, config=config, environ=os.environ)
        self._shield = Shield()
        try:
            self._parts = assemble(self.config, plain_pager, sink)
        except BaseException:
            self._shield.lower()
            raise
        self.torch_device = self._parts.device
        self._backend, self._core = self._parts.backend, self._parts.core
        self._context, self._counters = self._parts.context, self._parts.counters
        self._pass_on_notices()
        self._entry = ModuleEntry(self._context)
        self._mode: PagingMode | None = None
        refuse_compilation(self._context)
        cover_raw_reads()
        # Through a weak reference: its hooks are global, and must not keep a forgotten pager.
        after_update = weakref.WeakMethod(self._after_update)
        self._boundaries = Boundaries(
            self._context, lambda: None if (after := after_update()) is None else after()
        )
        self._entry.on_model = self._boundaries.enter_model
        self._context.record.paths = self._entry.paths
        self._core.iterations.names = self._entry.page_names
        self._core.iterations.facts = trace_facts(self.torch_device)

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
        failure = self._end(restore=True, gives_up=True)
        if failure is not None and error is None:  # else the block's own error counts
            raise failure

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

    def evict_all(self) -> int:
        """Pushes every evictable page off the device; returns the bytes freed. Blocks.

        For tests and benchmarks.
        """
        self._refuse_closed("evict_all")
        return self._core.evict_all()

    def prefetch(self, *tensors: torch.Tensor) -> int:
        """Starts bringing tensors back to the device; returns how many are on their way.

        Does not block for their copies. Evicts as an operation would; what finds no room beside the
        largest operation so far stays where it is. An operation that needs one before it has
        arrived waits for what is left of its copy, and one that needs the room calls it off.
        """
        self._refuse_closed("prefetch")
        with self._core.lock:
            pages = [page for t in tensors if (page := page_of(t)) and page.pager is self._context]
            return sum(self._core.prefetcher.start(page, may_evict=True) for page in pages)

    def release(self, tensor: torch.Tensor) -> bool:
        """Ends the pin that `tensor.data_ptr()` took, now stale; True if there was one."""
        page = page_of(tensor)
        return page is not None and self._context.release(page)

    def step(self) -> None:
        """Marks an iteration boundary: pointers taken before it end, and plans begin anew.

        Without it pointers end with `optimizer.step()`, and plans begin with the next model that is
        entered; once this was called, it alone decides where iterations begin. The device budget is
        adapted here to what other processes have left of the card.

        Raises:
            PolicyError: the policy plans what it may not, and the pager is strict.
        """
        self._after_update()
        self._boundaries.mark()

    def recover(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain CPU copy of a paged tensor, also after a `close` that found no room for it."""
        return recovered(tensor)

    def set_budgets(self, device: int | str | None = None, host: int | str | None = None) -> None:
        """Changes budgets while the pager runs; None leaves one as it is. Blocks.

        Args:
            device: bytes or "4GiB": what does not fit any more is evicted.
            host: likewise, staging included: slab memory beyond it is given back, what lies there
                moves.

        Raises:
            BudgetError: what is pinned or in use does not fit; that budget is what it was.
            CommitError: all tiers together could not back the live tensors; likewise.
            ConfigError: no size, or more than this machine has.
        """
        self._refuse_closed("set_budgets")
        sizes = [None if size is None else parse_bytes(size) for size in (device, host)]
        self._parts.set_budgets(*sizes)

    def set_policy(self, policy: str) -> None:
        """Lets another policy decide from now on, on the same pages.

        Best called between iterations: what was recorded stays, and where the program's iteration
        is known the new policy plans the next one. In the middle of one the plan that is followed
        is left, and what comes up to the iteration's end moves on demand. Prefetches that are under
        way arrive, evictions end. Waits for no transfer; takes the time of reading a hardware
        profile, if no policy so far has needed one, and O(pages).

        Args:
            policy: as in `Pager`.

        Raises:
            ConfigError: no name, or a policy that plans needs a hardware profile and there is none.
            PagerClosedError: this pager has been closed.
            PagerError: an operation is running, in this thread or another.
            PolicyError: the policy is unknown or broken.
            In each case nothing has changed.
        """
        self._refuse_closed("set_policy")
        config = self.config.replace(policy=policy)
        self._parts.set_policy(config, plain_pager)
        self.config = config

    def record(self) -> None:
        """Has the next two iterations recorded, whatever the policy; `trace` gives the second.

        Costs some microseconds an operation meanwhile, and a wait for the device at the end.
        """
        self._refuse_closed("record")
        with self._core.lock:
            self._core.iterations.record()

    # --- end -------------------------------------------------------------------------------------

    def close(self, *, restore: bool = True) -> None:
        """Gives every live page's bytes back to torch, then slab, swap file and threads.

        Idempotent. Blocks. Pages come back to the device as plain memory, outside the budget. What
        does not fit there is kept in ordinary host memory: using such a tensor raises
        `PagerClosedError`, `recover(tensor)` copies it out. Nothing is lost.

        Args:
            restore: False gives up what is not on the device, for a process that is about to end:
                nothing is read back, and using such a tensor raises `PagerClosedError`.

        Raises:
            TransferError: a page could not be read back. The pager stays open for another try, or
                for `restore=False`; the end of a `with` block closes it all the same.
            KeyboardInterrupt: likewise.
        """
        failure = self._end(restore=restore, gives_up=False)
        if failure is not None:
            raise failure

    def _end(self, *, restore: bool, gives_up: bool) -> TransferError | None:
        if self._context.is_closed:
            return None
        gc.collect()  # dead cycles must not be read back
        with self._core.lock:
            failure = closing.end(self._context, self._backend, restore=restore, gives_up=gives_up)
        if self._context.is_closed:
            self._boundaries.close()
            self._entry.close()
            allow_compilation(self._context)
            uncover_raw_reads()
            self._shield.lower()
        return failure

    def _after_update(self) -> None:
        """Pointers that escaped are stale from now on."""
        self._context.step()
        if self._parts.room is not None:
            with self._core.lock:
                self._parts.room.adapt()

    def _pass_on_notices(self) -> None:
        """Tells what the backend has found out, also on the way: a disk that refuses direct I/O."""
        for text in (*self._parts.budgets.notices, *self._backend.notices):
            self._context.notice_once(text)

    def _refuse_closed(self, what: str) -> None:
        if self._context.is_closed:
            raise PagerClosedError(f"{what}: this pager has been closed; open a new one")


def plain_pager(*, torch_device: str, host: str, policy: str) -> Pager:
    """What a hardware profile measures; the environment's options are not for it."""
    return Pager(config=PagerConfig(torch_device=torch_device, host=host, policy=policy))


def active_pager() -> Pager | None:
    """The pager whose context is open in this thread."""
    pager: Pager | None = getattr(_active, "pager", None)
    return None if pager is None or pager.closed else pager
