"""Reuse distances: how many bytes of other pages are used between two uses of one.

[Note: Counting]
    Between a use and the page's use before it, each other page counts once: at its last use in
    between. So of all bytes used in between, those count double that are used again in between. A
    use t with the previous use p(t) has that excess in the uses k < t with p(k) > p(t): weighted
    inversions, counted level by level as a merge sort would, for all uses of a level at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

__all__ = ["reuse_bytes"]


def reuse_bytes(use_page: IntArray, becomes: IntArray, page_bytes: IntArray) -> IntArray:
    """Bytes of the other pages used since a page's use before, by use.

    -1: it has none in this iteration nor in the one before.

    Args:
        use_page: page of each use, in order.
        becomes: by page: its number one iteration later, or -1.
        page_bytes: by page.
    """
    num_pages, num_uses = len(page_bytes), len(use_page)
    # Two iterations in a row. Names of pages in the first: their own numbers where the page lives
    # on, as the second calls it; others get numbers of their own.
    names = np.where(becomes >= 0, becomes, np.arange(num_pages) + num_pages)
    pages = np.concatenate((names[use_page], use_page))
    weights = np.concatenate((page_bytes[use_page], page_bytes[use_page]))
    previous = _previous(pages)
    totals = np.concatenate(([0], np.cumsum(weights)))
    places = np.arange(len(pages))
    between = totals[places] - totals[np.minimum(previous + 1, places)]
    result = np.where(previous >= 0, between - _inversions(previous, weights), -1)
    return np.asarray(result[num_uses:], np.int64)


def _previous(pages: IntArray) -> IntArray:
    """By use: the place of the same page's use before, or -1."""
    order = np.argsort(pages, kind="stable")
    previous = np.full(len(pages), -1, np.int64)
    same = pages[order[1:]] == pages[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _inversions(keys: IntArray, weights: IntArray) -> IntArray:
    """By place t: the weights of the places k < t with keys[k] > keys[t], together.

    Weights of places with a negative key do not count, nor do such places get a count.
    """
    places = np.flatnonzero(keys >= 0)
    result = np.zeros(len(keys), np.int64)
    if not len(places):
        return result
    # Compact positions; sorted by falling key, so that what counts for a place stands before it.
    order = np.argsort(-keys[places], kind="stable")
    values = weights[places]
    counts = np.zeros(len(places), np.int64)
    half = 1
    while half < len(places):
        half *= 2
    while half >= 1:
        # `order` holds the blocks of 2 * half positions one after the other, each by falling key.
        is_left = (order // half) % 2 == 0
        sums = np.cumsum(np.where(is_left, values[order], 0))
        block = order // (2 * half)
        starts = np.flatnonzero(np.concatenate(([True], block[1:] != block[:-1])))
        before = np.where(starts > 0, sums[np.maximum(starts, 1) - 1], 0)
        lengths = np.diff(np.concatenate((starts, [len(order)])))
        in_block = sums - np.repeat(before, lengths)
        counts[order[~is_left]] += in_block[~is_left]
        order = order[np.argsort(order // half, kind="stable")]
        half //= 2
    result[places] = counts
    return result
