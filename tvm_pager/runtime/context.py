"""One pager's torch side: what becomes a page, escaped pointers, iteration boundaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.errors import PagerClosedError, UnpageableError
from tvm_pager.memory import Backing, Page, PageKind, PageState
from tvm_pager.runtime.call_record import CallRecord
from tvm_pager.runtime.forking import close_in_children
from tvm_pager.runtime.outputs import OutputSizes
from tvm_pager.runtime.storage import StorageRef, page_of, page_of_storage, storage_of, unbind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.paging import DemandPager
    from tvm_pager.transfer.source_file import FileRange

__all__ = ["PagingContext"]

_OTHER = PageKind.OTHER


class PagingContext:
    """Connects storages on one torch device with one `DemandPager`.

    Args:
        core: decides and moves; its lock covers everything here.
        device: pages are storages on this device.
        num_allocated: see `OutputSizes`.
        current_executor: the calling thread's current CUDA stream as an opaque key; None on the
            CPU.
        owner_executor: the stream that operations normally run on; see [Note: Streams].
    """

    def __init__(
        self,
        core: DemandPager,
        device: torch.device,
        *,
        num_allocated: Callable[[], int] | None = None,
        current_executor: Callable[[], Any] | None = None,
        owner_executor: Any = None,
        check: int = 0,
    ) -> None:
        self.core = core
        self.device = device
        self.is_cpu = device.type == "cpu"
        self.sizes = OutputSizes(device.type, num_allocated)
        self.current_executor = current_executor
        self.owner_executor = owner_executor
        self.check = check
        # Whether an operation without a budget has nothing to heed: no streams, no checks.
        self.is_simple = current_executor is None and check < 2
        self.is_closed = False
        self.is_forked = False  # and so closed: this process is a child of the pager's
        close_in_children(self)
        self._on_death = core.dead.append
        self._exposed: dict[int, Page] = {}
        self._absent: set[int] = set()
        self.record = CallRecord()
        core.iterations.on_recording = self.record.watch_modules
        self.copies: dict[int, Any] = {}  # see exports.plain_copy
        self._noticed: set[str] = set()

    # --- what becomes a page ---------------------------------------------------------------------

    def owns_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies where this pager's pages are."""
        return tensor.is_cpu if self.is_cpu else tensor.device == self.device

    def adopt_storage(self, storage: torch.UntypedStorage, kind: PageKind = _OTHER) -> Page | None:
        """Makes a page of a storage that no unpaged tensor shares.

        None, with one notice, if it cannot be resized.
        """
        if not storage.resizable():
            self.stays_put(storage)
            return None
        core = self.core
        reference = StorageRef(storage, self._on_death)
        page = core.table.create(storage.nbytes(), reference, kind)
        page.pager = self
        core.device_policy.journal[-1].append(page)  # of the operation that creates it
        if self.current_executor is not None:
            executor = self.current_executor()
            if executor != self.owner_executor:
                page.home = executor
                self.note_executor(page)
        reference.page = page
        storage._tvm_page = page  # type: ignore[attr-defined]
        return page

    def adopt_absent(
        self, storage: torch.UntypedStorage, kind: PageKind, source: FileRange
    ) -> None:
        """Makes a page of a new storage whose bytes are in a file, and empties the storage.

        The lock is held.
        """
        nbytes = storage.nbytes()
        if not nbytes:  # nothing to be absent
            self.adopt_storage(storage, kind)
            return
        reference = StorageRef(storage, self.core.dead.append)
        storage.resize_(0)
        page = self.core.table.create_absent(nbytes, reference, kind, source)
        page.pager = self
        reference.page = page
        storage._tvm_page = page  # type: ignore[attr-defined]

    def forget_storage(self, storage: torch.UntypedStorage) -> None:
        """Gives a resident storage back to torch alone. The lock is held."""
        page = page_of_storage(storage)
        if page is not None:
            self.core.flight.settle(page)
            self._exposed.pop(page.id, None)
            self.core.forget(page)
            unbind(storage)

    def pass_through(self, tensor: torch.Tensor) -> None:
        """A result without a storage of its own (sparse, nested) stays unpaged, its parts resident.

        The components' kernels read them without dispatch, for as long as the result lives; so they
        are never evicted again.
        """
        with torch._C._DisableTorchDispatch():
            for component in _components(tensor):
                self.hold_for_good(component)
        self.notice_once(
            f"{tensor.layout} tensors are not paged: they stay in device memory, beside the "
            "budget's pages, and so do the indices and values they are made of (first seen: "
            f"{tuple(tensor.shape)})"
        )

    def hold_for_good(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor's page on the device for as long as its storage lives."""
        page = page_of(tensor)
        if page is not None and page.backing is not Backing.NONE:
            if not page.is_on_device:
                self.fault_in(page, "a tensor that stays on the device")
            if page.exposed_at < 0:
                self.core.hold(page)
            self.core.back(page, Backing.NONE)

    def stays_put(self, storage: torch.UntypedStorage) -> None:
        self.notice_once(
            "storages that torch cannot resize (numpy, mmap, DLPack, shared memory, safetensors) "
            f"are not paged and stay where they are (first seen: {storage.nbytes()} bytes on "
            f"{storage.device}); clone() them, or page(..., copy=True), to have them paged"
        )

    def note_executor(self, page: Page) -> None:
        """Records which stream allocates or uses the page now.

        [Note: Streams]
            A page's memory may be copied, released or reused only after all streams that used it,
            its allocating stream included. `page.executors` None means: the owner stream alone,
            which is the rule. A second stream makes the set explicit; the backend waits for all of
            it. The current stream is asked at each access.
        """
        assert self.current_executor is not None
        executor = self.current_executor()
        if executor != self.owner_executor or page.executors is not None:
            if page.executors is None:
                page.executors = {self.owner_executor}
            page.executors.add(executor)
            if page.readers:
                self.core.flight.order_again(page, executor)

    def refuse_capture(self) -> None:
        """Raises UnpageableError inside the capture of a CUDA graph, before anything else happens.

        What the pager asks of the device (has an event passed?) would end the capture.
        """
        if (
            self.current_executor is not None
            and self.current_executor() != self.owner_executor  # a capture has its own stream
            and torch.cuda.is_current_stream_capturing()
        ):
            raise UnpageableError(
                "CUDA graph capture over paged tensors: a replay would read memory that has moved. "
                "unpage() the model first, or run it without a graph"
            )

    # --- access ----------------------------------------------------------------------------------

    def fault_in(self, page: Page, operation: str) -> None:
        """Makes one page resident. The lock is held."""
        self.refuse_closed(page)
        self.refuse_capture()
        if page.state is not PageState.RESIDENT:
            self.core.admit([page], 0, operation)
        if self.current_executor is not None:
            self.note_executor(page)
        self.core.device_policy.used(page)

    def refuse_closed(self, page: Page) -> None:
        if self.is_forked:
            raise PagerClosedError(
                f"{page!r} was not on {self.device} when this process was forked, and a forked "
                f"child has no pager: its {page.nbytes} bytes are in the parent. Use the tensor "
                "there, give the child a copy (tensor.clone() right before the fork), or start it "
                "by 'spawn' and send the tensor"
                if self.is_cpu
                else f"{page!r} is in memory of {self.device}, which a forked child cannot use; "
                "start the child by 'spawn'"
            )
        if self.is_closed:
            raise PagerClosedError(
                f"{page!r} belongs to a pager that has been closed, and its {page.nbytes} bytes "
                f"were not on {self.device} then; pager.recover(tensor) copies out what close() "
                "kept in host memory"
            )

    def expose(self, page: Page) -> None:
        """A raw pointer escapes: the page stays past the next boundary and counts as written."""
        if page.exposed_at < 0 and page.backing is not Backing.NONE:
            self.core.hold(page)
        page.exposed_at = self.core.iteration
        self._exposed[page.id] = page
        if self.current_executor is not None:
            self.note_executor(page)
        self.core.written(page)

    def may_expose(self, page: Page) -> bool:
        """Whether an address may be given away: it was before, or half the budget stays movable."""
        if page.exposed_at >= 0:
            return True
        exposed_bytes = sum(other.frame_bytes for other in self._exposed.values())
        return (
            page.id not in self._absent
            and exposed_bytes + page.frame_bytes <= self.core.budget_bytes // 2
        )

    def mark_absent(self, page: Page) -> None:
        """The page gave its virtual address: until the next boundary it gives no other."""
        self._absent.add(page.id)

    def release(self, page: Page) -> bool:
        """Ends the pin of an escaped pointer early; False if there is none that can end."""
        with self.core.lock:
            if self._exposed.pop(page.id, None) is None:
                return False
            page.exposed_at = -1
            if page.backing is Backing.NONE:  # it stays, whoever has its address
                return False
            if page.state is not PageState.DEAD:
                self.core.drop(page)
                self.core.written(page)  # through the pointer, until now
            return True

    def step(self) -> None:
        """Pointers that escaped before may be stale from now on."""
        with self.core.lock:
            self.core.iteration += 1
            self.core.holds.pass_boundary()
            self._absent.clear()
            self.copies.clear()
            for page in list(self._exposed.values()):
                self.release(page)

    @property
    def num_exposed(self) -> int:
        return len(self._exposed)

    # --- reports ---------------------------------------------------------------------------------

    def notice_once(self, text: str) -> None:
        """Tells a person once per kind of fact: the part before the bracket."""
        kind = text.partition("(first seen")[0]
        if kind not in self._noticed:
            self._noticed.add(kind)
            self.core.notice(text)

    def classify(self, tensor: torch.Tensor | None, kind: PageKind) -> None:
        """Records what a tensor's page turned out to hold."""
        if isinstance(tensor, torch.Tensor):
            page = page_of(tensor)
            if page is not None:
                page.kind = kind

    def classify_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Learns from an optimizer which pages are parameters, gradients and its states."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.classify(parameter, PageKind.PARAM)
                self.classify(parameter.grad, PageKind.GRAD)
        for state in optimizer.state.values():
            if isinstance(state, dict):
                for value in state.values():
                    self.classify(value, PageKind.OPT_STATE)


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    try:
        storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return []
    return [tensor]
