"""When pages are not used: the gaps of a steady iteration, in which they may be absent.

[Note: Gaps]
    A gap lies between two uses of a page, or between its last use and its death: it begins at the
    first moment after the one and ends at the operation of the other, which may lie in a later
    iteration. What comes from outside has a gap before its first use. A page that lives for ever
    and is never used has one gap without end. Plans have no use for gaps longer than an iteration:
    their pages stay. A bound needs them: such a gap lies several times over a moment.

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

__all__ = ["Gaps", "all_gaps", "find_gaps"]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps of a trace as arrays; see [Note: Gaps] and [Note: Versions].

    Moments are those of operations, or coarser ones (`Grid`).

    Attributes:
        num_moments: of one iteration.
        page: by gap: the page's number when the gap begins.
        start: by gap: the first moment at which it may be absent; 0 to `num_moments` - 1.
        length: by gap: moments until it must be there again; 1 to `num_moments`, or more in
            `all_gaps`.
        nbytes: by gap: what its absence frees.
        is_fetched: by gap: whether it ends with a use.
        is_endless: by gap: whether it never ends.
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
    def num_laps(self) -> int:
        """How many iterations the longest gap touches; at least 2."""
        last = int((self.start + self.length).max(initial=0))
        return max(2, -(-last // max(self.num_moments, 1)))

    @property
    def in_bytes(self) -> IntArray:
        """By gap: what has to be fetched if the page is absent."""
        return np.where(self.is_fetched, self.nbytes, 0)

    def covered(self, shares: FloatArray | BoolArray) -> FloatArray:
        """By moment: bytes that are away if of each gap that share is absent."""
        weights, num = shares * self.nbytes, self.num_laps * self.num_moments
        steps = np.bincount(self.start, weights, num + 1)
        steps -= np.bincount(self.start + self.length, weights, num + 1)
        laps = np.cumsum(steps)[:num].reshape(-1, self.num_moments)
        return np.asarray(laps.sum(axis=0), np.float64)

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
    """Finds the gaps that a plan can use: none is longer than an iteration."""
    gaps = all_gaps(index)
    return gaps.take(gaps.length <= gaps.num_moments)


def all_gaps(index: TraceIndex) -> Gaps:
    """Finds all gaps of a trace."""
    num_ops, kept = index.num_ops, index.frame_bytes
    version, written, out_bytes = _versions(index)
    uses = index.by_page
    # What comes from outside is there from the beginning, and may leave at once.
    outside = np.flatnonzero((index.born < 0) & (index.comes_from < 0))
    page = np.concatenate((index.use_page[uses], outside))
    start = np.concatenate((index.use_op[uses] + 1, np.zeros(len(outside), np.int64)))
    following = np.concatenate((index.next_use[uses], index.first_use[outside]))
    is_fetched = following != NEVER
    stop = np.where(is_fetched, following, index.dead_from[page])
    endless = np.flatnonzero((index.first_use == NEVER) & (index.dead_from == NEVER))
    num, none = len(endless), np.zeros(len(endless), np.int64)
    gaps = Gaps(
        num_ops,
        np.concatenate((page, endless)),
        np.concatenate((start, none)),
        np.concatenate((stop - start, np.full(num, num_ops))),
        np.concatenate((kept[page], kept[endless])),
        np.concatenate((is_fetched, none > 0)),
        np.repeat((False, True), (len(page), num)),
        np.concatenate((version, outside, len(out_bytes) + np.arange(num))),
        np.concatenate((written, np.zeros(len(outside) + num, np.int64))),
        np.concatenate((out_bytes, none)),
    )
    gaps = _past_the_end(index, gaps)
    gaps = gaps.take((gaps.length > 0) & (gaps.nbytes > 0))
    return gaps.take(np.lexsort((gaps.start - gaps.written, gaps.version)))


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
