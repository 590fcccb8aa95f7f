"""Checksums of tensors, so that runs in different processes can be compared bit by bit.

A digest covers names, shapes, dtypes and bytes. Tensors are read one after the other, so a paged
run needs room for one at a time.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

__all__ = ["combine", "digest_tensors"]


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Gives the SHA-256 of each named tensor, as hexadecimal text. Copies from a GPU if it must."""
    return {name: _digest(tensor) for name, tensor in tensors}


def combine(digests: Mapping[str, str]) -> str:
    """Gives one SHA-256 over named digests, whatever their order."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name]}\n".encode())
    return whole.hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    import torch

    plain = tensor.detach().cpu().contiguous()
    whole = hashlib.sha256(f"{tuple(plain.shape)} {plain.dtype}".encode())
    # Bytes, because numpy does not know every dtype; flat, because 0-d tensors cannot be viewed as
    # another.
    whole.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()
