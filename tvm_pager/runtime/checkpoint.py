"""Models whose weights stay in their safetensors files: read at first use, never written back.

[Note: Weights backed by their file]
    A tensor of a checkpoint becomes a page that is off the device from birth, with the file's range
    as its backing: no byte is read before an operation needs it, none is copied to DRAM or the swap
    file while nobody writes it, and it counts in no tier's commit. The first write makes it an
    ordinary page. So a model larger than all budgets together can be loaded and run, and fine-tuned
    as far as what is trained fits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tvm_pager.errors import ConfigError, PagerError
from tvm_pager.memory import PageKind
from tvm_pager.runtime.adoption import Named, exchange_impl, refuse_live_graph
from tvm_pager.runtime.paged_tensor import PagedTensor
from tvm_pager.runtime.storage import storage_of
from tvm_pager.transfer.source_file import FileRange, SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tvm_pager.runtime.context import PagingContext

__all__ = ["LoadReport", "load", "read_header"]

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip

_guard = torch._C._DisableTorchDispatch


class LoadReport(NamedTuple):
    """What `load` found, as `Module.load_state_dict` says it, and how many bytes stay in files."""

    missing_keys: list[str]
    unexpected_keys: list[str]
    file_backed_bytes: int


class _Entry(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    place: FileRange


def load(
    context: PagingContext,
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    strict: bool = True,
) -> LoadReport:
    """Fills a model from safetensors files; see `Pager.load`."""
    entries: dict[str, _Entry] = {}
    for path in _files(checkpoint):
        entries.update(read_header(path))
    persistent = set(model.state_dict(keep_vars=True))
    missing, used, file_bytes = list[str](), set[str](), 0
    plan: list[tuple[str, torch.Tensor, _Entry]] = []
    for tensor, names in _targets(model):
        name = next((name for name in names if name in entries), None)
        used.update(names)
        if name is not None:
            plan.append((name, tensor, entries[name]))
        elif tensor.is_meta or names[0] in persistent:
            missing.append(names[0])
    unexpected = sorted(entries.keys() - used)
    if strict and (missing or unexpected):
        raise PagerError(_mismatch(model, missing, unexpected))
    _check_shapes(model, plan)
    for name, tensor, entry in plan:
        kind = PageKind.PARAM if isinstance(tensor, torch.nn.Parameter) else PageKind.BUFFER
        named = Named(name, tensor, kind)
        if tensor.is_meta or _is_alone(context, tensor, entry):
            refuse_live_graph(named)
            _back_by_file(context, named, entry)
            file_bytes += entry.place.nbytes
        else:
            _copy_in(context, named, entry)
    return LoadReport(missing, unexpected, file_bytes)


def read_header(path: str | os.PathLike[str]) -> dict[str, _Entry]:
    """Reads which tensors a safetensors file holds and where, without reading any of them.

    Raises:
        ConfigError: the file cannot be opened or is no safetensors file.
    """
    file = SourceFile(path)
    try:
        length = bytearray(8)
        file.read(0, memoryview(length))
        num_bytes = int.from_bytes(length, "little")
        if not 2 <= num_bytes <= min(_MAX_HEADER_BYTES, file.nbytes - 8):
            raise ValueError(f"a header of {num_bytes} bytes")
        text = bytearray(num_bytes)
        file.read(8, memoryview(text))
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError(f"a header that is a {type(header).__name__}")
        return dict(_entries(header, file, 8 + num_bytes))
    except (ValueError, KeyError, TypeError, PagerError) as error:
        raise ConfigError(
            f"{file.path} ({file.nbytes} bytes) is no safetensors file: {error}; convert it with "
            "safetensors.torch.save_file"
        ) from error


def _entries(header: dict[str, Any], file: SourceFile, start: int) -> Iterator[tuple[str, _Entry]]:
    for name, value in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES[value["dtype"]], tuple(int(size) for size in value["shape"])
        begin, end = value["data_offsets"]
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if end - begin != nbytes or begin < 0 or start + end > file.nbytes:
            raise ValueError(f"{name!r} of {nbytes} bytes lies at [{begin}, {end})")
        yield name, _Entry(dtype, shape, FileRange(file, start + begin, nbytes))


def _files(
    checkpoint: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[str | os.PathLike[str]]:
    if not isinstance(checkpoint, (str, os.PathLike)):
        return list(checkpoint)
    if not os.path.isdir(checkpoint):
        return [checkpoint]
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{os.fspath(checkpoint)} holds no *.safetensors file")
    return list(files)


def _targets(model: torch.nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Each parameter and buffer once, with all its names."""
    targets: dict[int, tuple[torch.Tensor, list[str]]] = {}
    both = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in both:
        targets.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(targets.values())


def _mismatch(model: torch.nn.Module, missing: list[str], unexpected: list[str]) -> str:
    def shown(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    parts = [
        f"the checkpoint lacks {len(missing)} tensors of it ({shown(missing)})" if missing else "",
        f"holds {len(unexpected)} that it has not ({shown(unexpected)})" if unexpected else "",
    ]
    return (
        f"load into {type(model).__name__}: {'; '.join(part for part in parts if part)}. Buffers "
        "that are not saved must not be built on the meta device. strict=False loads what matches"
    )


def _check_shapes(model: torch.nn.Module, plan: list[tuple[str, torch.Tensor, _Entry]]) -> None:
    wrong = [
        f"{name}: {tuple(tensor.shape)} in the model, {entry.shape} in the file"
        for name, tensor, entry in plan
        if tuple(tensor.shape) != entry.shape
    ]
    if wrong:
        raise PagerError(
            f"load into {type(model).__name__}: {len(wrong)} shapes differ ({'; '.join(wrong[:5])})"
        )


def _is_alone(context: PagingContext, tensor: torch.Tensor, entry: _Entry) -> bool:
    """Whether the tensor may get another storage: nothing else looks at the one it has."""
    if tensor.dtype is not entry.dtype or not tensor.is_contiguous() or tensor.storage_offset():
        return False
    if not context.owns_device(tensor) or tensor.layout is not torch.strided:
        return False
    storage = storage_of(tensor)
    # The tensor's own reference, and the one of `storage`.
    return torch._C._storage_Use_Count(storage._cdata) <= 2


def _back_by_file(context: PagingContext, named: Named, entry: _Entry) -> None:
    core, nbytes = context.core, entry.place.nbytes
    with core.lock, _guard(), torch.no_grad():
        core.drain()
        # torch sizes a tensor only over memory that is there, so it is there for a moment.
        core.make_room(nbytes, f"load({named.name})")
        storage = torch.UntypedStorage(nbytes, device=context.device)  # type: ignore[no-untyped-call]
        replacement = torch.empty(0, dtype=entry.dtype, device=context.device)
        replacement.set_(storage, 0, entry.shape, torch.empty(entry.shape, device="meta").stride())
        context.adopt_absent(storage, named.kind, entry.place)
        exchange_impl(named, PagedTensor, replacement)


def _copy_in(context: PagingContext, named: Named, entry: _Entry) -> None:
    """Another dtype or layout than the file's, or shared: values are copied, as in torch."""
    buffer = bytearray(entry.place.nbytes)
    if not buffer:
        return
    entry.place.read(0, [memoryview(buffer)])
    with torch.no_grad():
        with _guard():
            source = torch.frombuffer(buffer, dtype=entry.dtype).view(entry.shape)
        named.tensor.copy_(source)
    context.classify(named.tensor, named.kind)
