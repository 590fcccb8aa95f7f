"""Signals that come while the pager works: kept, and delivered at the first place that is safe."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tvm_pager import interrupts
from tvm_pager.interrupts import Shield, interruptible, renew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

# A function in one of the rooms, where nothing may be cut off.
_names: dict[str, Any] = {}
_code = compile(
    "def work(log, *calls):\n"
    "    log.append('begun')\n"
    "    for call in calls:\n"
    "        call()\n"
    "        log.append('a call')\n"
    "    log.append('over')\n"
    "    return 'result'\n",
    f"{interrupts._PACKAGE}paging{os.sep}work.py",
    "exec",
)
exec(_code, _names)
work: Callable[..., str] = _names["work"]
WHOLE = ["begun", "a call", "a call", "over"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in USED}
    yield
    assert not interrupts._kept
    assert sys.getprofile() is None
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def shield(handlers: None) -> Iterator[Shield]:
    shield = Shield()
    yield shield
    shield.lower()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def nothing() -> None:
    """A call, and so a place where Python looks for signals."""


@pytest.mark.usefixtures("shield")
def test_a_signal_waits_for_the_end_of_the_work() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        log.append(work(log, interrupt, nothing))
    assert log == WHOLE


@pytest.mark.usefixtures("shield")
def test_work_inside_work_counts_as_work() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(log, lambda: work([], interrupt), nothing)
    assert log == WHOLE


@pytest.mark.usefixtures("shield")
def test_elsewhere_it_is_delivered_at_once() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        [interrupt(), log.append("late")]
    assert log == []


@pytest.mark.usefixtures("shield")
def test_a_wait_is_cut_off() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(log, nothing, lambda: interruptible(interrupt))
    assert log == WHOLE[:2]


@pytest.mark.usefixtures("shield")
def test_a_wait_does_not_begin_when_a_signal_has_been_kept() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(log, interrupt, lambda: interruptible(lambda: log.append("waits")))
    assert log == WHOLE[:2]


@pytest.mark.usefixtures("shield")
def test_work_inside_a_wait_is_not_cut_off() -> None:
    """A transfer that is waited for takes its lane's lock, for a moment."""
    outer: list[str] = []
    inner: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(outer, lambda: interruptible(lambda: work(inner, interrupt, nothing)), nothing)
    assert inner == WHOLE
    assert outer == WHOLE[:1]


@pytest.mark.usefixtures("shield")
def test_a_finaliser_does_not_swallow_it() -> None:
    log: list[str] = []

    class Finalised:
        def __del__(self) -> None:
            interrupt()
            log.append("finalised")

    finalised = [Finalised()]

    def go() -> None:
        finalised.clear()
        nothing()
        log.append("late")

    with pytest.raises(KeyboardInterrupt):
        go()
    assert log == ["finalised"]


def test_a_handler_that_was_there_runs_once_and_late() -> None:
    log: list[Any] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: log.append(signum))
    shield = Shield()
    twice = [lambda: signal.raise_signal(signal.SIGUSR1)] * 2
    work(log, *twice)
    nothing()
    assert log == [*WHOLE, signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    assert log[-2:] == [signal.SIGUSR1] * 2
    shield.lower()


def test_of_two_kept_signals_both_are_delivered() -> None:
    log: list[Any] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: log.append(signum))
    shield = Shield()
    with pytest.raises(KeyboardInterrupt):
        work(log, interrupt, lambda: signal.raise_signal(signal.SIGUSR1))
    deadline = time.monotonic() + 5
    while interrupts._kept and time.monotonic() < deadline:
        time.sleep(0.001)
    assert log == [*WHOLE, signal.SIGUSR1]
    shield.lower()


@pytest.mark.usefixtures("shield")
def test_a_program_that_is_being_profiled_gets_it_a_little_later() -> None:
    log: list[str] = []
    events: list[str] = []

    def profiler(frame: object, event: str, argument: object) -> None:
        events.append(event)

    def go() -> None:
        work(log, interrupt, nothing)
        time.sleep(10)
        log.append("late")

    sys.setprofile(profiler)
    try:
        with pytest.raises(KeyboardInterrupt):
            go()
    finally:
        sys.setprofile(None)
    assert log == WHOLE
    assert events.count("return") > 2


def test_the_handlers_come_back_with_the_last_shield() -> None:
    before = signal.getsignal(signal.SIGINT)
    first, second = Shield(), Shield()
    assert signal.getsignal(signal.SIGINT) is not before
    first.lower()
    first.lower()
    assert signal.getsignal(signal.SIGINT) is not before
    second.lower()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_was_set_since_stays_and_may_call_ours() -> None:
    log: list[str] = []
    shield = Shield()
    ours: Any = signal.getsignal(signal.SIGINT)

    def theirs(signum: int, frame: Any) -> None:
        log.append("theirs")
        ours(signum, frame)

    signal.signal(signal.SIGINT, theirs)
    shield.lower()
    assert signal.getsignal(signal.SIGINT) is theirs
    again = Shield()  # now ours stands before theirs, which stands before ours
    with pytest.raises(KeyboardInterrupt):
        work(log, interrupt, nothing)
    assert log == [*WHOLE, "theirs"]
    again.lower()
    assert signal.getsignal(signal.SIGINT) is theirs


def test_a_handler_that_was_set_since_comes_behind_ours_when_it_is_looked_for() -> None:
    """Notebooks set Python's own handler anew at each cell, and what was there back after it."""
    log: list[str] = []
    shield = Shield()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    renew()
    with pytest.raises(KeyboardInterrupt):
        work(log, interrupt, nothing)
    assert log == WHOLE
    shield.lower()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    renew()  # nobody is open
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_or_left_to_the_system_is_not_touched() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    shield = Shield()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    renew()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    shield.lower()


def test_a_shield_of_another_thread_does_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    shields: list[Shield] = []
    thread = threading.Thread(target=lambda: shields.append(Shield()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    shields[0].lower()


def test_a_shield_that_another_thread_lowers_passes_everything_on() -> None:
    shield = Shield()
    thread = threading.Thread(target=shield.lower)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        [interrupt(), nothing()]
    Shield().lower()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("shield")
def test_waits_of_other_threads_know_nothing_of_signals() -> None:
    log: list[str] = []

    def in_thread() -> None:
        thread = threading.Thread(target=interruptible, args=(lambda: log.append("waited"),))
        thread.start()
        thread.join()

    with pytest.raises(KeyboardInterrupt):
        work(log, interrupt, in_thread)
    assert log == ["begun", "a call", "waited", "a call", "over"]
