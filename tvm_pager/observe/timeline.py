"""What happens as a timeline: a file that ui.perfetto.dev and chrome://tracing show.

[Note: Format]
    The JSON of Chrome's trace events, one a line: complete events ("X") and instants ("i") in
    microseconds, and the names of the rows ("M"). It is written as it happens; a file that was cut
    off (the process was killed) lacks only the bracket at its end, which both viewers forgive.

[Note: Rows]
    Every lane is a row, and so are faults and evictions. What overlaps on a lane goes to a second
    row and so on, because a row can only nest. Spans from a pager's events are as the host saw
    them: from the submission of a transfer until its end was noticed, or until all use of it was
    ordered behind it.
"""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any, Self

from tvm_pager.errors import ConfigError
from tvm_pager.events import EventKind

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from tvm_pager.events import Event

__all__ = ["Timeline"]

_ORDER = ("operations", "faults", "d2h", "h2d", "d2n", "n2d", "h2n", "n2h", "evictions", "pages")
_TRACKS = {
    EventKind.FAULT: "faults",
    EventKind.EVICT: "evictions",
    EventKind.NOTICE: "notices",
    EventKind.FAILURE: "notices",
}
_MOVES = frozenset({EventKind.FETCH, EventKind.WRITE_BACK})


class Timeline:
    """An event sink that writes a file; see the notes above. Called under the pager's lock.

    Args:
        path: of the file, which is replaced.
        title: of the process in the viewer.
        has_moves: whether transfers are taken from the events; a simulator knows better.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "tvm_pager",
        has_moves: bool = True,
    ) -> None:
        self._path = path
        self._has_moves = has_moves
        self._rows: dict[str, list[list[int]]] = {}  # by track: id and last end of each row
        self._num_rows = 0
        self._start_ns: int | None = None
        self._error: OSError | None = None
        try:
            self._file: IO[str] | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
            self._file.write("[\n")
        except OSError as error:
            raise self._refusal(error) from error
        self._name("process_name", {"name": title}, 0)

    def emit(self, event: Event) -> None:
        """Takes one event."""
        kind = event.kind
        if kind in _MOVES:
            if not self._has_moves:
                return
            track = event.lane or kind.value
        else:
            track = _TRACKS.get(kind, "pages")
        name = event.detail if kind is EventKind.FAULT else kind.value
        detail = {} if kind is EventKind.FAULT or not event.detail else {"detail": event.detail}
        self.add(
            track,
            name,
            event.start_ns,
            event.end_ns,
            {"page": event.page_id, "bytes": event.nbytes, **detail},
        )

    def add(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        details: dict[str, Any] | None = None,
    ) -> None:
        """Adds a span; an instant if it begins where it ends."""
        if self._start_ns is None:
            self._start_ns = start_ns
        event: dict[str, Any] = {
            "name": name,
            "cat": track,
            "ph": "X" if end_ns > start_ns else "i",
            "ts": (start_ns - self._start_ns) / 1000,
            "pid": 1,
            "tid": self._row(track, start_ns, end_ns),
        }
        if end_ns > start_ns:
            event["dur"] = (end_ns - start_ns) / 1000
        else:
            event["s"] = "t"
        if details:
            event["args"] = details
        self._write(event)

    def close(self) -> None:
        """Ends the file. Idempotent.

        Raises:
            ConfigError: it could not be written, then or before.
        """
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                if self._error is None:
                    file.write('{"name": "end", "ph": "M", "pid": 1, "tid": 0, "args": {}}\n]\n')
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise self._refusal(self._error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _row(self, track: str, start_ns: int, end_ns: int) -> int:
        rows = self._rows.setdefault(track, [])
        for row in rows:
            if row[1] <= start_ns:
                row[1] = end_ns
                return row[0]
        self._num_rows += 1
        label = track if not rows else f"{track} ({len(rows) + 1})"
        rows.append([self._num_rows, end_ns])
        self._name("thread_name", {"name": label}, self._num_rows)
        place = _ORDER.index(track) if track in _ORDER else len(_ORDER)
        self._name("thread_sort_index", {"sort_index": 100 * place + len(rows)}, self._num_rows)
        return self._num_rows

    def _name(self, what: str, arguments: dict[str, Any], row: int) -> None:
        self._write({"name": what, "ph": "M", "pid": 1, "tid": row, "args": arguments})

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None or self._error is not None:
            return
        try:
            self._file.write(json.dumps(event) + ",\n")
        except OSError as error:  # a full disk must not stop the program; `close` tells
            self._error = error

    def _refusal(self, error: OSError) -> ConfigError:
        reason = error.strerror or str(error)
        return ConfigError(f"timeline {self._path}: {reason}; name another file")
