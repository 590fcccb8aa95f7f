"""Frozen dataclasses out of plain JSON values, by their annotations, with every field checked."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

__all__ = ["decode"]


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """Makes a value of type `kind` from what `json.loads` gave.

    Args:
        kind: a dataclass, bool, int, float, str, `T | None` or `tuple[T, ...]` of these.
        value: what was read. Integers are floats too; nothing else is converted.
        where: name of the value, for errors.

    Raises:
        ValueError: a field is missing, unknown, of another type, not finite, or refused by its
            dataclass. The message begins with the field's dotted name.
    """
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if isinstance(kind, types.UnionType):
        (inner,) = (option for option in typing.get_args(kind) if option is not types.NoneType)
        return None if value is None else decode(inner, value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _mismatch(where, "a list", value)
        inner = typing.get_args(kind)[0]
        return tuple(decode(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise _mismatch(where, "a finite number", value) from None
    if type(value) is not kind:
        raise _mismatch(where, kind.__name__, value)
    if kind is float and not math.isfinite(value):
        raise _mismatch(where, "a finite number", value)
    return value


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(where, "an object", value)
    prefix = f"{where}." if where else ""
    annotations = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{prefix}{unknown[0]} is unknown")
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{prefix}{missing[0]} is missing")
    fields = {name: decode(annotations[name], value[name], prefix + name) for name in names}
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{where or kind.__name__}: {error}") from None


def _mismatch(where: str, wanted: str, value: Any) -> ValueError:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1e18 else "a huge number"
    return ValueError(f"{where} must be {wanted}, not {text[:60]}")
