"""What a pager tells of itself: figures, traces, places. The base of `Pager`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_pager.errors import PagerError
from tvm_pager.observe.snapshot import take_stats
from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    import torch

    from tvm_pager.memory import Tier
    from tvm_pager.observe.counters import Counters, Stats
    from tvm_pager.paging import DemandPager
    from tvm_pager.planning import Trace
    from tvm_pager.runtime.context import PagingContext
    from tvm_pager.runtime.reentry import ModuleEntry
    from tvm_pager.transfer.torch_backend import TorchBackend

__all__ = ["Inspection"]


class Inspection:
    """Looks at a pager's parts and changes nothing."""

    _backend: TorchBackend
    _context: PagingContext
    _core: DemandPager
    _counters: Counters
    _entry: ModuleEntry

    @property
    def closed(self) -> bool:
        return self._context.is_closed

    def is_paged(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is a page of this pager."""
        page = page_of(tensor)
        return page is not None and page.pager is self._context

    def residency(self, tensor: torch.Tensor) -> Tier:
        """The highest tier that holds all current bytes of the tensor's storage."""
        page = page_of(tensor)
        if page is None or page.pager is not self._context:
            raise PagerError(f"the tensor of shape {tuple(tensor.shape)} is not paged here")
        with self._core.lock:
            return self._core.table.tier_of(page)

    def stats(self) -> Stats:
        """A snapshot of the counters; its `str` is a table."""
        with self._core.lock:
            self._pass_on_notices()
            return take_stats(self._context, self._backend, self._counters, self._entry.names)

    def trace(self) -> Trace | None:
        """The iteration that was recorded last; None: none was.

        A policy that plans has iterations recorded where they do not fit on the device; for any
        other one ask with `record`.
        """
        return self._core.iterations.latest

    def check_invariants(self) -> None:
        """Raises AssertionError if the books contradict docs/states.md. O(pages)."""
        self._core.check_invariants()

    def translate(self, va: int) -> Any:
        """Tier, frame offset and page of a virtual address, as in errors and traces.

        KeyError if nobody owns it.
        """
        with self._core.lock:
            return self._core.table.translate(va)

    def _pass_on_notices(self) -> None:
        raise NotImplementedError
