"""Runs all tests marked `gpu`, each file in a process of its own, several at a time.

    python tools/gpu_tests.py --out results
    python tools/gpu_tests.py --out results --only parity,trials

A process of its own: a context that one test has broken breaks no other, and budgets are promises
about whole processes. Sweeps that take minutes are cut into their single tests. What measures rates
(`_ALONE`) comes last, one after the other. The longest begin first.

The folder gets one log for each process. Printed are the ends of what failed, and a table. Exit
code 0: all passed; 1: some failed, ran out of time, or were skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

from tools.gpu_session import Part, environment_of, run_part

__all__ = ["Run", "main"]

_ROOT = Path(__file__).resolve().parents[1]
_ALONE = frozenset({"tests/gpu/test_lanes_cuda.py", "tests/gpu/test_trials_cuda.py"})
_CUT = frozenset({"tests/tensor/test_undeclared_writes.py"})
_LONGEST = ("tests/gpu/test_parity_cuda.py", "tests/gpu/test_plans_cuda.py")
_NUM_LINES = 40  # of a log that failed


def _pytest(*arguments: str) -> list[str]:
    # Without the repository's settings: they name a version of pytest, which another machine need
    # not have, and there a library's warning must not cost the run.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(_ROOT), "-q"]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "--tb=short", "-m", "gpu"]
    command += ["-W", "default", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    return [*command, *arguments]


@dataclass
class Run:
    """One process.

    Attributes:
        target: file, or node id of a single test.
        exit_code: pytest's; None: it ran out of time.
        seconds: how long it took.
        text: what it printed.
    """

    target: str
    exit_code: int | None = None
    seconds: float = 0.0
    text: str = ""

    @property
    def name(self) -> str:
        """Short, and fit for a file."""
        file, _, test = self.target.partition("::")
        stem = Path(file).stem.removeprefix("test_")
        return stem if not test else f"{stem}-{re.sub(r'[^A-Za-z0-9]+', '_', test).strip('_')}"

    @property
    def is_good(self) -> bool:
        """Whether tests have run and passed; skipped ones say nothing."""
        return self.exit_code == 0 and " passed" in self.last_line

    @property
    def last_line(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1].strip("= ") if lines else ""


def collect(only: Sequence[str]) -> list[str]:
    """Gives the node ids of all marked tests, of files whose names have one of `only` in them.

    Blocks for some ten seconds. Files that cannot be imported (a package is missing) are told of.
    """
    command = _pytest("--collect-only", "--continue-on-collection-errors", "tests")
    done = subprocess.run(
        command, cwd=_ROOT, env=environment_of(), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith("ERROR "):
            print(line[:200], file=sys.stderr)
    tests = [line for line in lines if line.startswith("tests/") and "::" in line]
    return [t for t in tests if not only or any(part in t.partition("::")[0] for part in only)]


def execute(run: Run, out: Path, limit_s: float, deadline_s: float) -> Run:
    """Runs one process to its end or a limit; its output goes to `<name>.log`."""
    limit_s = min(limit_s, deadline_s - time.monotonic())
    if limit_s > 0:
        result = run_part(Part(run.name, _pytest(run.target)), out, limit_s)
        run.exit_code, run.seconds = result["exit_code"], result["seconds"]
        run.text = (out / f"{run.name}.log").read_text(encoding="utf-8", errors="replace")
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs them; see above for what it prints and returns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the logs")
    parser.add_argument("--only", default="", help="parts of files' names, with commas")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for each process")
    parser.add_argument("--total-s", type=float, default=540.0, help="for all of them")
    args = parser.parse_args(argv)
    only = [part for part in args.only.split(",") if part]
    tests = collect(only)
    if not tests:
        parser.error(f"no test for a GPU in a file called like {args.only or 'tests/...'}")
    args.out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + args.total_s
    runs = run_all(tests, args.out, args.jobs, args.limit_s, deadline_s)
    for run in runs:
        if not run.is_good:
            print(f"--- {run.target} ---")
            print("\n".join(line[:200] for line in run.text.splitlines()[-_NUM_LINES:]))
    print(f"\n{'seconds':>8}  test: result")
    for run in sorted(runs, key=lambda run: run.target):
        result = "out of time" if run.exit_code is None else run.last_line
        print(f"{run.seconds:>8.1f}  {run.target}: {result}")
    num_good = sum(run.is_good for run in runs)
    print(f"{num_good} of {len(runs)} processes passed")
    return 0 if num_good == len(runs) else 1


def run_all(
    tests: Sequence[str], out: Path, num_jobs: int, limit_s: float, deadline_s: float
) -> list[Run]:
    """Runs files side by side, and then those that have to be alone."""
    lock = threading.Lock()

    def go(target: str) -> Run:
        run = execute(Run(target), out, limit_s, deadline_s)
        with lock:
            print(f"[{run.seconds:5.1f} s] {target}: {run.last_line}", flush=True)
        return run

    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    cut = [test for test in tests if test.partition("::")[0] in _CUT]
    others = [file for file in files if file not in _ALONE | _CUT]
    others.sort(key=lambda file: file not in _LONGEST)
    with ThreadPoolExecutor(num_jobs) as pool:
        runs = list(pool.map(go, [*cut, *others]))
    return runs + [go(file) for file in files if file in _ALONE]


if __name__ == "__main__":
    sys.exit(main())
