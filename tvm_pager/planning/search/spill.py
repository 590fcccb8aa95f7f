"""What goes to NVMe where host memory does not suffice. Pure.

[Note: Host memory over time]
    A version of a page that leaves the device takes host memory from its write-back to the end of
    the last gap in which it is absent. What is too much goes to NVMe: the choice is the same
    covering problem as on the device, with versions in the place of gaps, and the bytes that the
    disk would move as costs; the disk is slow, so the fewest are best. Two of the largest pages are
    left free, as the pager does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvm_pager.planning.search.choice import choose_gaps
from tvm_pager.planning.search.gaps import Gaps

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.limits import Limits

    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["spilled_versions"]

_FRAME_BYTES = 4096  # below the device


def spilled_versions(chosen: Gaps, limits: Limits, has_disk: bool) -> BoolArray | None:
    """Decides which versions are written to NVMe.

    Args:
        chosen: the gaps in which pages are absent.
        limits: of host and NVMe.
        has_disk: whether there is any.

    Returns:
        By version; None: host and NVMe together do not suffice.
    """
    on_disk = np.zeros(len(chosen.out_bytes), np.bool_)
    if not len(chosen):
        return on_disk
    stays = _stays(chosen)
    room = max(0, limits.host_bytes - 2 * int(stays.nbytes.max()))
    used = stays.covered(np.ones(len(stays))).astype(np.int64)
    if int(used.max()) <= room:
        return on_disk
    fetched = np.bincount(chosen.version, chosen.in_bytes, len(on_disk))
    in_cost = fetched[stays.version].astype(np.float64)
    choice = choose_gaps(stays, used - room, in_cost, stays.out_bytes.astype(np.float64))
    if not has_disk or choice is None:
        return None
    if int(stays.covered(choice.chosen).max()) > limits.nvme_bytes:
        return None
    on_disk[stays.version[choice.chosen]] = True
    return on_disk


def _stays(chosen: Gaps) -> Gaps:
    """One gap per version: how long its bytes lie below the device."""
    versions, first, counts = np.unique(chosen.version, return_index=True, return_counts=True)
    last = first + counts - 1
    # Ends are counted from the beginning of the first gap; the later ones begin after it.
    start = chosen.start[first]
    since = chosen.start - chosen.written
    length = since[last] - since[first] + chosen.length[last]
    nbytes = -(-chosen.nbytes[first] // _FRAME_BYTES) * _FRAME_BYTES
    is_old = (chosen.out_bytes[versions] == 0) | chosen.is_endless[first]
    num = chosen.num_moments
    none = np.zeros(len(versions), np.bool_)
    return Gaps(
        num,
        chosen.page[first],
        np.where(is_old, 0, start),
        np.where(is_old, num, np.minimum(length, num)),
        nbytes,
        ~none,
        none,
        versions,
        start,
        chosen.out_bytes,
    )
