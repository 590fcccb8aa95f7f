"""Every check of this repository, in one command for people and CI alike.

    python tools/check.py                       # all but the tests
    python tools/check.py --tests               # and the tests
    python tools/check.py --only mypy layers    # some of them, by name
    python tools/check.py --tests -- -k lru -x  # what follows -- goes to pytest

All checks run, whatever fails before them. A check's output is shown only where it fails, the
tests' always. The exit code is 0 if everything passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_LINT_IMPORTS = "from importlinter.cli import lint_imports_command as main; main()"


class Check(NamedTuple):
    """One check: a command of this interpreter, run in the root of the repository."""

    name: str
    arguments: tuple[str, ...]  # after the interpreter
    is_verbose: bool = False  # output goes straight to the terminal


class Outcome(NamedTuple):
    """How a check ended."""

    name: str
    exit_code: int
    seconds: float


CHECKS = (
    Check("lint", ("-m", "ruff", "check", ".")),
    Check("format", ("-m", "ruff", "format", "--check", ".")),
    Check("spelling", ("-m", "codespell_lib")),
    Check("types", ("-m", "mypy")),
    Check("layers", ("-c", _LINT_IMPORTS, "--no-cache")),
    Check("sizes", ("tools/sz.py", "--top", "5")),
)
# CI has a time limit: the ten slowest tests are shown, and two run at a time (tests/conftest.py).
TESTS = Check(
    "tests",
    ("-m", "pytest", "-n", "auto", "--dist", "worksteal", "--durations=10"),
    is_verbose=True,
)


def run_check(check: Check, root: Path = ROOT) -> Outcome:
    """Runs one check to its end, printing what it says if it fails or is verbose."""
    print(f"== {check.name}", flush=True)
    start_s = time.perf_counter()
    result = subprocess.run(
        [sys.executable, *check.arguments],
        cwd=root,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=None if check.is_verbose else subprocess.PIPE,
        stderr=None if check.is_verbose else subprocess.STDOUT,
        text=True,
    )
    if result.returncode and result.stdout:
        print(result.stdout.rstrip(), flush=True)
    return Outcome(check.name, result.returncode, time.perf_counter() - start_s)


def run_all(
    checks: Sequence[Check], run: Callable[[Check], Outcome] = run_check
) -> tuple[list[Outcome], int]:
    """Runs the checks in order and prints the summary; gives the outcomes and the exit code."""
    outcomes = [run(check) for check in checks]
    print("== summary")
    for outcome in outcomes:
        verdict = f"FAILED ({outcome.exit_code})" if outcome.exit_code else "ok"
        print(f"{outcome.name:10} {outcome.seconds:7.1f} s  {verdict}")
    return outcomes, int(any(outcome.exit_code for outcome in outcomes))


def choose_checks(arguments: Sequence[str] | None = None) -> list[Check]:
    """Reads the command line; leaves through `SystemExit` with a message if it makes no sense."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], usage="%(prog)s [options] [-- PYTEST...]"
    )
    parser.add_argument("--tests", action="store_true", help="run pytest too, last")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    given = list(sys.argv[1:] if arguments is None else arguments)
    pytest_arguments: list[str] = []
    if "--" in given:
        split = given.index("--")
        given, pytest_arguments = given[:split], given[split + 1 :]
    options = parser.parse_args(given)
    if pytest_arguments and not options.tests:
        parser.error("arguments for pytest without --tests")
    chosen = [check for check in CHECKS if options.only is None or check.name in options.only]
    if options.tests:
        chosen.append(TESTS._replace(arguments=(*TESTS.arguments, *pytest_arguments)))
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; gives the exit code."""
    return run_all(choose_checks(arguments))[1]


if __name__ == "__main__":
    sys.exit(main())
