"""When pages are not used: the gaps of a steady iteration, in which they may be absent.

[Note: Gaps]
    A gap lies between two uses of a page, or between its last use and its death: it begins at the
    first moment after the one and ends at the operation of the other, which may lie in the next
    iteration. A page that nothing uses in any iteration has one gap without end. Gaps longer than
    an iteration are left out: their pages stay.

[Note: Versions]
    What a write leaves behind has to be written back once, before the first of the gaps in which
    the page is absent; in later gaps before the next write it is clean. These gaps share a version.
    What no operation ever writes was written back in an iteration long ago.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tvm_pager.planning.traces.trace_index import NEVER

if TYPE_CHECKING:
    import numpy.typing as npt

    from tvm_pager.planning.traces.trace_index import TraceIndex

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

__all__ = ["Gaps", "find_gaps"]


@dataclass(frozen=True, slots=True)
class Gaps:
    """All gaps of a trace as arrays; see [Note: Gaps] and [Note: Versions].

    Moments are those of operations, or coarser ones (`Grid`).

    Attributes:
        num_moments: of one iteration.
        page: by gap: the page's number when the gap begins.
        start: by gap: the first moment at which it may be absent; 0 to `num_moments` - 1.
        length: by gap: moments until it must be there again; 1 to `num_moments`.
        nbytes: by gap: what its absence frees.
        is_fetched: by gap: whether it ends with a use.
        is_endless: by gap: whether it ends at all.
        version: by gap; the gaps of a version are in the order of time.
        written: by gap: the moment from which its version can be written back; negative in the
            iteration before, and less than an iteration before `start`.
        out_bytes: by version: what has to be written back, 0 if it is clean.
    """

    num_moments: int
    page: IntArray
    start: IntArray
    length: IntArray
    nbytes: IntArray
    is_fetched: BoolArray
    is_endless: BoolArray
    version: IntArray
    written: IntArray
    out_bytes: IntArray

    def __len__(self) -> int:
        return len(self.page)

    @property
    def in_bytes(self) -> IntArray:
        """By gap: what has to be fetched if the page is absent."""
        return np.where(self.is_fetched, self.nbytes, 0)

    def covered(self, shares: FloatArray | BoolArray) -> FloatArray:
        """By moment: bytes that are away if of each gap that share is absent."""
        weights = shares * self.nbytes
        num = self.num_moments
        steps = np.bincount(self.start, weights, 2 * num + 1)
        steps -= np.bincount(self.start + self.length, weights, 2 * num + 1)
        away = np.cumsum(steps)
        return np.asarray(away[:num] + away[num : 2 * num], np.float64)

    def moved(self, chosen: BoolArray) -> tuple[int, int]:
        """Bytes in and out of an iteration in which the pages are absent in these gaps."""
        versions = np.unique(self.version[chosen])
        return int(self.in_bytes[chosen].sum()), int(self.out_bytes[versions].sum())

    def take(self, places: IntArray | BoolArray) -> Gaps:
        """Some of the gaps; versions keep their numbers."""
        return Gaps(
            self.num_moments,
            self.page[places],
            self.start[places],
            self.length[places],
            self.nbytes[places],
            self.is_fetched[places],
            self.is_endless[places],
            self.version[places],
            self.written[places],
            self.out_bytes,
        )


def find_gaps(index: TraceIndex) -> Gaps:
    """Finds all gaps of a trace."""
    num_ops = index.num_ops
    version, written, out_bytes = _versions(index)
    uses = index.by_page
    page, at = index.use_page[uses], index.use_op[uses]
    following = index.next_use[uses]
    is_fetched = following != NEVER
    stop = np.where(is_fetched, following, _deaths(index)[page])
    # What comes from outside is there from the beginning, and may leave at once.
    outside = np.flatnonzero((index.born < 0) & (index.comes_from < 0) & (index.frame_bytes > 0))
    first, is_used = _first_uses(index, outside)
    endless = np.flatnonzero(
        (index.becomes == np.arange(len(index.becomes))) & (np.diff(index.first_of_page) == 0)
    )
    num_outside, num_endless = len(outside), len(endless)
    base = len(out_bytes)
    kept = index.frame_bytes
    gaps = Gaps(
        num_ops,
        np.concatenate((page, outside, endless)),
        np.concatenate((at + 1, np.zeros(num_outside + num_endless, np.int64))),
        np.concatenate((stop - at - 1, first, np.full(num_endless, num_ops))),
        np.concatenate((kept[page], kept[outside], kept[endless])),
        np.concatenate((is_fetched, is_used, np.zeros(num_endless, np.bool_))),
        np.repeat((False, True), (len(page) + num_outside, num_endless)),
        np.concatenate((version, outside, base + np.arange(num_endless))),
        np.concatenate((written, np.zeros(num_outside + num_endless, np.int64))),
        np.concatenate((out_bytes, np.zeros(num_endless, np.int64))),
    )
    gaps = _past_the_end(index, gaps)
    fits = (gaps.length > 0) & (gaps.length <= num_ops) & (gaps.nbytes > 0)
    gaps = gaps.take(fits)
    return gaps.take(np.lexsort((gaps.start - gaps.written, gaps.version)))


def _deaths(index: TraceIndex) -> IntArray:
    """By page: when it is dead, counted past the end; one that lives longer: two iterations."""
    num_ops = index.num_ops
    successor = np.maximum(index.becomes, 0)
    later = np.where(index.becomes >= 0, num_ops + index.died[successor], num_ops)
    later = np.where(later > 2 * num_ops, 2 * num_ops + 1, later)
    return np.where(index.died <= num_ops, index.died, later)


def _first_uses(index: TraceIndex, pages: IntArray) -> tuple[IntArray, BoolArray]:
    """By page: the operation that uses it first, and True; or its death, and False."""
    starts, ends = index.first_of_page[pages], index.first_of_page[pages + 1]
    is_used = ends > starts
    if not len(index.by_page):
        return _deaths(index)[pages], is_used
    ops = index.use_op[index.by_page[np.minimum(starts, len(index.by_page) - 1)]]
    return np.where(is_used, ops, _deaths(index)[pages]), is_used


def _versions(index: TraceIndex) -> tuple[IntArray, IntArray, IntArray]:
    """By use, in the order of `by_page`: its version and when that was written; bytes by version.

    Each page has a version of what it was when the iteration began, and one after each write.
    """
    num_ops, num_pages = index.num_ops, len(index.born)
    uses = index.by_page
    page, is_write = index.use_page[uses], index.use_writes[uses]
    writes_before = np.concatenate(([0], np.cumsum(is_write)))
    of_page = writes_before[index.first_of_page]
    # The write numbered w (from 1, over all pages) makes version num_pages + w - 1.
    write_ops = index.use_op[uses[is_write]]
    so_far = writes_before[1:]
    is_own = so_far > of_page[page]
    inherited, inherited_at = _inherited(index, of_page, write_ops)
    version = np.where(is_own, num_pages + so_far - 1, inherited[page])
    own_at = write_ops[np.maximum(so_far - 1, 0)] + 1 if len(write_ops) else so_far
    written = np.where(is_own, own_at, inherited_at[page])
    kept = index.frame_bytes
    out_bytes = np.concatenate((kept, kept[page[is_write]]))
    # What comes around unwritten was written back in an iteration long ago.
    clean = inherited[:num_pages] == np.arange(num_pages)
    out_bytes[:num_pages][clean & (index.comes_from >= 0)] = 0
    return version, np.maximum(written, index.use_op[uses] + 2 - num_ops), out_bytes


def _inherited(
    index: TraceIndex, of_page: IntArray, write_ops: IntArray
) -> tuple[IntArray, IntArray]:
    """By page: the version that it begins the iteration with, and when that was written."""
    num_ops, num_pages = index.num_ops, len(index.born)
    version = np.arange(num_pages)
    written = np.where(index.comes_from >= 0, -num_ops, 0)
    for page in np.flatnonzero(index.comes_from >= 0).tolist():
        before, seen = int(index.comes_from[page]), {page}
        distance = 1
        while of_page[before + 1] == of_page[before]:
            seen.add(before)
            earlier = int(index.comes_from[before])
            if earlier < 0 or earlier in seen:
                break
            before, distance = earlier, distance + 1
        last = int(of_page[before + 1])
        if last > of_page[before]:
            version[page] = num_pages + last - 1
            written[page] = int(write_ops[last - 1]) + 1 - distance * num_ops
        elif index.comes_from[before] < 0:
            version[page] = before
    return version, written


def _past_the_end(index: TraceIndex, gaps: Gaps) -> Gaps:
    """Gaps that begin at the end of the iteration begin at the beginning of the next one."""
    over = gaps.start == gaps.num_moments
    lives_on = over & (index.becomes[gaps.page] >= 0)
    gaps.page[lives_on] = index.becomes[gaps.page[lives_on]]
    gaps.start[over] = 0
    gaps.written[over] -= gaps.num_moments
    gaps.length[over & ~lives_on] = 0
    return gaps
