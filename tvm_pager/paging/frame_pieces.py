"""Which bytes a copy between two tiers moves: pieces, cut where a frame changes extent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_pager.transfer.protocol import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.memory import Extent, Segment

__all__ = ["between_frames", "with_frame"]


def with_frame(segment: Segment, frame: Sequence[Extent], *, to_frame: bool) -> list[Piece]:
    """Copies between a segment on the device and its frame."""
    pieces: list[Piece] = []
    done = 0
    for extent in frame:
        nbytes = min(extent.nbytes, segment.nbytes - done)
        at = segment.page_offset + done
        pieces.append(
            Piece(at, at, extent.offset, nbytes)
            if to_frame
            else Piece(at, extent.offset, at, nbytes)
        )
        done += nbytes
    return pieces


def between_frames(
    page_offset: int, nbytes: int, source: Sequence[Extent], target: Sequence[Extent]
) -> list[Piece]:
    """Copies a frame of one tier into a frame of another, cut where either changes extent."""
    pieces: list[Piece] = []
    sources: list[Any] = [list(extent) for extent in source]
    targets: list[Any] = [list(extent) for extent in target]
    done = 0
    while done < nbytes:
        run = min(sources[0][1], targets[0][1], nbytes - done)
        pieces.append(Piece(page_offset + done, sources[0][0], targets[0][0], run))
        done += run
        for side in (sources, targets):
            side[0][0] += run
            side[0][1] -= run
            if not side[0][1]:
                side.pop(0)
    return pieces
