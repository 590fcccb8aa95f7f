"""Runs one operator in every case that the fast path of dispatch.py leaves out.

See [Note: Order of the rules] there. Operations of other namespaces run with pins instead of the
lock: a collective may wait for another thread.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.errors import PagerError, TransferError
from tvm_pager.interrupts import interruptible
from tvm_pager.memory import PageState
from tvm_pager.paging.pager import UNLIMITED_BYTES
from tvm_pager.runtime.call import Call
from tvm_pager.runtime.collectives import (
    hold_until_boundary,
    hold_until_done,
    is_functional,
    run_functional,
)
from tvm_pager.runtime.inference import below_dispatch
from tvm_pager.runtime.lists import run_split
from tvm_pager.runtime.results import (
    compare_sizes,
    count_versions,
    tensor_class,
    wrap,
    wrap_tensor,
)
from tvm_pager.runtime.schema import (
    OperatorPlan,
    plan_of,
    tensor_arguments,
    written_tensors,
)
from tvm_pager.runtime.storage import page_of, page_of_storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tvm_pager.memory import Page
    from tvm_pager.runtime.context import PagingContext

__all__ = ["adopt_results", "run_operator", "two_pagers"]

_guard = torch._C._DisableTorchDispatch
_Tensor = torch.Tensor
_RESIDENT = PageState.RESIDENT


def run_operator(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    active: PagingContext | None,
    is_told: bool = False,
) -> Any:
    """Runs one operator with its operands resident.

    Args:
        func: which.
        args: its positional arguments.
        kwargs: its others.
        active: the open context, which owns what factories give.
        is_told: whether `DemandPager.watch` was called for it already.
    """
    plan = plan_of(func)
    pages: list[Page] = []
    unpaged: list[torch.Tensor] = []
    args = _collect(plan, args, kwargs, pages, unpaged)
    if pages:
        context: PagingContext = pages[0].pager
    elif active is not None and (active.is_cpu or _is_on(active, args, kwargs, unpaged)):
        context = active
    else:
        with below_dispatch(plan):
            out = func(*args, **(kwargs or {}))
        if plan.is_foreach and plan.writes:
            count_versions(written_tensors(plan, args, kwargs))
        return out
    for page in pages:
        if page.pager is not context:
            raise two_pagers(plan, page)
        if context.is_closed and page.state is not _RESIDENT:
            context.refuse_closed(page)
    context.refuse_capture()
    call = Call(context, func, plan, args, kwargs, pages, unpaged)
    if is_told:
        call.is_told = True
    if not plan.is_native:
        return _run_unlocked(call)
    core = context.core
    with core.lock:
        core.drain()
        new_bytes = 0
        is_bounded = core.budget_bytes < UNLIMITED_BYTES  # else there is nothing to fit in
        if is_bounded and (plan.creates or not (context.is_cpu or plan.is_view)):
            key = context.sizes.key(func, args, kwargs)
            known = context.sizes.known(key)
            if known is None:
                return _run_measured(call, key)
            new_bytes = call.known_bytes = known
            if known > core.free_bytes - call.missing_bytes():
                new_bytes = max(context.sizes.least(key), min(known, call.available_bytes()))
        return _run_locked(call, new_bytes)


def _run_locked(call: Call, new_bytes: int, probe: _Probe | None = None) -> Any:
    context, plan, pages = call.context, call.plan, call.pages
    core = context.core
    table = core.table
    needs_room = (
        table.device_used_bytes + new_bytes + core.overhead_bytes > core.budget_bytes
        or table.committed_bytes + new_bytes > core.commit_limit_bytes
    )
    for page in pages:
        if page.state is not _RESIDENT:
            needs_room = True
    if needs_room:
        if context.is_closed:
            context.refuse_closed(pages[0])
        if plan.list_positions and new_bytes > call.available_bytes():
            split = run_split(run_operator, call)
            if split is not NotImplemented:
                return split
    entry = None
    if core.watch is not None:
        entry = call.entry = context.record.begin(call)  # a plan may move something now
        needs_room = (
            core.free_bytes < new_bytes
            or table.committed_bytes + new_bytes > core.commit_limit_bytes
            or any(page.state is not _RESIDENT for page in pages)
        )
    if needs_room:
        core.admit(pages, new_bytes, plan.name)
    written = None
    if plan.writes:
        written = call.written()
        for tensor in written:
            written_page = page_of(tensor)
            if written_page is not None:
                if plan.creates and written_page.tickets:
                    # It may resize what a copy is reading. Whether the copy goes well is nothing
                    # to this operation: its bytes are about to be void.
                    with contextlib.suppress(TransferError):
                        core.flight.settle(written_page)
                core.written(written_page)
    core.running.append(pages)
    core.device_policy.journal.append(pages)
    try:
        if context.current_executor is not None:
            for page in pages:
                context.note_executor(page)
        with below_dispatch(plan):
            if probe is not None:
                probe.start()
            created_before = table.created_bytes  # now: while we waited, others created as well
            timer = context.record.start_timer(call)
            out = call.execute() if context.is_cpu else _run_on_cuda(call)
            if timer is not None:
                context.record.stop_timer(call, timer)
            if probe is not None:
                probe.stop()
            if out.__class__ is _Tensor:
                out = wrap_tensor(context, plan, out, call.args, call.unpaged)
            elif out.__class__ is not tensor_class.paged:
                out = wrap(context, plan, out, call.args, call.unpaged)
            call.created_bytes = table.created_bytes - created_before
            if entry is not None:
                entry.workspace_bytes = max(0, call.known_bytes - call.created_bytes)
    finally:
        core.running.pop()
        core.device_policy.trim()
        if written:
            compare_sizes(context, written)
    for position in plan.kept:
        context.hold_for_good(call.argument(position))
    if plan.is_foreach and written:
        count_versions(written)
    if table.device_used_bytes + core.overhead_bytes > core.budget_bytes:
        core.make_room(0, plan.name)  # its results depend on data, and are larger this time
    if context.check > 1:
        core.check_invariants()
    return out


class _Probe:
    """Measures what the device's allocator hands out to one operation, temporaries included.

    What stays behind without being a page (a cuBLAS workspace, taken once per thread and stream)
    is not the operation's need.
    """

    def __init__(self, context: PagingContext) -> None:
        self._context = context
        self._before = self._overhead = 0
        self.taken_bytes: int | None = None

    def start(self) -> None:
        self._overhead = self._context.core.backend.device_overhead_bytes()
        self._before = self._context.sizes.allocated_bytes() or 0

    def stop(self) -> None:
        after = self._context.sizes.allocated_bytes()
        self.taken_bytes = None if after is None else after - self._before

    def need_bytes(self) -> int | None:
        """To be asked when the results are pages."""
        if self.taken_bytes is None:
            return None
        kept = self._context.core.backend.device_overhead_bytes() - self._overhead
        return self.taken_bytes - max(0, kept)


def _run_measured(call: Call, key: Any) -> Any:
    """The first operation of a signature: outputs are estimated, what it took is remembered."""
    context, plan = call.context, call.plan
    core = context.core
    least, estimate = context.sizes.estimate(plan, call.func, call.args, call.kwargs)
    core.sample_overhead()
    wanted = context.sizes.cautious(plan, estimate, call.operand_bytes())
    reserved = max(least, min(wanted, call.available_bytes()))
    probe = None if context.is_cpu else _Probe(context)
    out = _run_locked(call, reserved, probe)
    if key is not None:
        taken = None if probe is None else probe.need_bytes()
        context.sizes.observe(key, max(least, call.created_bytes), taken)
        if call.entry is not None:
            call.entry.workspace_bytes = max(0, (taken or 0) - call.created_bytes)
    core.sample_overhead()
    if core.free_bytes < 0:  # created more than estimated: make up for it at once
        core.make_room(0, plan.name)
    return out


def _run_unlocked(call: Call) -> Any:
    """An operator of another namespace: pinned, not locked, as it may wait for other threads."""
    context, plan = call.context, call.plan
    if is_functional(plan):
        return run_functional(run_operator, call)
    core = context.core
    distinct = call.distinct_pages()
    written = call.written()
    with core.lock:
        for page in distinct:
            context.refuse_closed(page)
        if core.watch is not None:
            core.drain()
            call.entry = context.record.begin(call)
        core.admit(distinct, 0, plan.name)
        for tensor in written:
            page_written = page_of(tensor)
            if page_written is not None:
                core.written(page_written)
        core.pin(distinct)
        if context.current_executor is not None:
            for page in distinct:
                context.note_executor(page)
        core.device_policy.journal.append(list(distinct))  # which others append to
    try:
        timer = context.record.start_timer(call)
        with below_dispatch(plan):
            # Perhaps Python code of others, which may wait; not `call.execute`, which is ours.
            out = interruptible(partial(call.func, *call.args, **(call.kwargs or {})))
        if timer is not None:
            context.record.stop_timer(call, timer)
        if plan.name.startswith("c10d::"):
            with core.lock:
                hold_until_done(call, out, distinct)
    finally:
        with core.lock:
            core.unpin(distinct)  # not before they are held
            compare_sizes(context, written)  # before another thread can evict them
    with core.lock:
        with below_dispatch(plan):
            out = wrap(context, plan, out, call.args, call.unpaged)
        core.sample_overhead()
        if core.free_bytes < 0:
            core.make_room(0, plan.name)
        return out


def _run_on_cuda(call: Call) -> Any:
    """Runs the operator; out of memory is retried while pages can go, if nothing was written."""
    generators = _generators(call) if call.plan.is_seeded else []
    offsets = [generator.get_offset() for generator in generators]
    while True:
        try:
            return call.execute()
        except torch.OutOfMemoryError:
            if call.plan.writes or not call.context.core.evict_for_retry():
                raise
            torch.cuda.empty_cache()
            for generator, offset in zip(generators, offsets, strict=True):
                generator.set_offset(offset)


def _generators(call: Call) -> list[torch.Generator]:
    """The CUDA generators that the operation may draw from."""
    given = [
        value
        for value in (*call.args, *(call.kwargs or {}).values())
        if isinstance(value, torch.Generator) and value.device.type == "cuda"
    ]
    return given or [torch.cuda.default_generators[call.context.device.index or 0]]


def _is_on(
    context: PagingContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    unpaged: list[torch.Tensor],
) -> bool:
    """Whether an operation without paged operands could create anything on the pager's device."""
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, torch.device):
            return value.type == context.device.type
    return any(context.owns_device(tensor) for tensor in unpaged)


