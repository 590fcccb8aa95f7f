"""What happens to pages, as events, and where they go.

Everything that happens is emitted at one place, by the code that made it happen, after it happened:
each kind of event has one line of code that emits it. Without a sink nothing is built and nothing
is called, so the cost of not looking is one `is None`.
Imports the standard library only.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Event", "EventKind", "EventSink", "TeeSink"]


class EventKind(enum.Enum):
    """What happened. The value is the name that timelines and counters show."""

    # Members are singletons, and Enum's own hash is a Python call per look-up.
    __hash__ = object.__hash__

    CREATE = "create"  # a page came into being, in the tier that `detail` names
    FAULT = "fault"  # an access found its page off the device; the span is the wait
    FETCH = "fetch"  # bytes moved toward the device, on demand or ahead of it
    WRITE_BACK = "write_back"  # dirty bytes moved down; the page is clean afterwards
    EVICT = "evict"  # a frame was given up
    FREE = "free"  # the last reference to a page went away
    FAILURE = "failure"  # a transfer or a policy failed; `detail` says how
    NOTICE = "notice"  # what a person should know once, such as a storage that cannot be paged


class Event(NamedTuple):
    """One thing that happened. Instants have `start_ns == end_ns`.

    Attributes:
        kind: what happened.
        page_id: the page it happened to, or -1 where no page is meant.
        nbytes: bytes moved, freed or created; 0 where that makes no sense.
        lane: the lane of a transfer ("d2h", "n2h", ...), else None.
        start_ns: when it began, in nanoseconds of the pager's clock (real or virtual).
        end_ns: when it ended, same clock, not before `start_ns`.
        detail: a short text for people; "" where the rest says it all.
    """

    kind: EventKind
    page_id: int
    nbytes: int
    lane: str | None
    start_ns: int
    end_ns: int
    detail: str = ""


@runtime_checkable
class EventSink(Protocol):
    """Takes events. Counters, progress displays and timelines are sinks."""

    def emit(self, event: Event) -> None:
        """Takes one event.

        Called on whichever thread made it happen, often under the pager's lock: so return at once,
        call nothing of the pager, touch no tensor, and do not raise (an exception would surface in
        the user's operation).
        """


class TeeSink:
    """Hands each event to several sinks, in the order in which they were given."""

    __slots__ = ("_sinks",)

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        """Takes one event and gives it to every sink."""
        for sink in self._sinks:
            sink.emit(event)
