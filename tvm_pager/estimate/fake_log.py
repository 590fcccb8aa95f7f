"""Operations and storages of a program that runs without memory, as they come.

[Note: Host scalars]
    The CPU stands in for the device, so nothing tells a scalar in host memory (a step counter of
    AdamW) from device memory, except that the fake mode knows the value of what was made of a
    Python number, and computes on with it. Those are no pages, unless a module owns them.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tvm_pager.errors import TraceError
from tvm_pager.memory import PageKind
from tvm_pager.runtime.schema import plan_of, tensor_arguments, written_tensors
from tvm_pager.runtime.storage import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tvm_pager.estimate.op_times import OpTimes
    from tvm_pager.planning import Phase
    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["FakeLog", "FakePage", "LoggedOp"]

_ATTRIBUTE = "_tvm_fake_page"


class FakePage:
    """One storage, while it lives and after."""

    __slots__ = ("born", "died", "dtype", "kind", "module", "name", "nbytes", "reference")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype, born: int) -> None:
        self.nbytes: int = storage.nbytes()
        self.dtype = dtype
        self.born = born  # tick of the entry that it was first seen at
        self.kind = PageKind.OTHER
        self.name = ""
        self.module = -1
        self.died: int | None = None  # tick of the first entry that it was dead at
        self.reference: Any = None


class _Reference(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("page",)

    page: FakePage


class LoggedOp(NamedTuple):
    """One operation; its fields are those of `TraceOp`."""

    tick: int
    name: str
    reads: tuple[FakePage, ...]
    writes: tuple[FakePage, ...]
    creates: tuple[FakePage, ...]
    compute_ns: int
    phase: Phase
    module: int
    is_replayable: bool


class FakeLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Logs what runs under it and under a `FakeTensorMode` below it.

    Args:
        place: phase and module of the operation that runs now.
        times: models how long an operation takes.
    """

    def __init__(self, place: Callable[[], tuple[Phase, int]], times: OpTimes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[LoggedOp] = []
        self.pages: list[FakePage] = []
        self.is_recording = False
        self._place = place
        self._times = times
        self._now = -1
        # Storages die on any line; the queue orders their deaths among the operations.
        self._dead: deque[_Reference] = deque()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; torch's wrapper costs 2 us an operation

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a fake tensor for its device, say: no operation
            return func(*args, **kwargs)
        plan = plan_of(func)
        tick = self.tick()
        # Before the operation: one that writes a scalar in place may take its known value away.
        operands = _paged(plan, tensor_arguments(plan, args, kwargs))
        written = _paged(plan, written_tensors(plan, args, kwargs))
        reads, writes = self._pages_of(operands), self._pages_of(written)
        out = func(*args, **kwargs)
        num_known = len(self.pages)
        self._pages_of(_paged(plan, _tensors_in(out)))
        creates = tuple(self.pages[num_known:])
        for value in written:  # `resize_` and `out=` may have enlarged it
            page = getattr(storage_of(value), _ATTRIBUTE)
            page.nbytes = max(page.nbytes, storage_of(value).nbytes())
        if self.is_recording and (reads or creates):
            compute_ns = 0
            if creates or writes:
                compute_ns = self._times.nanoseconds(plan, args, kwargs, out, operands, written)
            replayable = _is_replayable(plan, args, kwargs)
            self.ops.append(
                LoggedOp(
                    tick, plan.name, reads, writes, creates, compute_ns, *self._place(), replayable
                )
            )
        return out

    def tick(self) -> int:
        """A moment between two operations: everything dead by now died before it."""
        self._now += 1
        while self._dead:
            self._dead.popleft().page.died = self._now
        return self._now

    def classify(self, tensor: torch.Tensor, kind: PageKind, name: str, module: int) -> None:
        """Records what the page of a tensor holds."""
        is_owned = kind is PageKind.PARAM or kind is PageKind.BUFFER
        if isinstance(tensor, FakeTensor) and (is_owned or not _is_host_scalar(tensor)):
            (page,) = self._pages_of([tensor])
            page.kind, page.module = kind, module
            page.name = page.name or name

    def _pages_of(self, tensors: Iterable[torch.Tensor]) -> tuple[FakePage, ...]:
        """The pages of the tensors, each once; new ones enter the books."""
        found: dict[FakePage, None] = {}
        for tensor in tensors:
            try:
                storage = storage_of(tensor)
            except (NotImplementedError, RuntimeError):  # sparse and other layouts have none
                continue
            page = getattr(storage, _ATTRIBUTE, None)
            if page is None:
                page = FakePage(storage, tensor.dtype, self._now)
                page.reference = _Reference(storage, self._dead.append)
                page.reference.page = page
                storage._tvm_fake_page = page  # type: ignore[attr-defined]
                self.pages.append(page)
            found[page] = None
        return tuple(found)


def _paged(plan: OperatorPlan, values: Iterable[Any]) -> list[torch.Tensor]:
    """Those of the operands or results that lie in device memory.

    Raises:
        TraceError: one of them has bytes.
    """
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, FakeTensor):
            if not _is_host_scalar(value):
                found.append(value)
        elif isinstance(value, torch.Tensor) and "lift_fresh" not in plan.name:
            raise TraceError(
                f"{plan.name} uses a tensor of shape {tuple(value.shape)} and {value.dtype} that "
                "was made outside of the program to trace; make the model, the optimizer and the "
                "batch inside it, so that they have no bytes"
            )
    return found


def _is_host_scalar(tensor: FakeTensor) -> bool:
    """See [Note: Host scalars]."""
    if tensor.constant is None or tensor.dim():
        return False
    return getattr(storage_of(tensor), _ATTRIBUTE, None) is None


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)


def _is_replayable(plan: OperatorPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation gives the same bytes again; see `TraceOp`."""
    if plan.writes or plan.name.startswith(_UNDEFINED):
        return False
    if not plan.is_seeded:
        return True
    # Attention counts as random whatever its dropout is; without any it draws nothing.
    if "dropout_p" not in plan.argument_names:
        return False
    place = plan.argument_names.index("dropout_p")
    value = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(value == 0.0)


_UNDEFINED = ("aten::empty", "aten::new_empty")  # they give whatever bytes lay there
