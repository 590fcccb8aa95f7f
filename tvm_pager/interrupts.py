"""Signals wait while the pager changes its books: Ctrl-C leaves them whole.

[Note: Signals]
    Python runs a signal's handler in the main thread between any two bytecodes. An exception from
    there (KeyboardInterrupt, a time limit) in the middle of the pager's work would leave pages
    half-moved and locks held. So while a pager is open our handler stands before the others. If the
    stack shows that the main thread is at work in one of `_ROOMS`, the signal is kept, and the
    handler behind runs as soon as the thread has left them; blocking waits are `interruptible`, and
    there it runs at once. Whether to wait is decided when a signal comes, from the stack alone: an
    operation costs nothing. While a signal is kept a profile function looks at each call and
    return; where the program has one of its own, a thread repeats the signal instead.

    Covered are the signals that have a handler in Python when a pager is opened in the main thread:
    SIGINT always, and those that the program has set up before. Notebooks put a handler of their
    own there at each cell, so that it is looked for again now and then (`renew`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps in 2 us
import _thread
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Shield", "interruptible", "renew"]

_T = TypeVar("_T")

# Exceptions from these go nowhere: C calls them, and prints what they raise.
_SWALLOWED = ("__del__", "_before_fork", "_in_parent", "_in_child", "_at_exit")
_REPEAT_S = 0.01
_SIGINT = int(signal.SIGINT)


class Shield:
    """Keeps signals from the pager's work, from its making until `lower`; several may overlap.

    Does nothing outside the main thread: Python lets nobody else set handlers.
    """

    num_up = 0

    def __init__(self) -> None:
        self._is_up = _is_main_thread()
        if self._is_up:
            Shield.num_up += 1
            _install()

    def lower(self) -> None:
        """Gives the handlers back, with the last shield; idempotent.

        Those that somebody has set since stay. Called in another thread it leaves ours, which pass
        everything on.
        """
        if self._is_up:
            self._is_up = False
            Shield.num_up -= 1
            if not Shield.num_up and _is_main_thread():
                _uninstall()


def renew() -> None:
    """Puts ours before a handler of SIGINT that was set since. 0.1 us where there is none."""
    handler = _signal.getsignal(_SIGINT)
    if handler.__class__ is _Deferral or not callable(handler):
        return
    if Shield.num_up and _is_main_thread():
        _install()


def interruptible(wait: Callable[[], _T]) -> _T:
    """Runs a blocking call that an exception may cut off at any bytecode; see [Note: Signals].

    Raises:
        BaseException: what `wait` raises, or the handler of a signal.
    """
    return wait()


class _Deferral:
    """Our handler of one signal, before the one that was there."""

    def __init__(self, behind: Callable[[int, FrameType | None], Any]) -> None:
        self.behind = behind

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if (self, signum) not in _kept:
            _kept.append((self, signum))
        if not _is_at_work(sys._getframe(1)):
            _deliver()
        elif sys.getprofile() is None:
            sys.setprofile(_look)
        elif sys.getprofile() is not _look:
            _start_to_repeat()


_installed: dict[int, _Deferral] = {}
_kept: list[tuple[_Deferral, int]] = []  # with the signal's number, oldest first


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _install() -> None:
    for signum in signal.valid_signals():
        handler = signal.getsignal(signum)
        if callable(handler) and not isinstance(handler, _Deferral):
            _installed[signum] = _Deferral(handler)
            signal.signal(signum, _installed[signum])


def _uninstall() -> None:
    for signum, deferral in _installed.items():
        behind = deferral.behind
        if signal.getsignal(signum) is deferral:
            signal.signal(signum, behind)
    _installed.clear()


def _is_at_work(frame: FrameType | None) -> bool:
    """Whether an exception in this frame would cut off what must not be cut off."""
    while frame is not None:
        if frame.f_code in _OPEN:
            return False
        if frame.f_code.co_filename.startswith(_ROOMS) or _is_swallowed(frame):
            return True
        frame = frame.f_back
    return False


def _is_swallowed(frame: FrameType) -> bool:
    return frame.f_code.co_name.endswith(_SWALLOWED)


def _look(frame: FrameType, event: str, _: object) -> None:
    """The profile function while a signal is kept: delivers it where it cuts nothing off."""
    around: FrameType | None = frame
    if event in ("call", "return"):  # the frame has not begun, or is over
        if _is_swallowed(frame):
            return
        around = frame.f_back
    if not _is_at_work(around):
        _deliver()


def _deliver() -> None:
    """Runs the handlers behind ours. One that raises leaves the others for a little later."""
    if sys.getprofile() is _look:
        sys.setprofile(None)
    try:
        while _kept:
            deferral, signum = _kept.pop(0)
            _run(deferral.behind, signum)
    finally:
        if _kept:
            _start_to_repeat()


def _run(handler: Callable[[int, FrameType | None], Any], signum: int) -> None:
    handler(signum, sys._getframe(1))


def _start_to_repeat() -> None:
    # Not by `threading`: its lock may be what the main thread holds.
    _thread.start_new_thread(_repeat, ())


def _repeat() -> None:
    time.sleep(_REPEAT_S)
    kept, ident = list(_kept), threading.main_thread().ident
    if kept and ident is not None and callable(signal.getsignal(kept[0][1])):
        signal.pthread_kill(ident, kept[0][1])  # also wakes it where it sleeps


def _forget_in_child() -> None:
    """What was sent to the parent is not for its child."""
    _kept.clear()
    if sys.getprofile() is _look:
        sys.setprofile(None)


_OPEN = frozenset({interruptible.__code__, _run.__code__})
_PACKAGE = os.path.dirname(interruptible.__code__.co_filename) + os.sep
_ROOMS = (
    *(f"{_PACKAGE}{room}{os.sep}" for room in ("memory", "paging", "runtime", "transfer")),
    *(f"{_PACKAGE}{file}" for file in ("api.py", "assembly.py", "interrupts.py")),
)
os.register_at_fork(after_in_child=_forget_in_child)
