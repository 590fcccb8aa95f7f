"""Check level 1: a page that comes back is compared with the page that left.

The checksum is taken when device memory is released and compared when a fetch is done, over the
whole page, whatever lanes, segments and extents its bytes went through in between. Released memory
is filled with a pattern first, so that whoever still reads it reads nonsense at once.
"""

from __future__ import annotations

import zlib

import torch

from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias

__all__ = ["Checksums"]

_POISON = 0xDB
_ATTRIBUTE = "_tvm_checksum"  # on the storage object, which lives exactly as long as the page


class Checksums:
    """Seals and verifies `torch.UntypedStorage` objects. Blocks: 1 GB/s, and a copy on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seal(self, memory: object) -> None:
        """Remembers the checksum of device memory that is about to be released, and poisons it."""
        assert isinstance(memory, torch.UntypedStorage)
        setattr(memory, _ATTRIBUTE, self._checksum(memory))
        with torch.inference_mode(mode=False), RawDispatch():
            raw_alias(memory, self._device).fill_(_POISON)

    def is_intact(self, memory: object) -> bool:
        """Whether fetched memory holds what `seal` saw; True for memory that was never sealed."""
        assert isinstance(memory, torch.UntypedStorage)
        sealed = getattr(memory, _ATTRIBUTE, None)
        return sealed is None or sealed == self._checksum(memory)

    def _checksum(self, memory: torch.UntypedStorage) -> int:
        with torch.inference_mode(mode=False), RawDispatch():
            # Of a copy: `numpy()` on the storage itself would make it unresizable for good.
            return zlib.crc32(raw_alias(memory, self._device).clone().cpu().numpy().data)