def _collect(
    plan: OperatorPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    pages: list[Page],
    unpaged: list[torch.Tensor],
) -> tuple[Any, ...]:
    """The general case of finding operands: keywords, lists, bare storages."""
    for tensor in tensor_arguments(plan, args, kwargs):
        if isinstance(tensor, _Tensor):
            page = page_of(tensor)
            if page is None:
                unpaged.append(tensor)
            else:
                pages.append(page)
    if plan.has_storage_args:
        args = tuple(unaliased(value) for value in args)
        for value in args:
            if isinstance(value, torch.UntypedStorage):
                page = page_of_storage(value)
                if page is not None:
                    pages.append(page)
    return args


def unaliased(value: Any) -> Any:
    """The storage itself, if `value` is the alias that `PagedTensor.untyped_storage` gave of it."""
    origin = (
        getattr(value, "_tvm_origin", None) if isinstance(value, torch.UntypedStorage) else None
    )
    return value if origin is None else origin


def adopt_results(
    context: PagingContext,
    plan: OperatorPlan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    out: Any,
) -> Any:
    """Adopts what an operation gave that ran through other modes, and so not through `run`."""
    unpaged = [
        tensor
        for tensor in tensor_arguments(plan, args, kwargs)
        if isinstance(tensor, _Tensor) and page_of(tensor) is None
    ]
    with context.core.lock:
        context.core.drain()
        with _guard():
            wrapped = wrap(context, plan, out, args, unpaged)
        if is_functional(plan):
            hold_until_boundary(context, wrapped)
        if context.core.free_bytes < 0:
            context.core.make_room(0, plan.name)
        return wrapped


def two_pagers(plan: OperatorPlan, page: Page) -> PagerError:
    """The error for operands of two pagers: neither could make room for the other's pages."""
    return PagerError(
        f"{plan.name} got operands of two pagers (the other owns {page!r}); "
        f"unpage() one of them, or use the plain copy that its pager's recover() gives"
    )
