"""Traces as files: compressed JSON in columns; docs/trace-format.md describes every field.

[Note: Versions]
    The version changes when a field comes, goes or changes its meaning. Files of another version
    are refused, not converted: recording takes seconds.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, Final

from tvm_pager.errors import TraceError
from tvm_pager.memory import PageKind
from tvm_pager.planning.traces.trace import Phase, Trace, TraceOp, TracePage
from tvm_pager.planning.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["TRACE_VERSION", "load", "save"]

TRACE_VERSION: Final = 1
_FORMAT: Final = "tvm_pager trace"
_REMEDY: Final = "record the trace again"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_MAX_INT: Final = 1 << 62


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the trace to a file of mode 0600, which holds all of it or is the old one. Blocks.

    Equal traces give equal files.

    Raises:
        TraceError: the file cannot be written.
    """
    text = json.dumps(_to_columns(trace), separators=(",", ":"))
    try:
        write_whole(path, gzip.compress(text.encode(), mtime=0))
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(f"trace {os.fspath(path)} cannot be written: {reason}") from error


def load(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace, compressed or not. Blocks; 0.2 s for 30,000 operations.

    Raises:
        TraceError: the file cannot be read, is of another version, cut short or no trace.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
        values = json.loads(data)
    except OSError as error:  # what is compressed badly, too
        reason = error.strerror or str(error)
        raise TraceError(f"trace {os.fspath(path)}: {reason}; {_REMEDY}") from error
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(
            f"trace {os.fspath(path)} is damaged or no trace ({error}); {_REMEDY}"
        ) from error
    try:
        return _from_columns(values)
    except _BadFieldError as error:
        raise TraceError(f"trace {os.fspath(path)}: {error}; {_REMEDY}") from error
    except TraceError as error:
        raise TraceError(f"trace {os.fspath(path)}: {error}") from error


class _BadFieldError(ValueError):
    pass


# --- writing -------------------------------------------------------------------------------------


def _to_columns(trace: Trace) -> dict[str, Any]:
    op_names = _Table(op.name for op in trace.ops)
    dtypes = _Table(page.dtype for page in trace.pages)
    phases = _Table(op.phase.name for op in trace.ops)
    kinds = _Table(page.kind.value for page in trace.pages)
    return {
        "format": _FORMAT,
        "version": TRACE_VERSION,
        "facts": dict(trace.facts),
        "launch_ns": trace.launch_ns,
        "overhead_bytes": trace.overhead_bytes,
        "modules": list(trace.modules),
        "op_names": op_names.values,
        "phases": phases.values,
        "dtypes": dtypes.values,
        "kinds": kinds.values,
        "ops": {
            "name": op_names.column,
            "num_reads": [len(op.reads) for op in trace.ops],
            "num_writes": [len(op.writes) for op in trace.ops],
            "num_creates": [len(op.creates) for op in trace.ops],
            "compute_ns": [op.compute_ns for op in trace.ops],
            "workspace_bytes": [op.workspace_bytes for op in trace.ops],
            "phase": phases.column,
            "module": [op.module for op in trace.ops],
            "is_replayable": [int(op.is_replayable) for op in trace.ops],
            "reads": list(chain.from_iterable(op.reads for op in trace.ops)),
            "writes": list(chain.from_iterable(op.writes for op in trace.ops)),
            "creates": list(chain.from_iterable(op.creates for op in trace.ops)),
        },
        "pages": {
            "nbytes": [page.nbytes for page in trace.pages],
            "kind": kinds.column,
            "dtype": dtypes.column,
            "name": [page.name for page in trace.pages],
            "born": [page.born for page in trace.pages],
            "died": [page.died for page in trace.pages],
            "becomes": [page.becomes for page in trace.pages],
        },
    }


class _Table:
    """Each different text once, and for each place of the column its number."""

    def __init__(self, texts: Iterable[str]) -> None:
        numbers: dict[str, int] = {}
        self.column = [numbers.setdefault(text, len(numbers)) for text in texts]
        self.values = list(numbers)


# --- reading -------------------------------------------------------------------------------------


def _from_columns(values: Any) -> Trace:
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise _BadFieldError("the file is no trace")
    version = values.get("version")
    if version != TRACE_VERSION or isinstance(version, bool):
        raise _BadFieldError(f"version {version}, but {TRACE_VERSION} is needed")
    facts = _member(values, "facts", dict)
    return Trace(
        _ops(values),
        _pages(values),
        tuple(_texts(values, "modules")),
        _int(values, "launch_ns"),
        _int(values, "overhead_bytes"),
        dict(zip(facts, _checked_texts(list(facts.values()), "facts"), strict=True)),
    )


def _ops(values: dict[str, Any]) -> tuple[TraceOp, ...]:
    columns = _member(values, "ops", dict)
    num_ops = len(_member(columns, "name", list))
    modules = _ints(columns, "module", num_ops, least=-1)
    num_modules = len(_texts(values, "modules"))
    if any(module >= num_modules for module in modules):
        raise _BadFieldError(f"module holds a number above the {num_modules} modules")
    try:
        phases = [Phase[name] for name in _texts(values, "phases")]
    except KeyError as error:
        raise _BadFieldError(f"there is no phase {error}") from error
    rows = zip(
        _looked_up(columns, "name", num_ops, _texts(values, "op_names")),
        *(_groups(columns, name, num_ops) for name in ("reads", "writes", "creates")),
        _ints(columns, "compute_ns", num_ops),
        _ints(columns, "workspace_bytes", num_ops),
        _looked_up(columns, "phase", num_ops, phases),
        modules,
        _looked_up(columns, "is_replayable", num_ops, (False, True)),
        strict=True,
    )
    return tuple(map(TraceOp._make, rows))


def _pages(values: dict[str, Any]) -> tuple[TracePage, ...]:
    columns = _member(values, "pages", dict)
    num_pages = len(_member(columns, "nbytes", list))
    try:
        kinds = [PageKind(value) for value in _texts(values, "kinds")]
    except ValueError as error:
        raise _BadFieldError(f"kinds: {error}") from error
    rows = zip(
        _ints(columns, "nbytes", num_pages),
        _looked_up(columns, "kind", num_pages, kinds),
        _looked_up(columns, "dtype", num_pages, _texts(values, "dtypes")),
        _texts(columns, "name", num_pages),
        *(_ints(columns, name, num_pages, or_none=True) for name in ("born", "died", "becomes")),
        strict=True,
    )
    return tuple(map(TracePage._make, rows))


def _groups(columns: dict[str, Any], name: str, num_ops: int) -> list[tuple[int, ...]]:
    """The page numbers of each operation."""
    counts = _ints(columns, f"num_{name}", num_ops)
    ends = list(accumulate(counts, initial=0))
    numbers = _ints(columns, name, ends[-1])
    return [tuple(numbers[begin:end]) for begin, end in pairwise(ends)]


def _looked_up(columns: dict[str, Any], name: str, length: int, table: Sequence[Any]) -> list[Any]:
    numbers = _ints(columns, name, length)
    if any(number >= len(table) for number in numbers):
        raise _BadFieldError(f"{name} holds a number above the {len(table)} of its table")
    return [table[number] for number in numbers]


def _ints(
    columns: dict[str, Any], name: str, length: int, *, least: int = 0, or_none: bool = False
) -> list[Any]:
    values: list[Any] = _member(columns, name, list)
    if len(values) != length:
        raise _BadFieldError(f"{name} has {len(values):,} entries instead of {length:,}")
    for value in values:
        if type(value) is int:
            if not least <= value <= _MAX_INT:
                raise _BadFieldError(f"{name} holds {value}")
        elif not (or_none and value is None):
            raise _BadFieldError(f"{name} holds {value!r}, not a whole number")
    return values


def _texts(columns: dict[str, Any], name: str, length: int | None = None) -> list[str]:
    values = _checked_texts(_member(columns, name, list), name)
    if length is not None and len(values) != length:
        raise _BadFieldError(f"{name} has {len(values):,} entries instead of {length:,}")
    return values


def _checked_texts(values: list[Any], name: str) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise _BadFieldError(f"{name} holds {value!r}, not a text")
    return values


def _int(values: dict[str, Any], name: str) -> int:
    value: int = _ints({name: [_member(values, name, int)]}, name, 1)[0]
    return value


def _member(values: dict[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if not isinstance(value, kind):
        raise _BadFieldError(f"{name} is missing or no {kind.__name__}")
    return value
