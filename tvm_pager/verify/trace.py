"""Every operation of one step with digests of its operands and results, one JSON line each.

The lines are `Operation`s. Operations that only make views, or memory that nobody has filled yet,
compute nothing and are left out; a paged run may have more or fewer of them.
"""

from __future__ import annotations

import itertools
import linecache
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvm_pager.verify.operation import Operation
from tvm_pager.verify.record import write_line
from tvm_pager.verify.tensor_bytes import describe, leaves, parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tvm_pager.verify.watch import Watch

__all__ = ["Trace"]

_MAX_FRAMES = 4  # of the script, the innermost
# No part of the script: torch, this package, and what runs the script.
_NOT_SHOWN = (
    str(Path(torch.__file__).resolve().parent) + os.sep,
    str(Path(__file__).resolve().parents[1]) + os.sep,
    runpy.__file__,
    "<",
)
_UNFILLED = ("empty", "new_empty", "resize", "set_", "_efficientzerotensor")
# What these write to may be unfilled memory, which differs from run to run.
_OVERWRITING = frozenset(
    [
        *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"),
        *("normal_", "random_", "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_"),
    ]
)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes the operations of one step of the watched script while the context is open.

    Args:
        watch: says which step is under way.
        step: to be traced, from 1.
        lines: one line per operation is appended.
    """

    def __init__(self, watch: Watch, step: int, lines: IO[bytes]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch
        self._step = step
        self._lines = lines
        self._kinds: dict[Any, tuple[bool, frozenset[int]]] = {}
        self._lock = threading.Lock()  # backward runs operations on threads of its own
        self._process = os.getpid()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operation; reads its operands before and its results after."""
        kwargs = kwargs or {}
        computes, unread = self._kind_of(func)
        is_now = (
            self._watch.step == self._step
            and not self._watch.is_recording
            and os.getpid() == self._process
        )
        if not (is_now and computes):
            return func(*args, **kwargs)
        operands = _describe(
            [value for position, value in enumerate(args) if position not in unread]
            + [value for name, value in kwargs.items() if name != "out"]
        )
        out = func(*args, **kwargs)
        node = torch._C._current_autograd_node()
        operation = Operation(
            name=str(func),
            module=self._watch.innermost_call(),
            node="" if node is None else node.name(),
            operands=operands,
            results=_describe(out),
            stack=_stack(),
        )
        with self._lock:
            write_line(self._lines, operation.to_list())
        return out

    def _kind_of(self, func: Any) -> tuple[bool, frozenset[int]]:
        """Whether an operator computes anything, and which positions it may find unfilled."""
        kind = self._kinds.get(func)
        if kind is None:
            space, _, name = func._schema.name.partition("::")
            returns = [one.alias_info for one in func._schema.returns]
            is_view = bool(returns) and all(one and not one.is_write for one in returns)
            is_idle = space == "profiler" or name == "lift_fresh" or name.startswith(_UNFILLED)
            computes = not (is_view or is_idle)
            unread = frozenset(
                index
                for index, one in enumerate(func._schema.arguments)
                if one.alias_info is not None and one.alias_info.is_write and name in _OVERWRITING
            )
            kind = self._kinds[func] = (computes, unread)
        return kind


def _describe(value: Any) -> list[tuple[str, tuple[int, ...], str]]:
    return [describe(part) for _, leaf in leaves("", value) for _, part in parts("", leaf)]


def _stack() -> list[str]:
    """The innermost lines of the script and its libraries, the innermost first."""
    here = os.getcwd() + os.sep
    return [
        f"{file.removeprefix(here)}:{line} in {name}: {linecache.getline(file, line).strip()}"
        for file, line, name in itertools.islice(_frames(), _MAX_FRAMES)
    ]


def _frames() -> Iterator[tuple[str, int, str]]:
    frame = sys._getframe(1)
    while (back := frame.f_back) is not None:
        frame = back
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_SHOWN):
            yield file, frame.f_lineno, frame.f_code.co_name
