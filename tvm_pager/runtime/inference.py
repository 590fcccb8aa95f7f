"""Composite operators that are dispatched whole keep torch's books of views and versions.

[Note: Composites in inference mode]
    Elsewhere autograd takes a composite operator apart before dispatch sees it. Inference mode has
    no autograd, so dispatch gets it whole, with the level that counts versions and notes views
    (ADInplaceOrView) switched off: torch takes it to have run already, and it has not. Without it
    writes are not counted, so that autograd misses them, views are none, and `linear` does not see
    that its transposed weight requires a gradient, by which it chooses its kernel. So that level
    is switched on while the composite runs, and while its result gets its class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.runtime.results import tensor_class

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["below_dispatch", "with_views"]

_guard = torch._C._DisableTorchDispatch
_Tensor = torch.Tensor
_views = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_inference = torch.is_inference_mode_enabled


def below_dispatch(plan: OperatorPlan) -> AbstractContextManager[Any]:
    """The context in which an operator runs and its results are wrapped: dispatch is off."""
    return _BelowWithViews() if plan.is_whole and _is_inference() else _guard()


class _BelowWithViews:
    __slots__ = ("_guard", "_was_excluded")

    def __enter__(self) -> None:
        self._guard = _guard()
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        self._was_excluded = _is_excluded(_views)
        _set_excluded(_views, False)

    def __exit__(self, *error: Any) -> None:
        _set_excluded(_views, self._was_excluded)
        self._guard.__exit__(*error)


def with_views(call: Callable[..., Any]) -> Callable[..., Any]:
    """A composite operator for the fast path, whose operands are all paged."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _is_inference():
            return call(*args, **kwargs)
        was_excluded = _is_excluded(_views)
        _set_excluded(_views, False)
        try:
            out = call(*args, **kwargs)
            if out.__class__ is _Tensor and out._is_view():
                # Of an operand, though the schema does not say so: `atleast_2d`.
                return out.as_subclass(tensor_class.paged)
            return out
        finally:
            _set_excluded(_views, was_excluded)

    return run
