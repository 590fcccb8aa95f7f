"""Child processes: waited for to their end, ended with their parent, and their end in words."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from typing import Any

__all__ = ["describe_exit", "wait_for"]

_PATIENCE_S = 3.0  # on Ctrl-C the terminal has told the child already


def wait_for(child: subprocess.Popen[Any]) -> int:
    """Blocks until the child ends, and gives its exit code; below zero it is a signal's number.

    An exception here (Ctrl-C) ends the child first: after some seconds by SIGTERM, then SIGKILL.
    """
    try:
        return child.wait()
    except BaseException:
        _end(child)
        raise


def _end(child: subprocess.Popen[Any]) -> None:
    for end in (child.terminate, child.kill):
        try:
            child.wait(timeout=_PATIENCE_S)
            return
        except subprocess.TimeoutExpired:
            end()
    child.wait()


def describe_exit(exit_code: int) -> str:
    """Says how a child ended whose own message, if any, is elsewhere."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = str(-exit_code)
    with contextlib.suppress(ValueError):
        name = signal.Signals(-exit_code).name
    hint = "; the system may have run out of memory" if exit_code == -signal.SIGKILL else ""
    return f"killed by signal {name}{hint}"
