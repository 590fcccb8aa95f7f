"""The traces that a pager knows, and when it may record another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.paging.known_trace import UNKNOWN, KnownTrace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm_pager.paging.recorder import Recording

__all__ = ["TraceShelf"]

_MAX_TRACES = 16
_FREE_RECORDINGS = 4
_MAX_PAUSE = 1024  # iterations


class TraceShelf:
    """At most sixteen known traces; the one that was followed least recently goes.

    [Note: Recordings that never come again]
        They cost time. After four of them in a row 1, 2, 4 ... iterations pass before the next.
    """

    def __init__(self) -> None:
        self._known: list[KnownTrace] = []
        self._num_ids = 0
        self._num_unknown = self._pause = 0
        self._now = 0

    def __iter__(self) -> Iterator[KnownTrace]:
        """The one that was followed last comes first."""
        return iter(sorted(self._known, key=lambda known: -known.last_followed))

    def __len__(self) -> int:
        return len(self._known)

    @property
    def may_record(self) -> bool:
        """Whether no pause is on; see [Note: Recordings that never come again]."""
        return not self._pause

    def pass_boundary(self) -> None:
        self._now += 1
        self._pause = max(0, self._pause - 1)

    def touch(self, known: KnownTrace) -> None:
        """The trace is followed now."""
        known.last_followed = self._now

    def forget_plans(self) -> None:
        """Traces stay, and are planned anew when they are followed."""
        for known in self._known:
            known.book = known.limits = None

    def keep(self, recording: Recording) -> KnownTrace:
        """The trace that the recording is of: a known one, which it confirms, or a new one."""
        for known in self._known:
            if known.is_same_as(recording):
                known.confirm(recording)
                self._num_unknown = 0
                break
        else:
            known = KnownTrace(self._num_ids, recording)
            self._num_ids += 1
            self._num_unknown += 1
            if self._num_unknown > _FREE_RECORDINGS:
                self._pause = min(1 << (self._num_unknown - _FREE_RECORDINGS), _MAX_PAUSE)
            if len(self._known) >= _MAX_TRACES:
                self._known.remove(min(self._known, key=lambda known: known.last_followed))
            self._known.append(known)
        self.touch(known)
        return known

    def replace(self, old: KnownTrace, new: KnownTrace) -> None:
        """The new one does for both, unless the old one came twice itself."""
        self._num_unknown = 0
        if not old.is_confirmed and old in self._known:
            self._known.remove(old)
            for known in self._known:
                known.forget(old.id)

    def expected(self, previous: KnownTrace | None) -> KnownTrace | None:
        """The trace that should come after `previous`; None: it is not known."""
        if previous is None or previous.successor == UNKNOWN:
            return None
        return next((known for known in self._known if known.id == previous.successor), previous)

    def confirmed(self) -> KnownTrace | None:
        """Of those that came more than once, the one that was followed last."""
        return next((known for known in self if known.is_confirmed), None)

    def with_beginning(self, known: KnownTrace, num_ops: int) -> KnownTrace | None:
        """The trace that is exactly the first operations of another one."""
        for other in self._known:
            if len(other.names) == num_ops and known.num_shared(other) == num_ops:
                return other
        return None
