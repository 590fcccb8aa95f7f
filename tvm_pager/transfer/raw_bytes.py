"""Torch operations on raw bytes that no mode, subclass, transform or autograd of torch's sees.

[Note: Raw dispatch]
    A fault can happen anywhere: under `inference_mode`, inside a dispatch or function mode of the
    user's, a fake tensor mode, a functorch transform (`grad`, `vmap`), a default device. The copy
    that serves it must be none of their business. Forcing the thread's dispatch keys to backend
    select and the dense backends passes by all of them at once, autograd and version counters
    included, for about 1 us. `_DisableTorchDispatch` alone costs as much, and under
    `torch.func.grad` or `functionalize` the in-place copy raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import mmap
    from types import TracebackType

__all__ = ["RawDispatch", "raw_alias", "raw_view"]

_C = torch._C
_INCLUDED = _C.DispatchKeySet(_C.DispatchKey.BackendSelect)
_EXCLUDED = (
    _C._dispatch_keyset_full().remove(_C.DispatchKey.BackendSelect).remove(_C.DispatchKey.Dense)
)


class RawDispatch:
    """Sends the calling thread's operations straight to kernels; see [Note: Raw dispatch]."""

    __slots__ = ("_functions", "_keys")

    def __enter__(self) -> None:
        self._functions = _C.DisableTorchFunction()
        self._functions.__enter__()
        self._keys = _C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
        self._keys.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keys.__exit__(kind, error, trace)
        self._functions.__exit__(kind, error, trace)


def raw_alias(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Gives the bytes of `storage` as a uint8 tensor; make and use it in `RawDispatch`."""
    alias: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return alias.set_(storage)


def raw_view(region: mmap.mmap) -> torch.Tensor:
    """Gives the bytes of a mapping as a plain uint8 tensor, which keeps the mapping alive."""
    # Made in inference mode it would be an inference tensor, and refuse writes outside of it.
    with torch.inference_mode(mode=False), RawDispatch():
        return torch.frombuffer(region, dtype=torch.uint8)
