"""Byte sizes, durations and alignment: what people write, and what they read back.

Owns no state. Imports the error tree only.

[Note: Byte sizes]
    An integer counts bytes. A string is a number with a unit ("24GiB", "1.5 GiB", "800MB"; letter
    case and spaces do not matter), a plain count of bytes ("4096"), a percentage ("50%") or a
    fraction with a decimal point ("0.5"). A float is a fraction. Fractions lie in (0, 1] and need
    the size of the whole. KiB, MiB, ... are powers of 1024; KB, MB, ... are powers of 1000. What
    does not come to a whole number of bytes is rounded down.
"""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction

from tvm_pager.errors import ConfigError

__all__ = ["align_up", "format_bytes", "format_seconds", "parse_bytes", "parse_size"]

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_UNIT_BYTES = {"b": 1}
for _power, _unit in enumerate(_BINARY_UNITS, start=1):
    _UNIT_BYTES[_unit.lower()] = 1024**_power
    _UNIT_BYTES[_unit[0].lower() + "b"] = 1000**_power

# Digits are bounded so that a hostile string cannot ask for a number of a million digits.
_SIZE = re.compile(
    r"(?P<number>\d{1,20}(?:\.\d{1,20})?|\.\d{1,20})\s*(?P<unit>[a-z]*|%)",
    re.ASCII | re.IGNORECASE,
)
_ACCEPTED = (
    'accepted are a number of bytes (4096), "24GiB" or "1.5 GiB" (powers of 1024), '
    '"800MB" (powers of 1000), "50%" or a fraction such as 0.5 of the whole'
)


def parse_size(value: int | float | str) -> int | float:
    """Reads a byte size that may be relative: bytes as an int, or a fraction in (0, 1] as a float.

    Raises:
        ConfigError: `value` is not one of the forms in [Note: Byte sizes].
    """
    size = _parse(value)
    return float(size) if isinstance(size, Fraction) else size


def parse_bytes(value: int | float | str, *, whole_bytes: int | None = None) -> int:
    """Reads a byte size; see [Note: Byte sizes].

    Args:
        value: what was given.
        whole_bytes: what fractions and percentages refer to; without it they are refused.

    Raises:
        ConfigError: `value` has none of the accepted forms, is negative, or is relative to an
            unknown whole.
    """
    size = _parse(value)
    if not isinstance(size, Fraction):
        return size
    if whole_bytes is None:
        raise ConfigError(
            f"{value!r} is a fraction, but of what is not known here: give bytes, such as '4GiB'"
        )
    return math.floor(size * whole_bytes)


def format_bytes(nbytes: int) -> str:
    """Writes a number of bytes for people: "512 B", "1.50 GiB"; `parse_bytes` reads it back."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in _BINARY_UNITS:
        size /= 1024
        # 1023.995 would print as "1024.00": the next unit says the same, shorter.
        if abs(size) < 1023.995:
            return f"{size:.2f} {unit}"
    return f"{size:.2f} {_BINARY_UNITS[-1]}"


def format_seconds(seconds: float) -> str:
    """Writes a duration for people: "850 ns", "12.3 ms", "4.56 s", "3 min 05 s", "2 h 07 min"."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        if minutes < 60:
            return f"{minutes} min {rest:02d} s"
        return f"{minutes // 60} h {minutes % 60:02d} min"
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 0.9995:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{round(seconds * 1e9)} ns"


def align_up(nbytes: int, alignment: int) -> int:
    """Gives the smallest multiple of `alignment` (bytes, at least 1) that is not below `nbytes`."""
    if alignment < 1:
        raise ValueError(f"an alignment of {alignment} bytes: at least 1 is needed")
    return -(-nbytes // alignment) * alignment


def _parse(value: object) -> int | Fraction:
    if isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a byte size: {_ACCEPTED}")
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, float):
        if math.isfinite(value) and 0 < value <= 1:
            return Fraction(value)
        raise ConfigError(f"{value!r}: a float is a fraction in (0, 1] of the whole; {_ACCEPTED}")
    try:
        nbytes = operator.index(value)  # type: ignore[arg-type]  # whatever is an integer
    except TypeError:
        raise ConfigError(f"{value!r} is not a byte size: {_ACCEPTED}") from None
    if nbytes < 0:
        raise ConfigError(f"{nbytes} bytes: a size cannot be negative; {_ACCEPTED}")
    return nbytes


def _parse_text(text: str) -> int | Fraction:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a byte size: {_ACCEPTED}")
    number, unit = Fraction(match["number"]), match["unit"].lower()
    if unit == "%" or (not unit and "." in match["number"]):
        fraction = number / 100 if unit else number
        if not 0 < fraction <= 1:
            raise ConfigError(f"{text!r}: a fraction lies in (0, 1], or (0%, 100%]; {_ACCEPTED}")
        return fraction
    if unit and unit not in _UNIT_BYTES:
        raise ConfigError(f"{text!r}: {match['unit']!r} is not a unit of bytes; {_ACCEPTED}")
    return math.floor(number * _UNIT_BYTES.get(unit, 1))


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
