"""Events are immutable values; a tee hands each to all sinks in order."""

from __future__ import annotations

import pytest

from tvm_pager.events import Event, EventKind, EventSink, TeeSink


class RecordingSink:
    def __init__(self, name: str, seen: list[tuple[str, Event]]) -> None:
        self.name = name
        self.seen = seen

    def emit(self, event: Event) -> None:
        self.seen.append((self.name, event))


def make_event(kind: EventKind = EventKind.FETCH) -> Event:
    return Event(kind, page_id=7, nbytes=4096, lane="h2d", start_ns=10, end_ns=30)


def test_an_event_is_a_value_that_cannot_change() -> None:
    event = make_event()
    assert event == make_event()
    assert len({event, make_event()}) == 1
    assert event.detail == ""
    with pytest.raises(AttributeError):
        event.nbytes = 0  # type: ignore[misc]
    assert not hasattr(event, "__dict__")


def test_every_kind_has_a_name_of_its_own() -> None:
    assert {kind.name for kind in EventKind} == {
        *("CREATE", "FAULT", "FETCH", "WRITE_BACK"),
        *("EVICT", "FREE", "FAILURE", "NOTICE"),
    }
    assert all(kind.value == kind.name.lower() for kind in EventKind)


def test_a_tee_hands_each_event_to_every_sink_in_order() -> None:
    seen: list[tuple[str, Event]] = []
    tee = TeeSink(RecordingSink("a", seen), RecordingSink("b", seen))
    fault, fetch = make_event(EventKind.FAULT), make_event(EventKind.FETCH)
    tee.emit(fault)
    tee.emit(fetch)
    assert seen == [("a", fault), ("b", fault), ("a", fetch), ("b", fetch)]


def test_a_tee_is_a_sink_and_tees_nest() -> None:
    seen: list[tuple[str, Event]] = []
    tee = TeeSink(TeeSink(RecordingSink("inner", seen)), TeeSink())
    assert isinstance(tee, EventSink)
    tee.emit(make_event())
    assert seen == [("inner", make_event())]
