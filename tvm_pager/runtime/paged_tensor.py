"""`PagedTensor`: a real tensor whose storage may be absent until an operation needs it.

No inner tensor and no wrapper: strides, versions, autograd metadata and `id()` are torch's own. The
class adds dispatch, and overrides every entry point that reads the bytes without it (the list is a
test: tests/tensor/test_escapes.py).
"""

from __future__ import annotations

import copy
import multiprocessing.context
import multiprocessing.reduction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing.reductions
import torch.utils.dlpack
from torch._tensor_str import PRINT_OPTS
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from tvm_pager.errors import UnpageableError
from tvm_pager.runtime.dispatch import dispatch
from tvm_pager.runtime.exports import plain_alias, plain_copy, read, storage_alias
from tvm_pager.runtime.own_classes import make_over
from tvm_pager.runtime.results import tensor_class
from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from tvm_pager.runtime.context import PagingContext

__all__ = ["PagedTensor"]

_Base = torch._C.TensorBase
_guard = torch._C._DisableTorchDispatch
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_python = torch._C.DispatchKey.Python


class PagedTensor(torch.Tensor):
    """A tensor on a page.

    Made by a pager, never by hand; parameters are PagedTensors with `isinstance(p, Parameter)`.
    Everything that plain torch can do with the tensor works, wherever its bytes are. Raw access
    pins the page: arrays and DLPack capsules for as long as they live, `data_ptr()` until the next
    iteration boundary (`pager.step()`, or the end of `optimizer.step()`) or
    `pager.release(tensor)`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]

    # --- raw pointers ----------------------------------------------------------------------------

    def data_ptr(self) -> int:
        """The device address.

        The page stays there until after the next iteration boundary and counts as written.
        """
        page = page_of(self)
        if page is None:
            return _Base.data_ptr(self)
        context: PagingContext = page.pager
        with context.core.lock:
            context.core.drain()
            context.fault_in(page, "data_ptr")
            context.expose(page)
            return _Base.data_ptr(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """A plain alias of the storage: it holds the page on the device; see `storage_alias`."""
        return storage_alias(self)

    def storage(self) -> Any:
        return self._typed_storage()

    def _typed_storage(self) -> Any:
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True
        )

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return plain_alias(self).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        with _guard():  # else this factory would give a paged tensor, and ask it again
            return torch.empty(0, device=self.device).__dlpack_device__()

    # --- numpy and Python scalars ----------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """An array over the page's bytes; it and its views hold the page on the device."""
        if not force and self.requires_grad and self.is_cpu:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        return plain_alias(self).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def __cuda_array_interface__(self) -> Any:
        if not self.is_cuda:
            raise AttributeError("no __cuda_array_interface__ on a CPU tensor")
        if self.requires_grad:
            raise RuntimeError(
                "Can't get __cuda_array_interface__ on Variable that requires grad. "
                "If gradients aren't required, use var.detach() to get Variable that doesn't "
                "require grad."
            )
        self.data_ptr()
        return plain_alias(self).__cuda_array_interface__

    def tolist(self) -> Any:
        return read(self, torch.Tensor.tolist)

    def item(self) -> Any:
        # C code reaches the slots below with dispatch off: `torch.tensor([paged])`.
        return read(self, _Base.item) if _is_excluded(_python) else _Base.item(self)

    def __bool__(self) -> bool:
        return read(self, bool) if self.numel() != 1 else bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return read(self, torch.Tensor.__index__)

    # --- text ------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return read(self, partial(self._text, tensor_contents))

    def _text(self, tensor_contents: Any, plain: Any) -> str:  # torch's own `__repr__` has no types
        grad_fn = self.grad_fn
        if grad_fn is None:
            text = plain.requires_grad_(self.requires_grad).__repr__(
                tensor_contents=tensor_contents
            )
        else:
            text = plain.__repr__(tensor_contents=tensor_contents)[:-1]
            suffix = f"grad_fn=<{type(grad_fn).__name__}>"
            # As torch breaks lines: the last one with ", ", the suffix and ")" must fit.
            is_long = len(text) - text.rfind("\n") + 1 + len(suffix) + 2 > PRINT_OPTS.linewidth
            text = f"{text},{chr(10) + ' ' * len('tensor(') if is_long else ' '}{suffix})"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __format__(self, format_spec: str) -> str:
        return (
            format(self.item(), format_spec)
            if self.dim() == 0
            else object.__format__(self, format_spec)
        )

    # --- in-place Python callbacks ---------------------------------------------------------------

    def map_(self, other: torch.Tensor, callback: Any) -> Any:
        plain_alias(self).map_(
            plain_alias(other) if isinstance(other, PagedTensor) else other, callback
        )
        return self

    def apply_(self, callback: Any) -> Any:
        plain_alias(self).apply_(callback)
        return self

    def as_subclass(self, cls: Any) -> Any:
        """Of a class of the user's own: a plain tensor, whose page stays on the device."""
        if issubclass(PagedTensor, cls):
            return _Base.as_subclass(self, cls)
        return make_over(cls, self, partial(_Base.as_subclass, self, cls))

    # --- copies and pickles ----------------------------------------------------------------------

    def share_memory_(self) -> Any:
        if self.is_cuda:
            return self  # as in plain torch
        raise UnpageableError(
            f"share_memory_() of a paged tensor of {self.numel() * self.element_size()} bytes: "
            "shared memory cannot be paged. Call tvm_pager.unpage() on its module first, or share "
            "a clone made outside the pager"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment. If you were attempting to deepcopy a module, this may be "
                "because of a torch.nn.utils.weight_norm usage, see "
                "https://github.com/pytorch/pytorch/pull/103001"
            )
        with torch.no_grad():
            copied = self._copy_storage(memo)
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if getattr(self, "_is_param", False):
            copied._is_param = True  # torch copies neither gradient nor attributes of a Parameter
            return copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    def _copy_storage(self, memo: dict[int, Any]) -> torch.Tensor:
        """A tensor over a copy of this storage, made once per `memo`, as in plain torch."""
        page = page_of(self)
        if page is None:
            return self.clone()
        key = id(page)
        if key not in memo:
            nbytes = torch.as_strided(self.detach(), (0,), (1,), 0).view(torch.uint8)
            whole = nbytes.as_strided((page.nbytes,), (1,), 0)
            memo[key] = whole.clone()
        flat = memo[key]
        typed = flat[: page.nbytes // self.element_size() * self.element_size()].view(self.dtype)
        out = torch.as_strided(typed, self.size(), self.stride(), self.storage_offset())
        out = out.conj() if self.is_conj() else out
        out = out._neg_view() if self.is_neg() else out
        fresh = out.new_empty(0)
        # A leaf without a view relation to the flat copy.
        fresh.set_(out)  # type: ignore[call-overload]
        # As in plain torch, where Parameters are cloned and other tensors made by one `set_`.
        version = 0 if getattr(self, "_is_param", False) else 1
        torch._C._autograd._unsafe_set_version_counter((fresh,), (version,))
        return fresh

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain tensor or Parameter it stands for: files load without tvm_pager."""
        plain = plain_copy(self)
        plain.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            parameter = torch.nn.Parameter(plain.detach(), self.requires_grad)
            parameter.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_is_param"})
            return parameter.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _reduce_for_processes(tensor: PagedTensor) -> Any:
    """Tensors sent to other processes travel as plain copies in shared memory."""
    reduce: Any = torch.multiprocessing.reductions.reduce_tensor
    plain = plain_copy(tensor).requires_grad_(tensor.requires_grad)
    if getattr(tensor, "_is_param", False):
        plain = torch.nn.Parameter(plain.detach(), tensor.requires_grad)
    elif not tensor.is_leaf:
        plain = plain.view_as(plain)  # so that torch refuses what it refuses in plain torch
    child = multiprocessing.context.get_spawning_popen()
    if child is not None:
        # It inherits the copy's descriptor when it starts; in plain torch the tensor itself is
        # shared, and lives.
        vars(child).setdefault("_tvm_copies", []).append(plain)
    return reduce(plain)


_to_dlpack: Any = vars(torch.utils.dlpack)["to_dlpack"]


def _to_dlpack_of_pages(tensor: torch.Tensor) -> Any:
    return _to_dlpack(plain_alias(tensor) if isinstance(tensor, PagedTensor) else tensor)


# A C function that reads the storage without asking the tensor: no method could intercept it.
for _module in (torch, torch.utils.dlpack):
    vars(_module)["to_dlpack"] = _to_dlpack_of_pages
tensor_class.register(PagedTensor)
multiprocessing.reduction.ForkingPickler.register(PagedTensor, _reduce_for_processes)
# torch picks its foreach implementations by exact type; paged tensors get what plain ones get.
for _supported in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if PagedTensor not in _supported:
        _supported.append(PagedTensor)
