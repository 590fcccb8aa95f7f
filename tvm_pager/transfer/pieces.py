"""The geometry of a transfer: pieces stay inside both tiers, and gather into runs of the file.

Standard library only. A piece out of bounds is a bug of the caller and raises `AssertionError`,
because the engines below copy by address and would corrupt memory silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.transfer.protocol import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm_pager.transfer.protocol import Transfer

__all__ = [
    "CHUNK_BYTES",
    "HOST_ALIGNMENT",
    "NVME_ALIGNMENT",
    "Part",
    "Run",
    "check_pieces",
    "nvme_runs",
]

CHUNK_BYTES = 16 << 20  # 96 % of the rate of long copies, and a fault waits for two at most
HOST_ALIGNMENT = 512
NVME_ALIGNMENT = 4096

_DOWN_TO_NVME = frozenset({Lane.D2N, Lane.H2N})
_SOURCE = {lane: lane.value[0] for lane in Lane}
_TARGET = {lane: lane.value[2] for lane in Lane}


class Part(NamedTuple):
    """Where some of a run's bytes are outside the file: in the page or in the slab. Bytes."""

    offset: int
    nbytes: int


class Run(NamedTuple):
    """Pieces of one transfer that follow each other in the swap file. Bytes."""

    nvme_offset: int  # multiple of NVME_ALIGNMENT
    nbytes: int
    parts: tuple[Part, ...]  # in file order

    def chunks(self, max_bytes: int) -> Iterator[Run]:
        """Cuts the run into runs of at most `max_bytes`, a multiple of NVME_ALIGNMENT."""
        offset, parts, filled = self.nvme_offset, list[Part](), 0
        for part in self.parts:
            at, left = part
            while left:
                take = min(left, max_bytes - filled)
                parts.append(Part(at, take))
                at, left, filled = at + take, left - take, filled + take
                if filled == max_bytes:
                    yield Run(offset, filled, tuple(parts))
                    offset, parts, filled = offset + filled, [], 0
        if filled:
            yield Run(offset, filled, tuple(parts))


def check_pieces(
    transfer: Transfer, *, device_bytes: int | None, host_bytes: int, nvme_bytes: int
) -> None:
    """Refuses a transfer that leaves its tiers, or with a device offset other than the page's.

    Args:
        transfer: what to check.
        device_bytes: size of the transfer's memory now, or None where the lane touches none.
        host_bytes: page space of the slab.
        nvme_bytes: size of the swap file.

    Raises:
        AssertionError: as above: a bug of the caller.
    """
    lane = transfer.lane
    if transfer.source is not None:  # in place of the file, and as long as the page
        nvme_bytes = device_bytes or 0
    sizes = {"d": device_bytes or 0, "h": host_bytes, "n": nvme_bytes, "r": device_bytes or 0}
    for piece in transfer.pieces:
        for side, offset in ((_SOURCE[lane], piece.src_offset), (_TARGET[lane], piece.dst_offset)):
            if offset < 0 or piece.nbytes <= 0 or offset + piece.nbytes > sizes[side]:
                raise AssertionError(
                    f"{piece} on {lane} leaves the {sizes[side]} bytes of {side!r}"
                )
            if side == "d" and offset != piece.page_offset:
                raise AssertionError(f"{piece} on {lane}: device offset differs from page_offset")


def nvme_runs(transfer: Transfer) -> list[Run]:
    """Gathers the pieces of a lane from or to NVMe into runs.

    [Note: Runs]
        Host extents end at multiples of 512 and file extents at multiples of 4096, so cutting a
        page where either ends leaves pieces whose file offset is no multiple of 4096. Each such
        piece continues the one before it: gathered, every run starts aligned, and only its last
        block is padded, into room that is the page's own.

    Raises:
        AssertionError: a run starts off the alignment.
    """
    to_nvme = transfer.lane in _DOWN_TO_NVME
    runs: list[Run] = []
    for piece in transfer.pieces:
        nvme_offset, offset = piece.dst_offset, piece.src_offset
        if not to_nvme:
            nvme_offset, offset = offset, nvme_offset
        part = Part(offset, piece.nbytes)
        if runs and runs[-1].nvme_offset + runs[-1].nbytes == nvme_offset:
            start, nbytes, parts = runs[-1]
            runs[-1] = Run(start, nbytes + part.nbytes, (*parts, part))
        elif nvme_offset % NVME_ALIGNMENT:
            raise AssertionError(f"{piece} on {transfer.lane} starts off {NVME_ALIGNMENT} bytes")
        else:
            runs.append(Run(nvme_offset, piece.nbytes, (part,)))
    return runs
