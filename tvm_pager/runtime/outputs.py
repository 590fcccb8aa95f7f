"""How many bytes an operation will create, known before it runs.

Room must be made before an operation runs: making it afterwards exceeds the budget by the largest
output. The size is found once per signature (operator, shapes, dtypes, scalars) with meta tensors,
corrected by what the operation really created and, on CUDA, by the workspace it was seen to take.

[Note: Numbers in a signature]
    A fraction beside tensors scales values and never sizes; of it only the type counts, which
    decides on the result's dtype. AdamW hands over another one at each step
    (`addcdiv_(value=-step_size)`), and would never find what it has measured. Integers may be
    sizes, fractions in lists may be scale factors (`upsample_nearest1d.vec`), and without tensors
    `arange` has sizes made of them: these stay, except in the lists of `_foreach_*`, one of which
    is a number per tensor. `True == 1` has a type of its own too.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.runtime.schema import plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["OutputSizes"]

_GRANULARITY = 512  # the device allocator's
_LIMIT = 1 << 16  # signatures kept; a program of ever new shapes starts over instead of growing

# Operators that return a workspace whose size their meta functions do not know: up to 27 times the
# output for an LSTM.
_OPAQUE_WORKSPACE = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})
_OPAQUE_FACTOR = 32

_guard = torch._C._DisableTorchDispatch
_FRACTIONS = frozenset({float, complex})


class OutputSizes:
    """Bytes of new storages per signature. Owned by one paging context, used under its lock.

    Args:
        device_type: "cpu" or "cuda"; outputs on other devices take nothing.
        num_allocated: cumulative bytes that the device's allocator has handed out, or None where
            unknown (CPU): the difference around an operation bounds its outputs and temporaries.
    """

    def __init__(self, device_type: str, num_allocated: Callable[[], int] | None) -> None:
        self._device_type = device_type
        self.by_key: dict[Hashable, int] = {}
        self._least: dict[Hashable, int] = {}
        self._num_allocated = num_allocated

    def key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Hashable | None:
        """The operation's signature, or None if an argument cannot be part of one.

        Flat arguments give the key that dispatch.py builds inline.
        """
        parts: list[Any] = [id(func)]
        plan = plan_of(func)
        try:
            _sign(args, parts, plan)
            if kwargs:
                for name, value in kwargs.items():
                    parts.append(name)
                    _sign((value,), parts, plan)
            key = tuple(parts)
            hash(key)
        except (TypeError, RuntimeError):  # not hashable; a nested tensor, which has no shape
            return None
        return key

    def known(self, key: Hashable) -> int | None:
        return self.by_key.get(key)

    def estimate(
        self, plan: OperatorPlan, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[int, int]:
        """Bytes that a new signature's operation will create: it runs on meta tensors (30-100 us).

        Returns what it needs at least, and what to reserve where the budget has it. They differ
        where the result's shape depends on data, or the operator knows no meta tensors: nothing is
        known to be needed, and the bytes of its operands as int64, times the rank, bound everything
        that torch ships (`nonzero`).
        """
        sizes: list[int] = []
        device = (kwargs or {}).get("device")
        if device is not None and torch.device(device).type != self._device_type:
            return 0, 0  # what it creates lies elsewhere
        operand_bytes = _tensor_bytes(args, sizes) + _tensor_bytes(
            list((kwargs or {}).values()), sizes
        )
        try:
            with _guard(), torch.no_grad():
                meta_args = [_to_meta(value) for value in args]
                meta_kwargs = {
                    name: torch.device("meta") if name == "device" else _to_meta(value)
                    for name, value in (kwargs or {}).items()
                }
                inputs: dict[int, tuple[torch.UntypedStorage, int]] = {}
                _storages((meta_args, meta_kwargs), inputs)
                with warnings.catch_warnings():  # the real operation will say it too
                    warnings.simplefilter("ignore")
                    result = func(*meta_args, **meta_kwargs)
        except Exception:  # whatever is wrong shows when the real operation runs
            return 0, operand_bytes * max([1, *sizes]) if plan.num_returns else 0
        grown = sum(storage.nbytes() - nbytes for storage, nbytes in inputs.values())
        known = max(grown, 0) + _new_bytes(result, set(inputs))
        return known, known

    @staticmethod
    def cautious(plan: OperatorPlan, estimate: int, operand_bytes: int) -> int:
        """What to reserve for the first operation of a signature, as far as the budget has it.

        Meta tensors do not show workspaces, and some operators return more than they say:
        `mse_loss` on the CPU a scalar on a storage as large as its operand, recurrent layers their
        gates as an opaque workspace.
        """
        if plan.name.partition(".")[0] in _OPAQUE_WORKSPACE:
            return _OPAQUE_FACTOR * estimate + 2 * operand_bytes
        return estimate + operand_bytes

    def observe(self, key: Hashable, created_bytes: int, allocated_bytes: int | None) -> None:
        """Remembers what the first operation of a signature took.

        Outputs are what it needs at least; temporaries, where they are known, what it should have.
        """
        if len(self.by_key) >= _LIMIT:
            self.by_key.clear()
            self._least.clear()
        self.by_key[key] = max(created_bytes, allocated_bytes or 0)
        self._least[key] = created_bytes

    def least(self, key: Hashable) -> int:
        """Bytes without which an operation of a known signature cannot run."""
        return self._least[key]

    def allocated_bytes(self) -> int | None:
        return None if self._num_allocated is None else self._num_allocated()


def _sign(values: Sequence[Any], parts: list[Any], plan: OperatorPlan) -> None:
    """See [Note: Numbers in a signature]."""
    takes_tensors = plan.tensor_positions or plan.list_positions
    for value in values:
        kind = value.__class__
        if isinstance(value, torch.Tensor):
            parts.append(value.shape)
            parts.append(value.dtype)
        elif isinstance(value, (list, tuple)):
            parts.append(_signed_list(value, plan))
        elif isinstance(value, torch.UntypedStorage):
            parts.append(value.nbytes())  # the object itself would live as long as the signature
        elif kind is torch.Generator:
            parts.append(kind)  # likewise
        elif kind is bool or (kind in _FRACTIONS and not takes_tensors):
            parts.append(kind)
            parts.append(value)
        else:
            parts.append(kind if kind in _FRACTIONS else value)


def _signed_list(values: Sequence[Any], plan: OperatorPlan) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append(value.shape)
            parts.append(value.dtype)
        elif isinstance(value, (list, tuple)):
            parts.append(_signed_list(value, plan))
        else:
            kind = value.__class__
            parts.append(kind if plan.is_foreach and kind in _FRACTIONS else value)
    return tuple(parts)


def _tensor_bytes(values: Sequence[Any], ranks: list[int]) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                continue  # its components are unpaged, and its shape says nothing about their size
            ranks.append(value.dim())
            total += max(value.numel() * max(value.element_size(), 8), _GRANULARITY)
        elif isinstance(value, (list, tuple)):
            total += _tensor_bytes(value, ranks)
    return total


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_to_meta(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _storages(value: Any, found: dict[int, tuple[torch.UntypedStorage, int]]) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        found[storage._cdata] = (storage, storage.nbytes())
    elif isinstance(value, (list, tuple)):
        for item in value:
            _storages(item, found)
    elif isinstance(value, dict):
        _storages(list(value.values()), found)


def _new_bytes(result: Any, known: set[int]) -> int:
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided:
            return 0
        storage = result.untyped_storage()
        if storage._cdata in known:
            return 0
        known.add(storage._cdata)
        return -(-storage.nbytes() // _GRANULARITY) * _GRANULARITY
    if isinstance(result, (list, tuple)):
        return sum(_new_bytes(item, known) for item in result)
    return 0
