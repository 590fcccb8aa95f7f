"""Tensors of a class of the user's own that are made over a page: such as `MyParameter(data, ...)`.

[Note: A class over a page]
    torch makes them in C++, over a `detach` or an `alias` of the data. For a paged tensor dispatch
    answers that with a PagedTensor, and a Python object cannot be of two classes: torch raises, or,
    where `Parameter.__new__` is asked, gives a PagedTensor that lacks the class's methods and whose
    `__init__` Python never calls. So torch's makers are told apart here. What they make is a plain
    tensor on the page's storage, of its own class, with torch's version counter and graph: the same
    bytes, as in plain torch. It reads them without dispatch, so the page stays on the device.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tvm_pager.runtime.results import tensor_class
from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.runtime.context import PagingContext

__all__ = ["make_over"]

_T = TypeVar("_T")

_guard = torch._C._DisableTorchDispatch
_make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
_new_parameter: Callable[..., Any] = torch.nn.Parameter.__new__


def make_over(cls: type, data: torch.Tensor, make: Callable[[], _T]) -> _T:
    """Lets `make` make an instance of `cls`, which is never paged, over the bytes of `data`.

    Blocks for the fault; the page stays on the device for as long as its storage lives.

    Raises:
        BudgetError: it cannot come back to the device.
    """
    page = page_of(data)
    if page is not None and page.nbytes:  # lazy ones have no bytes yet
        context: PagingContext = page.pager
        with context.core.lock:
            context.core.drain()
            context.fault_in(page, f"a tensor of the class {cls.__name__}")
            context.core.written(page)  # perhaps, and nobody would see it
            context.hold_for_good(data)
            context.notice_once(
                f"tensors of the class {cls.__name__} are not paged (first seen: one made over a "
                f"page of {page.nbytes} bytes, which stays on {context.device})"
            )
    with _guard():
        return make()


def _is_foreign(cls: type, data: Any) -> bool:
    """Whether an object of the class, made over this, would be no page."""
    return (
        isinstance(data, torch.Tensor)
        and cls not in tensor_class.plain
        and (data.__class__ is tensor_class.paged or page_of(data) is not None)
    )


@wraps(_make_subclass)
def _make_subclass_over(cls: type, data: Any, *args: Any, **options: Any) -> Any:
    if _is_foreign(cls, data):
        return make_over(cls, data, partial(_make_subclass, cls, data, *args, **options))
    if cls is torch.nn.Parameter and data.__class__ is tensor_class.paged:
        return torch.nn.Parameter(data, *(args or (False,)))
    return _make_subclass(cls, data, *args, **options)


@wraps(_new_parameter)
def _new_parameter_over(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
    if cls is not torch.nn.Parameter:
        data = torch.empty(0) if data is None else data
        if data.__class__ is tensor_class.paged:
            return _make_subclass_over(cls, data, requires_grad)
    return _new_parameter(cls, data, requires_grad)


# For good: paged tensors outlive their pagers. What is no page goes on as before.
vars(torch)["Tensor"]._make_subclass = staticmethod(_make_subclass_over)
vars(torch.nn)["Parameter"].__new__ = staticmethod(_new_parameter_over)
