"""The exact bytes of tensors, read as an operation would read them.

[Note: Reading without disturbing]
    An alias (numpy, DLPack) holds the page and counts as a write to it, so copies below the device
    would be dropped and a fault in one of them would never show. A copy on the device would need
    room for a second page. So each piece is copied by `copy_` into a small plain CPU buffer: to the
    pager that is one operation which reads the page. The buffer is made below torch's dispatch, so
    it is no page even where the CPU stands in for the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from tvm_pager.errors import PagerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["describe", "is_readable", "leaves", "parts", "read_bytes"]

PIECE_BYTES = 32 * 2**20  # of plain memory that reading takes, for contiguous tensors

_guard = torch._C._DisableTorchDispatch
_MAX_DEPTH = 8  # of containers in containers
_UNREADABLE = "unreadable"


def read_bytes(tensor: torch.Tensor, take: Callable[[memoryview], object]) -> None:
    """Hands the bytes of a strided tensor to `take`, piece by piece, in logical order. Blocks.

    Raises:
        Exception: torch, or a subclass of its tensor, cannot copy it to the CPU.
        PagerError: a fault failed.
    """
    with torch.no_grad():
        source = tensor.detach()
        is_flat = source.is_contiguous()
        if is_flat:
            source = source.view(-1)
        length = source.numel()
        step = max(1, PIECE_BYTES // source.element_size()) if is_flat else length
        with _guard():
            shape = [min(step, length)] if is_flat else list(source.shape)
            buffer = torch.empty(shape, dtype=source.dtype, device="cpu")
        for start in range(0, length, max(1, step)):
            count = min(step, length - start)
            with _guard():
                into = buffer[:count] if count < buffer.numel() else buffer
            into.copy_(source[start : start + count] if count < length else source)
            with _guard():
                data = into.reshape(-1).view(torch.uint8).numpy().data
            take(data)


def describe(value: Any) -> tuple[str, tuple[int, ...], str]:
    """Gives dtype, shape and digest of a tensor or number. Blocks.

    Where torch cannot read the tensor, its type stands for its dtype, and `is_readable` is false of
    the digest.
    """
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, (), repr(value)
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if value.is_meta:
        return dtype, shape, "meta"
    whole = hashlib.blake2b(digest_size=16)
    try:
        read_bytes(value, whole.update)
    except (PagerError, torch.OutOfMemoryError):
        raise
    except Exception:  # whatever a foreign subclass or mode thinks of it
        return type(value).__name__, shape, _UNREADABLE
    return dtype, shape, whole.hexdigest()


def is_readable(digest: str) -> bool:
    """Whether `describe` could read the bytes behind this digest."""
    return digest != _UNREADABLE


def parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Gives the strided tensors that a sparse tensor or a tensor subclass is made of, by name."""
    if not isinstance(value, torch.Tensor):
        yield name, value
    elif hasattr(value, "__tensor_flatten__"):
        for inner in value.__tensor_flatten__()[0]:
            yield from parts(f"{name} ({inner})", getattr(value, inner))
    elif value.layout is torch.sparse_coo:
        yield f"{name} (indices)", value.detach()._indices()
        yield f"{name} (values)", value.detach()._values()
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield f"{name} (crow_indices)", value.detach().crow_indices()
        yield f"{name} (col_indices)", value.detach().col_indices()
        yield f"{name} (values)", value.detach().values()
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield f"{name} (ccol_indices)", value.detach().ccol_indices()
        yield f"{name} (row_indices)", value.detach().row_indices()
        yield f"{name} (values)", value.detach().values()
    else:
        yield name, value


def leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Gives the tensors and numbers in nested containers, each with its path behind `name`."""
    if isinstance(value, (torch.Tensor, bool, int, float, complex)):
        yield name, value
        return
    for suffix, item in _items(value) if depth < _MAX_DEPTH else ():
        yield from leaves(name + suffix, item, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (f".{key}" if isinstance(key, str) else f"[{key!r}]"), item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{key}", item) for key, item in zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{one.name}", getattr(value, one.name)) for one in fields(value))
