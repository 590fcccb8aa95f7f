"""Programs in interpreters of their own, which find this checkout."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def _call(program: str, arguments: tuple[object, ...]) -> dict[str, Any]:
    return {
        "args": [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        "cwd": REPOSITORY,
        "env": os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        "text": True,
    }


def run_program(
    program: str, *arguments: object, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; output and error text are in the result, whatever the exit code."""
    return subprocess.run(
        **_call(program, arguments), capture_output=True, timeout=timeout, check=False, **options
    )


def start_program(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts it; the caller reads its output and ends it."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(**_call(program, arguments), **pipes)


@contextlib.contextmanager
def killed_on_failure(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kills the session that `process` leads if the block fails: else it may run for hours."""
    try:
        yield
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
