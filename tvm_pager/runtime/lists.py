"""Operators over lists of tensors may name more than fits: split, with bitwise equal results.

`_foreach_*` and `_fused_*` treat each index alone, so a call over a list is the same as calls over
its slices. `cat` and `stack` only copy, so they are the same as one allocation and a copy per
operand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.runtime.call import Call
    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["run_split"]

_aten = torch.ops.aten


def run_split(run: Callable[..., Any], call: Call) -> Any:
    """Runs a list operator in parts that fit, through `run`.

    NotImplemented if the operator cannot be split.
    """
    name = call.plan.name
    if name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")):
        return _run_chunks(run, call)
    if name in ("aten::cat.default", "aten::stack.default") and len(call.args[0]) > 1:
        return _run_copies(run, call, stacks=name.startswith("aten::stack"))
    return NotImplemented


def _run_chunks(run: Callable[..., Any], call: Call) -> Any:
    args, plan = call.args, call.plan
    length = len(args[0])
    if length < 2:
        return NotImplemented
    core = call.context.core
    capacity = core.budget_bytes - core.overhead_bytes - core.pinned_bytes(())
    results: list[Any] = []
    for begin, end in _chunks(plan, args, length, capacity):
        part = tuple(_slice(value, begin, end, length) for value in args)
        named = {
            name: _slice(value, begin, end, length) for name, value in (call.kwargs or {}).items()
        }
        result = run(call.func, part, named, call.context)
        if result is not None:
            results.extend(result)
    return results if plan.num_returns else None


def _chunks(
    plan: OperatorPlan, args: Sequence[Any], length: int, capacity_bytes: int
) -> list[tuple[int, int]]:
    """Index ranges whose operands, outputs and as much again for temporaries fit."""
    chunks: list[tuple[int, int]] = []
    begin, taken = 0, 0
    for index in range(length):
        pages = {}
        for position in plan.list_positions:
            values = args[position] if position < len(args) else ()
            if len(values) == length and isinstance(values[index], torch.Tensor):
                page = page_of(values[index])
                if page is not None:
                    pages[page.id] = page.frame_bytes
        need = sum(pages.values()) * (2 if plan.num_returns else 1)
        if index > begin and taken + need > capacity_bytes // 2:
            chunks.append((begin, index))
            begin, taken = index, 0
        taken += need
    chunks.append((begin, length))
    return chunks


def _slice(value: Any, begin: int, end: int, length: int) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == length:
        return list(value[begin:end])
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == length:
        return value[begin:end]  # `_foreach_addcmul_.Tensor` takes its scalars so
    return value


def _run_copies(run: Callable[..., Any], call: Call, *, stacks: bool) -> Any:
    args, context = call.args, call.context
    tensors = list(args[0])
    dim = args[1] if len(args) > 1 else 0
    with torch._C._DisableTorchDispatch():
        meta = call.func(
            [
                torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
                for t in tensors
            ],
            dim,
        )
    dim %= meta.dim()
    out = run(
        _aten.new_empty_strided.default,
        (tensors[0], list(meta.size()), list(meta.stride())),
        {"dtype": meta.dtype},
        context,
    )
    position = 0
    for tensor in tensors:
        if stacks:
            target = run(_aten.select.int, (out, dim, position), None, context)
            position += 1
        elif tensor.dim() == 1 and tensor.numel() == 0:
            continue  # `cat` ignores such operands, whatever the others' shape
        else:
            size = tensor.size(dim)
            target = run(_aten.slice.Tensor, (out, dim, position, position + size), None, context)
            position += size
        run(_aten.copy_.default, (target, tensor), None, context)
    return out
