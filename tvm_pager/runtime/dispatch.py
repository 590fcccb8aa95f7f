"""Every operation on paged tensors enters here.

[Note: What one operation costs]
    `torch.add` of 8x8, on a quiet core: plain 1.1 us; torch's way into a Python mode and back 2.5;
    the kernel through it and the paged result 2.7; finding operands, lock, journal and its replay
    2.4; the page's birth and death 1.7. So what counts is the number of steps in Python and of
    calls into C; docs/performance.md has what each idea gave. The fast path is `dispatch`: flat
    operands, all resident or on their way in stream order, outputs that provably fit. One
    plan per operator, one flat loop over its tensor positions, torch's own Python function instead
    of the boxed operator (bindings.py), uses that are journalled and replayed to the policy later,
    no pins under the lock, nothing to fit in where there is no budget, no members of enumerations
    (30 ns each in Python 3.11). Measure with tools/bench_dispatch.py.

[Note: Order of the rules]
    1. Under the lock: operands resident, room for what the operation creates, commit checked
       (`DemandPager.admit`).
    2. Dirty bits before the operation runs: it may write and then raise.
    3. The operation, below torch's dispatch, on the very same tensor objects.
    4. Storages that it created become pages; storages that an unpaged argument owns do not, nor do
       their views.
    5. Written storages are compared with the books: `resize_` and `out=` change their size.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvm_pager.memory import PageState
from tvm_pager.paging.pager import UNLIMITED_BYTES
from tvm_pager.paging.tier_policy import JOURNAL_LIMIT
from tvm_pager.runtime.execution import adopt_results, run_operator
from tvm_pager.runtime.results import tensor_class, wrap
from tvm_pager.runtime.schema import known_plans, plan_of
from tvm_pager.runtime.storage import PAGE_ATTRIBUTE, page_of, page_of_storage, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import Page
    from tvm_pager.paging import DemandPager
    from tvm_pager.runtime.context import PagingContext
    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["PagingMode", "dispatch"]

_guard = torch._C._DisableTorchDispatch
# Calls a function below dispatch: the guard and the call in one (0.1 us).
_below: Callable[..., Any] = torch._C._disabled_torch_dispatch_impl
_num_modes = torch._C._len_torch_dispatch_stack
_Tensor = torch.Tensor
_Generator = torch.Generator
_new_empty = torch.ops.aten.new_empty.default
_lift_fresh = torch.ops.aten.lift_fresh.default
_NONE_UNPAGED: list[torch.Tensor] = []
_RESIDENT, _WRITING_BACK = PageState.RESIDENT, PageState.WRITING_BACK
_FETCHING = PageState.FETCHING
_POINTWISE_ITEM_BYTES = 16  # complex128, the widest result a pointwise operator can give


def dispatch(
    owner: Any,
    func: Any,
    types: tuple[type, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The `__torch_dispatch__` of a `PagingMode` and of `PagedTensor`; `owner` is one of them.

    Runs one operator with its operands resident.
    """
    paged = tensor_class.paged
    if len(types) != 1 or types[0] is not paged or _num_modes():
        return _dispatch_others(owner, func, types, args, kwargs)
    plan = known_plans.get(id(func))
    if plan is None or not plan.is_flat:
        return run_operator(func, args, kwargs, _active(owner))
    pages: list[Page] = []
    num_args = len(args)
    try:
        for position in plan.tensor_positions:
            if position >= num_args:
                break
            value = args[position]
            if value.__class__ is paged:
                pages.append(storage_of(value)._tvm_page)  # type: ignore[attr-defined]
            elif isinstance(value, _Tensor):
                return run_operator(func, args, kwargs, _active(owner))
        context: PagingContext = pages[0].pager
    except (AttributeError, IndexError, NotImplementedError, RuntimeError):
        return run_operator(func, args, kwargs, _active(owner))  # unpaged, sparse and the like
    core = context.core
    core.lock.acquire()
    running = core.running
    running.append(pages)
    try:
        if core.dead or core.dead_exports:
            core.drain()
        watch = core.watch  # before anything is asked of the pages: it may move some
        is_fast = (watch is None or watch(plan.name, pages)) and (
            (core.budget_bytes == UNLIMITED_BYTES and context.is_simple)
            or _fits(context, plan, args, kwargs)
        )
        for page in pages:
            if (
                page.state is not _RESIDENT
                or page.pager is not context
                or page.executors is not None
                or (page.has_copies and plan.writes)
            ):
                is_fast = is_fast and _is_ready(context, plan, args, page)
        if is_fast:
            policy = core.device_policy
            if len(policy.journal) > JOURNAL_LIMIT:
                _catch_up(core)
            policy.journal.append(pages)
            call = plan.call
            out = _below(call, types, args, kwargs) if kwargs else _below(call, types, args)
            if out.__class__ is paged:
                return out
            if out.__class__ is not _Tensor or (plan.creates and not plan.is_pointwise):
                return wrap(context, plan, out, args, _NONE_UNPAGED)
            # Some operators give a view of an operand after all.
            if (
                plan.creates
                and getattr(storage := storage_of(out), PAGE_ATTRIBUTE, None) is None
                and context.adopt_storage(storage) is None
            ):
                return out
            return out.as_subclass(paged)
    except torch.OutOfMemoryError:
        if plan.writes:
            raise  # else the general path evicts and tries again
    finally:
        running.pop()
        core.lock.release()
    return run_operator(func, args, kwargs, _active(owner), watch is not None)


class PagingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Makes pages of what factories and plain operands give while a pager's context is open."""

    __torch_dispatch__ = dispatch

    def __init__(self, context: PagingContext) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.context = context

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method above to keep Dynamo out, at 2 us an operation; nothing is
        # compiled under a pager.
        return False


def _active(owner: Any) -> PagingContext | None:
    """The open context, which owns what factories give."""
    return owner.context if isinstance(owner, PagingMode) and not owner.context.is_closed else None


def _dispatch_others(
    owner: Any, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Operations without paged operands, with foreign ones, and those that other modes must see."""
    active = _active(owner)
    if active is None and isinstance(owner, PagingMode):
        return func(*args, **(kwargs or {}))  # closed, as in a forked child: as if it were not here
    for cls in types:
        if cls is not tensor_class.paged and cls is not _Tensor:
            if active is None:
                return NotImplemented  # a foreign subclass knows its own components
            # A foreign subclass; its components come back here.
            return func(*args, **(kwargs or {}))
    if active is not None and _num_modes():
        # Modes below must see the operation, and the guard would silence them.
        out = func(*args, **(kwargs or {}))
        return adopt_results(active, plan_of(func), args, kwargs, out)
    if args and args[0].__class__ is _Tensor:
        if func is _lift_fresh and active is not None:
            return _lift(active, args[0])
        if func is _new_empty and not args[1]:
            # `Tensor.__deepcopy__` of an unpaged tensor makes its result so, and insists on the
            # class.
            with _guard():
                return func(*args, **(kwargs or {}))
    return run_operator(func, args, kwargs, active)


def _fits(context: PagingContext, plan: OperatorPlan, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether the fast path may run an operation that has a budget, a stream or a check to heed.

    If so there is room for what it creates. The lock is held.
    """
    executor = context.current_executor
    if context.check > 1 or (
        executor is not None and (plan.is_seeded or executor() != context.owner_executor)
    ):
        return False
    core = context.core
    if core.budget_bytes == UNLIMITED_BYTES or not (plan.creates or plan.writes):
        return True
    table = core.table
    free = core.budget_bytes - table.device_used_bytes - core.overhead_bytes
    bound = 0
    if plan.creates and plan.is_pointwise:
        # Broadcasting cannot exceed the product of the sizes.
        bound = _POINTWISE_ITEM_BYTES
        for position in plan.tensor_positions:
            if position < len(args) and isinstance(args[position], _Tensor):
                bound *= args[position].numel()
    if bound > free or not (plan.is_pointwise or (context.is_cpu and not plan.creates)):
        bound = _known_bytes(context, id(plan.operator), args, kwargs)
    return bound <= free and table.committed_bytes + bound <= core.commit_limit_bytes


def _is_ready(
    context: PagingContext, plan: OperatorPlan, args: tuple[Any, ...], page: Page
) -> bool:
    """Whether the fast path may use an operand, after what that takes and nobody waits for.

    Lets the operation come after a fetch in stream order, and says that copies below are about to
    be stale. The lock is held.

    Raises:
        TransferError: its fetch has failed.
    """
    core = context.core
    if page.pager is not context or page.executors is not None or core.flight.checker is not None:
        return False
    if page.state is _FETCHING:
        for ticket in page.tickets:
            if not ticket.is_certain:
                return False
        core.flight.arrive(page)
    if plan.writes and _writes(plan, args, page):
        if page.state is not _RESIDENT or page.has_source:
            return False
        core.written(page)
    return page.state is _RESIDENT or page.state is _WRITING_BACK


def _writes(plan: OperatorPlan, args: tuple[Any, ...], page: Page) -> bool:
    """Whether the operation may write the page."""
    written = (args[place] for place in plan.written if type(place) is int and place < len(args))
    return any(value is not None and page_of(value) is page for value in written)


def _catch_up(core: DemandPager) -> None:
    core.device_policy.replay()
    if core.budget_bytes != UNLIMITED_BYTES:
        core.sample_overhead()


def _known_bytes(
    context: PagingContext, func_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> int:
    """What this signature took before; `OutputSizes.key` for flat arguments, without its calls."""
    parts: list[Any] = [func_id]
    try:
        for value in (*args, *itertools.chain.from_iterable(kwargs.items())) if kwargs else args:
            kind = value.__class__
            if isinstance(value, _Tensor):
                parts.append(value.shape)
                parts.append(value.dtype)
            elif kind is float or kind is complex or kind is _Generator:
                parts.append(kind)
            else:
                if kind is bool:
                    parts.append(kind)
                parts.append(tuple(value) if kind is list else value)
        return context.sizes.by_key.get(tuple(parts), UNLIMITED_BYTES)
    except (TypeError, RuntimeError):  # not hashable; a nested tensor, which has no shape
        return UNLIMITED_BYTES


def _lift(context: PagingContext, fresh: torch.Tensor) -> torch.Tensor:
    """`torch.tensor` made a tensor outside dispatch, which belongs to nobody yet: now a page."""
    with _guard():
        out: torch.Tensor = _lift_fresh(fresh)
        if not context.owns_device(out) or out.layout is not torch.strided:
            return out
        storage = storage_of(out)
        with context.core.lock:
            if page_of_storage(storage) is None:
                if context.core.watch is not None:
                    context.core.iterations.enter("aten::lift_fresh.default", [])
                # On the CPU it enters the books; on CUDA the allocator has counted it already.
                nbytes = -(-storage.nbytes() // 512) * 512 if context.is_cpu else 0
                context.core.admit([], nbytes, "torch.tensor")
                if context.adopt_storage(storage) is None:
                    return out
        return out.as_subclass(tensor_class.paged)
