"""Two versions of one tensor, element by element: where they differ, and by how much."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import torch

__all__ = ["Element", "Elements", "compare_elements"]

_PIECE_ELEMENTS = 2**22  # looked at together


@dataclass(frozen=True, slots=True)
class Element:
    """One element that differs: its index, both values exactly, and their bits."""

    index: tuple[int, ...]
    plain: str
    paged: str
    plain_bits: str
    paged_bits: str


@dataclass(slots=True)
class Elements:
    """How two tensors of the same shape and dtype differ.

    Attributes:
        num_elements: of the tensor.
        num_different: elements with other bits.
        first: the first of them, as many as were asked for.
        max_absolute: largest difference of two finite values.
        max_relative: largest such difference, divided by the larger of the two magnitudes.
        num_not_finite: different elements of which one at least is infinite or not a number.
    """

    num_elements: int
    num_different: int = 0
    first: list[Element] = field(default_factory=list)
    max_absolute: float = 0.0
    max_relative: float = 0.0
    num_not_finite: int = 0


def compare_elements(
    plain: IO[bytes], paged: IO[bytes], dtype: str, shape: tuple[int, ...], max_elements: int
) -> Elements:
    """Compares the bytes in two files, which hold one tensor each, in logical order. Blocks."""
    kind: torch.dtype = getattr(torch, dtype)
    item_bytes = kind.itemsize
    with (
        mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as mine,
        mmap.mmap(paged.fileno(), 0, access=mmap.ACCESS_READ) as theirs,
    ):
        found = Elements(num_elements=len(mine) // item_bytes)
        for start in range(0, len(mine), _PIECE_ELEMENTS * item_bytes):
            piece = slice(start, start + _PIECE_ELEMENTS * item_bytes)
            sides = [
                np.frombuffer(side[piece], np.uint8).reshape(-1, item_bytes)
                for side in (mine, theirs)
            ]
            places = np.flatnonzero((sides[0] != sides[1]).any(axis=1))
            if not len(places):
                continue
            different = [side[places] for side in sides]
            values = [torch.from_numpy(side.reshape(-1)).view(kind) for side in different]
            _measure(found, *values)
            for number in range(min(len(places), max_elements - len(found.first))):
                flat = start // item_bytes + int(places[number])
                index = tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()
                texts = [_text(side[number]) for side in values]
                bits = [f"0x{side[number].tobytes()[::-1].hex()}" for side in different]
                found.first.append(Element(index, *texts, *bits))
            found.num_different += len(places)
    return found


def _measure(found: Elements, plain: torch.Tensor, paged: torch.Tensor) -> None:
    wide = torch.complex128 if plain.is_complex() else torch.float64
    mine, theirs = plain.to(wide), paged.to(wide)
    finite = mine.isfinite() & theirs.isfinite()
    found.num_not_finite += int((~finite).sum())
    absolute = (mine[finite] - theirs[finite]).abs()
    if absolute.numel():
        larger = torch.maximum(mine[finite].abs(), theirs[finite].abs())
        relative = torch.where(larger > 0, absolute / larger, 0.0)
        found.max_absolute = max(found.max_absolute, absolute.max().item())
        found.max_relative = max(found.max_relative, relative.max().item())


def _text(value: torch.Tensor) -> str:
    """Writes one value so that reading it gives the same bits back."""
    if value.is_complex():
        return repr(value.to(torch.complex128).item())
    if value.is_floating_point():
        digits = 17 if value.dtype is torch.float64 else 9
        return format(value.to(torch.float64).item(), f".{digits}g")
    return repr(value.item())
