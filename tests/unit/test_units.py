"""Byte sizes and durations: accepted forms, refusals that teach, round trips."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tvm_pager.errors import ConfigError
from tvm_pager.units import align_up, format_bytes, format_seconds, parse_bytes, parse_size

MAX_BYTES = 2**62


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (4096, 4096),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("512 B", 512),
        ("24GiB", 24 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("  800mb ", 800_000_000),
        ("2TB", 2 * 10**12),
        ("1 PiB", 2**50),
        ("0.3KiB", 307),
        (".5 KiB", 512),
    ],
)
def test_absolute_sizes_need_no_whole(value: int | str, expected: int) -> None:
    assert parse_bytes(value) == expected
    assert parse_size(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, 500), (1.0, 1000), ("50%", 500), ("12.5 %", 125), ("0.25", 250), ("1.0", 1000)],
)
def test_fractions_are_of_the_whole(value: float | str, expected: int) -> None:
    assert parse_bytes(value, whole_bytes=1000) == expected
    with pytest.raises(ConfigError, match="not known here"):
        parse_bytes(value)


def test_the_integer_one_is_a_byte_and_the_float_one_is_everything() -> None:
    assert parse_bytes(1, whole_bytes=1000) == 1
    assert parse_bytes("1", whole_bytes=1000) == 1
    assert parse_bytes(1.0, whole_bytes=1000) == 1000


@pytest.mark.parametrize(
    "value",
    [
        *(-1, "-1", "-4GiB", -0.5, 0.0, 1.5, math.nan, math.inf, "0%", "101%", "1.5", "0.0"),
        *("", " ", "GiB", "4 G", "4 Gi B", "4 GiB x", "1e9", "1_000", "0x10", "1.2.3", "5%%"),
        *("\N{ARABIC-INDIC DIGIT THREE}", "9" * 5000),
        *(True, False, None, [4096], b"4096"),
    ],
)
def test_a_refusal_says_what_was_given_and_what_is_accepted(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(value, whole_bytes=1000)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)
    assert '"24GiB"' in str(caught.value)
    assert '"50%"' in str(caught.value)


@given(st.integers(0, MAX_BYTES))
def test_bytes_round_trip_as_numbers_and_as_text(nbytes: int) -> None:
    assert parse_bytes(nbytes) == nbytes
    assert parse_bytes(str(nbytes)) == nbytes
    assert parse_bytes(f"{nbytes} B") == nbytes


@given(st.integers(0, MAX_BYTES))
@example(1023)
@example(1024)
@example(1024**2 - 1)
@example(1024**3 - 1)
def test_formatted_bytes_read_back_within_their_last_digit(nbytes: int) -> None:
    text = format_bytes(nbytes)
    number, unit = text.split()
    assert abs(parse_bytes(text) - nbytes) <= 0.005 * parse_bytes(f"1 {unit}") + 1
    assert float(number) < 1024 or unit == "PiB"


@given(st.integers(0, 2**20), st.sampled_from(["KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_whole_units_are_exact(count: int, unit: str) -> None:
    scale = parse_bytes(f"1{unit}")
    assert scale in {1024, 1024**2, 1024**3, 1000, 1000**2, 1000**3}
    assert parse_bytes(f"{count}{unit}") == count * scale


@given(st.floats(0, 1, exclude_min=True, allow_subnormal=False), st.integers(0, MAX_BYTES))
def test_a_fraction_never_exceeds_its_whole(fraction: float, whole_bytes: int) -> None:
    nbytes = parse_bytes(fraction, whole_bytes=whole_bytes)
    assert 0 <= nbytes <= whole_bytes
    assert math.isclose(nbytes, fraction * whole_bytes, rel_tol=1e-12, abs_tol=1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.50 KiB"), (3 * 2**29, "1.50 GiB"), (-2048, "-2.00 KiB")],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (8.5e-7, "850 ns"),
        (4.56e-6, "4.56 us"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (4.56, "4.56 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (-0.5, "-500 ms"),
        (math.inf, "inf s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(0, MAX_BYTES), st.integers(1, 2**31))
def test_align_up_gives_the_next_multiple(nbytes: int, alignment: int) -> None:
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment


def test_align_up_refuses_an_alignment_below_one() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        align_up(1, 0)
