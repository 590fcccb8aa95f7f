"""A foreign tensor subclass: its bytes lie in two fields, and it has no storage of its own."""

from __future__ import annotations

from typing import Any

import torch


class Quantised(torch.Tensor):
    """A weight of two fields, as quantisation libraries make them: integers and their scales."""

    payload: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scales: torch.Tensor) -> Quantised:
        out = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=scales.dtype)
        out.payload, out.scales = payload, scales
        return out

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantised:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            # Fields move one by one: nothing is quantised a second time.
            own, kwargs = args[0], kwargs or {}
            integers = {k: v for k, v in kwargs.items() if k != "dtype"}
            return cls(func(own.payload, **integers), func(own.scales, **kwargs))

        def opened(value: Any) -> Any:
            return value.payload.to(value.scales.dtype) * value.scales

        args = [opened(a) if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))
