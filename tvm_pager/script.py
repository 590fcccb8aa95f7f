"""A user's script, run the way python would run it: same `sys.argv`, `sys.path[0]` and `__main__`.

Imports the standard library and `errors` only.
"""

from __future__ import annotations

import concurrent.futures.thread
import io
import os
import runpy
import sys
import threading
import types
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_pager.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Script", "join_threads", "report"]

_PACKAGE = str(Path(__file__).resolve().parent) + os.sep
_RUNPY_FILES = (runpy.__file__, "<frozen runpy>")


@dataclass(frozen=True, slots=True)
class Script:
    """What is to run.

    Attributes:
        target: path of a file, directory or archive, or with `is_module` the name of a module.
        arguments: of the script.
        is_module: as after `python -m`.

    Raises:
        ConfigError: there is no such file.
    """

    target: str
    arguments: list[str] = field(default_factory=list)
    is_module: bool = False

    def __post_init__(self) -> None:
        """Refuses a missing file before anything is set up for it."""
        if not self.is_module and not os.path.exists(self.target):
            raise ConfigError(f"{self.target}: no such script; with -m a module's name is meant")

    def run(self) -> None:
        """Runs it as `__main__`, in this process, which is then no good for another script.

        Raises:
            BaseException: whatever the script raises, `SystemExit` included.
        """
        sys.argv = [self.target, *self.arguments]
        first_path = os.getcwd()
        if not self.is_module:
            path = Path(self.target).resolve()  # python follows links here
            first_path = str(path if path.is_dir() else path.parent)
        if not sys.flags.safe_path:
            # In the place of this program's own directory, which the script must not see.
            sys.path[0] = first_path
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        elif Path(self.target).is_file() and not zipfile.is_zipfile(self.target):
            _run_file(self.target)
        else:  # a directory or an archive with a __main__.py
            runpy.run_path(self.target, run_name="__main__")


def _run_file(path: str) -> None:
    """Runs one source file in a new `__main__`, which stays: pickle and exit handlers need it."""
    path = os.path.abspath(path)  # as python shows it in `__file__` and tracebacks
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def report(error: BaseException) -> None:
    """Hands an exception to the hook that python would use, without the frames of this program."""
    traceback = _without_our_frames(error.__traceback__)
    sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Cuts what lies before the script's first frame; what lies behind it is the script's call."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in _RUNPY_FILES and not file.startswith(_PACKAGE):
            break
        traceback = traceback.tb_next
    return traceback


def join_threads(known: set[threading.Thread]) -> None:
    """Waits for the script's threads, as python does at its end: they may still use pages.

    `known` are those that ran before the script.
    """
    # Workers of a pool end only when python tells them to, which is later: no waiting for those.
    pooled = getattr(concurrent.futures.thread, "_threads_queues", ())
    for thread in threading.enumerate():
        is_ours = thread.name.startswith("tvm_pager") or thread in known
        if not (thread.daemon or is_ours or thread in pooled):
            thread.join()
