"""Collectives work on their tensors after they have returned: pages stay until the `Work` is done.

[Note: The end of a collective]
    Each operator of `c10d` gives a `Work`, or none where the backend has synchronised by itself.
    The `Work` is asked (`is_completed`), not its future alone: on CUDA a future is done when the
    kernels are enqueued. On the CPU the future may know more (the `Work` of the fake backend never
    completes). A `Work` without a future tells nothing before somebody has waited for it, or ever
    (gloo: what two ranks exchange; `reduce_scatter`), so an iteration boundary ends its hold, like
    that of an escaped pointer. Likewise for operations that are being coalesced: they start
    together, later, and their own `Work` means nothing. A request that lacks room waits for
    collectives, but not for what two ranks exchange: that may wait for what this rank has yet to
    send.

[Note: Functional collectives]
    An operator of `_c10d_functional` is a clone or an allocation and an operator of `c10d`, whose
    `Work` only C++ ever sees. So it is run as what it is made of: each part comes back through the
    rules, the result is a page before the collective writes it, and the `Work` is found as above.
    `wait_tensor` finds the `Work` by the storage, which is the same object wherever the bytes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.memory import Page
    from tvm_pager.runtime.call import Call
    from tvm_pager.runtime.context import PagingContext
    from tvm_pager.runtime.schema import OperatorPlan

__all__ = [
    "Collective",
    "hold_until_boundary",
    "hold_until_done",
    "is_functional",
    "run_functional",
]

_FUNCTIONAL = ("_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
# They start nothing, or coalesce what they start.
_WHOLE = ("wait_tensor", "_wrap_tensor_autograd", "batch_p2p_ops")
_BETWEEN_TWO = ("c10d::send", "c10d::recv")


@dataclass(slots=True)
class Collective:
    """A collective in flight, as the pager sees it: `paging.holds.OutsideWork`."""

    pages: Sequence[Page]
    written: Sequence[Page]
    # Keeps the operands, perhaps, until the pager has seen the end.
    work: Any = None
    future: Any = None  # where its end is the work's
    is_awaitable: bool = False
    ends_at_boundary: bool = True

    def done(self) -> bool:
        """Whether the `Work` says so; False if there is none to be asked."""
        return self.work is not None and (
            self.work.is_completed() or (self.future is not None and self.future.done())
        )


def hold_until_done(call: Call, out: Any, pages: Sequence[Page]) -> None:
    """Holds the operands of an operator of `c10d` until its `Work` is done. The lock is held.

    See [Note: The end of a collective].
    """
    work = _work_in(out)
    is_coalescing = _is_coalescing()
    if not pages or (work is None and not is_coalescing):
        return
    named = map(page_of, call.written())
    collective = Collective(
        pages, [*{page.id: page for page in named if page is not None}.values()]
    )
    if not is_coalescing:
        future = _future_of(work)
        is_between_two = call.plan.name.startswith(_BETWEEN_TWO)
        if future is not None or is_between_two:
            collective.work = work
            collective.future = future if call.context.is_cpu else None
        collective.ends_at_boundary = future is None
        collective.is_awaitable = future is not None and not is_between_two
    call.context.core.holds.add(collective)


def hold_until_boundary(context: PagingContext, out: Any) -> None:
    """Holds the pages of what a collective gave whose `Work` was not seen. The lock is held."""
    tensors = out if isinstance(out, (list, tuple)) else (out,)
    pages = [page for page in map(page_of, tensors) if page is not None]
    if pages:
        context.core.holds.add(Collective(pages, pages))


def _future_of(work: Any) -> Any:
    try:
        return work.get_future()
    except RuntimeError:  # "not implemented"
        return None


def _work_in(out: Any) -> Any:
    """The `Work` in an operator's result: its last, or only, item. None where there is none."""
    last = out[-1] if isinstance(out, tuple) and out else out
    return torch.distributed.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None


def _is_coalescing() -> bool:
    """Whether operations are being gathered that start together later (`batch_isend_irecv`)."""
    # Private, for want of a public query.
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return bool(getattr(world, "pg_coalesce_state", None))


def is_functional(plan: OperatorPlan) -> bool:
    """Whether the operator is a functional collective, to be run by `run_functional`."""
    name = plan.name
    return name.startswith(_FUNCTIONAL) and not name.partition("::")[2].startswith(_WHOLE)


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Sends each part of a composite through the rules; sees factories, which no operand marks."""

    def __init__(self, run: Callable[..., Any], context: PagingContext) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._context = context

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under a pager

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._run(func, args, kwargs, self._context)


def run_functional(run: Callable[..., Any], call: Call) -> Any:
    """Runs a functional collective as its parts, each through `run`; see the note above.

    Without the lock: starting the first collective of a group may wait for the other ranks.
    """
    key = torch._C.DispatchKey.CPU if call.context.is_cpu else torch._C.DispatchKey.CUDA
    with _Parts(run, call.context):
        return call.func.redispatch(torch._C.DispatchKeySet(key), *call.args, **(call.kwargs or {}))
