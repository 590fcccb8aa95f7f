"""One run of the script as the parent sees it: a process, and the nameless files that it fills."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tvm_pager.child import wait_for
from tvm_pager.verify.record import Outcome, read_outcome, read_records

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Run"]

# The package is found where this one is, and the script sees nothing of that.
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from tvm_pager.verify.worker import main; "
    "sys.path.remove({root!r}); sys.exit(main())"
)
_MAX_TAIL_BYTES = 16 * 1024
# What makes runs of the same script the same; what the user has set stands.
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # must be there before CUDA starts


class Run:
    """One process and what it left behind. A context manager: the exit closes the files.

    Attributes:
        records: lines of `Record`s, then the outcome.
        operations: lines of `Operation`s of a traced run.
        kept: bytes of the tensor at which the run stopped.
        outcome: how it ended, once `run` has returned.
    """

    outcome: Outcome

    def __init__(self) -> None:
        self._files = contextlib.ExitStack()
        self.records = self._open()
        self.operations = self._open()
        self.kept = self._open()
        self._output = self._open()
        self._settings = self._open()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def run(
        self, settings: Mapping[str, Any], *, reference: Run | None = None, shows_output: bool
    ) -> None:
        """Runs the worker with these settings to its end. Blocks; an exception ends it too."""
        files = {"records": self.records, "operations": self.operations, "kept": self.kept}
        if reference is not None:
            files["reference"] = reference.records
        numbers = {name: file.fileno() for name, file in files.items()}
        self._settings.write(json.dumps({**settings, "files": numbers}).encode())
        self._settings.flush()
        root = str(Path(__file__).resolve().parents[2])
        number = self._settings.fileno()
        environment = {**_ENVIRONMENT, **(_DETERMINISTIC if settings["is_deterministic"] else {})}
        # The script's output goes to standard error, so that standard output is the report alone.
        output = sys.stderr if shows_output else self._output
        started_s = time.monotonic()
        worker = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(root=root), str(number)],
            env={**environment, **os.environ},
            pass_fds=(number, *numbers.values()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        exit_code = wait_for(worker)
        self.outcome = read_outcome(self.records) or self._died(exit_code)
        self.outcome.seconds = time.monotonic() - started_s

    def tail(self, num_lines: int) -> list[str]:
        """The last lines that the script printed, where its output was not shown."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _MAX_TAIL_BYTES))
        return self._output.read().decode(errors="replace").splitlines()[-num_lines:]

    def _open(self) -> IO[bytes]:
        return self._files.enter_context(tempfile.TemporaryFile(prefix="tvm-pager-verify-"))

    def _died(self, exit_code: int) -> Outcome:
        outcome = Outcome("died", exit_code)
        for record in read_records(self.records):
            outcome.num_steps = record.step - 1
            number = outcome.num_by_phase.get(record.phase, 0)
            outcome.num_by_phase[record.phase] = number + 1
        return outcome
