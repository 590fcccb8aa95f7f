"""Composite operators whose C++ code reads an operand through its pointer, above dispatch.

[Note: Reads above dispatch]
    A composite operator is C++ code over other operators, and it runs before dispatch sees
    anything: a pointer that it takes from a page off the device is null, and torch raises. No
    tensor subclass can see such an operator (except in inference mode, which dispatches it whole),
    so while a pager is open its autograd kernel is one of ours, for all tensors: it puts the
    operand in place and then calls the composite code. Plain tensors pay ten microseconds for it.

    The list comes from torch's sources; tests/tensor/test_composite_reads.py runs it. Only CPU
    tensors are read so: this matters where the CPU stands in for a device.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.runtime.context import PagingContext

__all__ = ["cover_raw_reads", "uncover_raw_reads"]

# Operator -> the operand that is read by pointer. The rest of it is operators that dispatch sees,
# with their gradients.
_READS: Final[dict[str, int]] = {
    "tensor_split.tensor_indices_or_sections": 1,
    "lstm.data": 1,  # the batch sizes of a packed sequence, throughout the loop over steps
    "gru.data": 1,
    "rnn_tanh.data": 1,
    "rnn_relu.data": 1,
    "_pack_padded_sequence_backward": 2,
    "_reshape_from_tensor": 1,
}
# Operators that read and write by pointer all that they touch, temporaries too, and have no
# gradient: they are dispatched whole, as in inference mode.
_WHOLE: Final = (
    "_sobol_engine_draw",
    "_sobol_engine_ff_",
    "_sobol_engine_initialize_state_",
    "_sobol_engine_scramble_",
    "_validate_sparse_coo_tensor_args",
    "choose_qparams_optimized",
    "_saturate_weight_to_fp16",
    "_rowwise_prune",
    "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation",
    "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation",
    "fbgemm_linear_quantize_weight",
    "fbgemm_pack_gemm_matrix_fp16",
    "fbgemm_pack_quantized_matrix",
    "fbgemm_pack_quantized_matrix.KN",
)

_composite = torch._C.DispatchKey.CompositeImplicitAutograd
_python = torch._C.DispatchKey.Python
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded

_lock = threading.Lock()
_num_open = 0
_library: Any = None


def cover_raw_reads() -> None:
    """Counts an open pager; the first one puts our kernels before torch's composite code."""
    global _num_open, _library
    with _lock:
        _num_open += 1
        if _num_open > 1:
            return
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, position in _READS.items():
            _cover(_library, name, functools.partial(_run_in_place, position=position))
        _cover(_library, "_pad_packed_sequence", _run_padding)
        for name in _WHOLE:
            _cover(_library, name, _run_whole)


def uncover_raw_reads() -> None:
    """The counterpart of `cover_raw_reads`: with the last pager torch's own kernels are back."""
    global _num_open, _library
    with _lock:
        _num_open -= 1
        if not _num_open:
            _library._destroy()
            _library = None


def _cover(library: Any, name: str, run: Callable[..., Any]) -> None:
    packet, _, overload = name.partition(".")
    try:
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    except AttributeError:
        return  # this torch has no such operator
    library.impl(name, functools.partial(run, operator), "AutogradCPU")


def _run_in_place(operator: Any, *args: Any, position: int, **kwargs: Any) -> Any:
    """Calls composite code while the operand that it reads is held on the device."""
    page = page_of(args[position])
    if page is None or _is_excluded(_python):  # below dispatch everything is in place already
        return operator._op_dk(_composite, *args, **kwargs)
    context: PagingContext = page.pager
    core = context.core
    with core.lock:
        core.drain()
        context.fault_in(page, operator.name())
        core.hold(page)
    try:
        return operator._op_dk(_composite, *args, **kwargs)
    finally:
        with core.lock:
            core.drop(page)


class _PlainLengths(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Leaves what `empty` makes on no page: `_pad_packed_sequence` writes it by pointer."""

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
        if func is not torch.ops.aten.empty.memory_format:
            return func(*args, **(kwargs or {}))
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def _run_padding(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """`_pad_packed_sequence`: as above, and the lengths that it gives stay in place."""
    if _is_excluded(_python):
        return operator._op_dk(_composite, *args, **kwargs)
    with _PlainLengths():  # type: ignore[no-untyped-call]
        return _run_in_place(operator, *args, position=1, **kwargs)


def _run_whole(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Dispatches the operator itself instead of what it is made of."""
    if _is_excluded(_python):
        return operator._op_dk(_composite, *args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args, **kwargs)
