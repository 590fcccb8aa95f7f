"""Every operation on paged tensors enters here.

[Note: What one operation costs]
    Plain `torch.add` of 8x8 takes 1.1 us here and torch needs 5 us more to call any Python
    dispatch, so the rules have about 4 us. Therefore `run` has a fast path for the common case
    (flat operands, all resident, nothing written, outputs that provably fit): one plan per
    operator, one flat loop over its tensor positions, uses that are journalled and replayed to the
    policy later, no pins under the lock, no frame between us and the kernel. Measure with
    tools/bench_dispatch.py.

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

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvm_pager.memory import PageState
from tvm_pager.paging.pager import UNLIMITED_BYTES
from tvm_pager.paging.tier_policy import JOURNAL_LIMIT
from tvm_pager.runtime.execution import adopt_results, run_operator
from tvm_pager.runtime.results import tensor_class, wrap
from tvm_pager.runtime.schema import known_plans, plan_of
from tvm_pager.runtime.storage import PAGE_ATTRIBUTE, page_of_storage, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import Page
    from tvm_pager.runtime.context import PagingContext

__all__ = ["PagingMode", "run"]

_guard = torch._C._DisableTorchDispatch
_exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
_python_key = torch._C.DispatchKey.Python
_make_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_subclass
_num_modes = torch._C._len_torch_dispatch_stack
_Tensor = torch.Tensor
_new_empty = torch.ops.aten.new_empty.default
_lift_fresh = torch.ops.aten.lift_fresh.default
_NONE_UNPAGED: list[torch.Tensor] = []
_RESIDENT = PageState.RESIDENT
_POINTWISE_ITEM_BYTES = 16  # complex128, the widest result a pointwise operator can give


class PagingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Makes pages of what factories and plain operands give while a pager's context is open."""

    def __init__(self, context: PagingContext) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method below to keep Dynamo out, at 2 us an operation; nothing is
        # compiled under a pager.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for cls in types:
            if cls is not tensor_class.paged and cls is not _Tensor:
                # A foreign subclass; its components come back here.
                return func(*args, **(kwargs or {}))
        if _num_modes():
            # Modes below must see the operation, and the guard would silence them.
            out = func(*args, **(kwargs or {}))
            return adopt_results(self._context, plan_of(func), args, kwargs, out)
        return run(func, args, kwargs, self._context)


def run(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, active: PagingContext | None
) -> Any:
    """Runs one operator with its operands resident.

    `active` is the open context, which owns what factories give.
    """
    func_id = id(func)
    plan = known_plans.get(func_id)
    if plan is None or not plan.is_flat:
        if func is _lift_fresh and active is not None and args[0].__class__ is _Tensor:
            return _lift(active, args[0])
        if func is _new_empty and not args[1] and args[0].__class__ is not tensor_class.paged:
            # `Tensor.__deepcopy__` of an unpaged tensor makes its result so, and insists on the
            # class.
            with _guard():
                return func(*args, **(kwargs or {}))
        return run_operator(func, args, kwargs, active)
    pages: list[Page] = []
    # Broadcasting cannot exceed the product of the sizes; a view creates nothing.
    creates = plan.creates
    bound = _POINTWISE_ITEM_BYTES if creates else 0
    num_args = len(args)
    for position in plan.tensor_positions:
        if position >= num_args:
            break
        value = args[position]
        if isinstance(value, _Tensor):
            try:
                page = storage_of(value)._tvm_page  # type: ignore[attr-defined]
            except (AttributeError, NotImplementedError, RuntimeError):
                return run_operator(func, args, kwargs, active)  # unpaged, sparse and the like
            bound *= value.numel()
            pages.append(page)
    if not pages:
        return run_operator(func, args, kwargs, active)
    context: PagingContext = page.pager
    core = context.core
    lock = core.lock
    lock.acquire()
    try:
        if core.dead or core.dead_exports:
            core.drain()
        table = core.table
        free = core.budget_bytes - table.device_used_bytes - core.overhead_bytes
        needs_signature = not plan.is_pointwise if creates else not context.is_cpu and plan.writes
        if (bound > free or needs_signature) and (creates or plan.writes):
            bound = _known_bytes(context, func_id, args, kwargs)
        is_fast = (
            bound <= free
            and context.check < 2
            and table.committed_bytes + bound <= core.commit_limit_bytes
            and (
                context.current_executor is None
                or (context.current_executor() == context.owner_executor and not plan.is_seeded)
            )
        )
        for page in pages:
            if page.state is not _RESIDENT or page.pager is not context or page.executors:
                is_fast = False
        if plan.writes:
            for place in plan.written:
                value = args[place] if place < num_args else None  # type: ignore[index, operator]
                if value is not None and storage_of(value)._tvm_page.has_copies:  # type: ignore[attr-defined]
                    is_fast = False
        if not is_fast:
            return run_operator(func, args, kwargs, active)
        core.operation_index += 1
        running = core.running
        running.append(pages)
        _exclude_key(_python_key, True)
        try:
            out = plan.call(*args, **kwargs) if kwargs else plan.call(*args)
            if out.__class__ is _Tensor and not (creates and not plan.is_pointwise):
                if creates:
                    storage = storage_of(out)
                    # Some operators give a view of an operand after all.
                    if getattr(storage, PAGE_ATTRIBUTE, None) is None:
                        if not context.owns_device(out):
                            return out
                        context.adopt_storage(storage)
                out = _make_subclass(tensor_class.paged, out)
            elif out.__class__ is not tensor_class.paged:
                out = wrap(context, plan, out, args, _NONE_UNPAGED)
        except torch.OutOfMemoryError:
            if plan.writes:
                raise
            is_fast = False  # `run_operator` evicts and tries again
        finally:
            _exclude_key(_python_key, False)
            running.pop()
            journal = core.device_policy.journal
            journal += pages
            if len(journal) > JOURNAL_LIMIT:
                core.device_policy.trim()
                core.sample_overhead()
        return out if is_fast else run_operator(func, args, kwargs, active)
    finally:
        lock.release()


def _known_bytes(
    context: PagingContext, func_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> int:
    """What this signature took before; `OutputSizes.key` for flat arguments, without its calls."""
    parts: list[Any] = [func_id]
    for value in args:
        if isinstance(value, _Tensor):
            parts.append(value.shape)
            parts.append(value.dtype)
        else:
            parts.append(tuple(value) if value.__class__ is list else value)
    if kwargs:
        for item in kwargs.items():
            parts += item
    try:
        return context.sizes.by_key.get(tuple(parts), UNLIMITED_BYTES)
    except TypeError:
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
                # On the CPU it enters the books; on CUDA the allocator has counted it already.
                nbytes = -(-storage.nbytes() // 512) * 512 if context.is_cpu else 0
                context.core.admit([], nbytes, "torch.tensor")
                if context.adopt_storage(storage) is None:
                    return out
        return _make_subclass(tensor_class.paged, out)
