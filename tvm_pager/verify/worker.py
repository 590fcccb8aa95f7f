"""One run of the script, plain or paged, in a process of its own; started by `process`.

Its only argument is the number of an inherited file that holds the settings. Not for use by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from tvm_pager.errors import PagerError
from tvm_pager.runtime.device import resolve_device
from tvm_pager.script import Script, join_threads, report
from tvm_pager.verify.record import Outcome, read_records, write_line
from tvm_pager.verify.recorder import Recorder
from tvm_pager.verify.trace import Trace
from tvm_pager.verify.watch import StopRun, Watch

if TYPE_CHECKING:
    from tvm_pager.api import Pager

__all__ = ["main"]

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_GRACE_S = 10.0  # for threads and exit handlers of a script that was stopped
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def main() -> int:
    """Runs the script and records how it ended; the exit code is the script's own."""
    source = int(sys.argv[1])
    settings = json.loads(Path(f"/proc/self/fd/{source}").read_text(encoding="utf-8"))
    for number in (source, *settings["files"].values()):
        os.set_inheritable(number, False)  # not for the script's own child processes
    with contextlib.ExitStack() as files:
        return _run(settings, files)


def _run(settings: dict[str, Any], files: contextlib.ExitStack) -> int:
    opened: dict[str, IO[bytes]] = {
        name: files.enter_context(os.fdopen(number, "r+b", buffering=0))
        for name, number in settings["files"].items()
    }
    reference = read_records(opened["reference"]) if "reference" in opened else None
    recorder = Recorder(opened["records"], opened["kept"], reference, settings["keep_at"])
    outcome: Outcome | None = None
    try:
        _set_up(settings)
        with contextlib.ExitStack() as context:
            pager = _open_pager(settings, context)
            outcome = _run_script(settings, recorder, opened["operations"])
            outcome.stats = _stats(pager)
            write_line(opened["records"], outcome.to_dict())
            if outcome.end == "stopped":
                _leave_soon()
    except PagerError as error:
        # At close, when all has been said, a page too many for the memory matters no more.
        if outcome is None:
            outcome = Outcome("error", _EXIT_FAILED, _describe(error), "pager")
            write_line(opened["records"], outcome.to_dict())
    sys.stdout.flush()
    return outcome.exit_code


def _set_up(settings: dict[str, Any]) -> None:
    if settings["torch_device"] is not None:
        resolve_device(settings["torch_device"])  # a mistake in it is said before any long run
    if settings["is_deterministic"]:
        # A warning, not an error, where torch has no such kernel: the script must run all the same.
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling makes results that nobody computed the same in each run, so that a trace is not
        # led astray; in the runs that are compared it would cost time and could hide a difference.
        is_filling = settings["trace_step"] is not None
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", is_filling)  # noqa: B010
    if (seed := settings["seed"]) is not None:
        import random

        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _open_pager(settings: dict[str, Any], context: contextlib.ExitStack) -> Pager | None:
    if settings["pager"] is None:
        return None
    from tvm_pager.api import Pager

    return context.enter_context(Pager(config=settings["config"], **settings["pager"]))


def _run_script(settings: dict[str, Any], recorder: Recorder, operations: IO[bytes]) -> Outcome:
    """Runs the script under the hooks, and says how it ended, what was recorded included."""
    trace_step = settings["trace_step"]
    watch = Watch(recorder, settings["num_steps"])
    threads_before = set(threading.enumerate())
    script = Script(**settings["script"])
    with watch, contextlib.ExitStack() as modes:
        if trace_step is not None:
            modes.enter_context(Trace(watch, trace_step, operations))
        outcome = _end_of(script)
        if outcome.end != "stopped":
            join_threads(threads_before)
    outcome.num_steps = watch.num_steps
    outcome.num_by_phase = dict(recorder.num_by_phase)
    outcome.unreadable = sorted(recorder.unreadable)
    outcome.found_at, outcome.is_different = recorder.found_at, recorder.is_different
    return outcome


def _end_of(script: Script) -> Outcome:
    try:
        script.run()
    except StopRun:
        return Outcome("stopped")
    except SystemExit as end:
        return Outcome("exit", _exit_code(end))
    except KeyboardInterrupt:
        return Outcome("interrupted", _EXIT_INTERRUPTED)
    except BaseException as error:
        report(error)
        text = _describe(error)
        kind = "pager" if isinstance(error, PagerError) else "script"
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(error, RuntimeError)
            and kind == "script"
            and any(words in text.lower() for words in _OUT_OF_MEMORY)
        ):
            kind = "memory"
        return Outcome("error", _EXIT_FAILED, text, kind)
    return Outcome("finished")


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return _EXIT_FAILED


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _stats(pager: Pager | None) -> dict[str, Any] | None:
    try:
        return None if pager is None else pager.stats().to_dict()
    except PagerError:  # the script closed it, or the disk failed: the records matter more
        return None


def _leave_soon() -> None:
    """Ends the process after a while at the latest.

    A script that was stopped in the middle may have threads that wait for it for ever.
    """
    timer = threading.Timer(_GRACE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
