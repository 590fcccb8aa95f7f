"""Takes each rule of the pager out, one at a time, and shows that its regression test notices.

    python tools/mutate_rules.py                  # all of them, a quarter of an hour
    python tools/mutate_rules.py --only hold      # rules whose name, file or test contains it
    python tools/mutate_rules.py --list           # names them, runs nothing

A mutation replaces a snippet of the source, in a temporary copy of the tree, and runs one test
there. The test must fail: an assertion, a crash and a hang all count, and the table says which.
Before that, the tests must pass on a copy without a mutation, or their failures would show nothing.
A snippet that is not in its file exactly once is stale: the rule's code was changed, and the
mutation must follow. The exit code is 0 if every mutation was caught.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also where it runs as a script

from tools.rule_mutations import MUTATIONS, Mutation  # noqa: E402

COPIED = ("tvm_pager", "policies", "tests", "tools", "pyproject.toml")
# Appended to the copy's conftest: a failure is an answer, and making it small takes minutes.
NO_SHRINKING = """
from hypothesis import Phase
settings.register_profile(
    "mutated", settings(), phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False
)
settings.load_profile("mutated")
"""
TIMEOUT_S = 60.0  # per mutation
BASELINE_TIMEOUT_S = 300.0  # for all tests together
# One seed, so that a rule is not caught today and missed tomorrow.
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")


class Outcome(NamedTuple):
    """What became of one mutation."""

    mutation: Mutation
    is_caught: bool
    how: str  # "failed", "timeout", a signal's name, or why it is not caught
    seconds: float


def num_occurrences(mutation: Mutation, root: Path = ROOT) -> int:
    """Says how often the snippet occurs in its file: 1, or the mutation is stale."""
    file = root / mutation.file
    return file.read_text(encoding="utf-8").count(mutation.old) if file.is_file() else 0


def copy_tree(root: Path, target: Path) -> None:
    """Copies what the tests need; the link tvm_pager/policies stays a link."""
    target.mkdir()
    for name in COPIED:
        source = root / name
        if source.is_dir():
            # Without bytecode: an edit within the clock's resolution would be missed.
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(source, target / name)
    with (target / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
        conftest.write(NO_SHRINKING)


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Runs tests in a copy of the tree; gives pytest's exit code (None: timeout), and its output.

    They get a session of their own, so that a timeout ends what they started, too.
    """
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, f"--basetemp={tree.parent / 'tests'}", *tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return exit_code, output.read()


def verdict(exit_code: int | None) -> tuple[bool, str]:
    """Says whether an exit code of pytest means that the mutation was caught, and how."""
    if exit_code is None:
        return True, "timeout"
    if exit_code < 0:
        return True, signal.Signals(-exit_code).name
    if exit_code == 1:
        return True, "failed"
    # Others than 0 are pytest's own: nothing collected, no such test, the sources do not import.
    return False, "passed" if exit_code == 0 else f"pytest exited with {exit_code}"


def try_mutation(mutation: Mutation, root: Path = ROOT) -> Outcome:
    """Runs one mutation; the working tree is not touched."""
    start_s = time.perf_counter()
    count = num_occurrences(mutation, root)
    if count != 1:
        return Outcome(mutation, False, f"stale: snippet found {count} times", 0.0)
    with tempfile.TemporaryDirectory(prefix="mutate_rules-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(root, tree)
        file = tree / mutation.file
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        exit_code, output = run_tests(tree, [mutation.test], TIMEOUT_S)
    is_caught, how = verdict(exit_code)
    if not is_caught:
        print(output[-3000:], flush=True)
    return Outcome(mutation, is_caught, how, time.perf_counter() - start_s)


def passes_unmutated(mutations: Sequence[Mutation], root: Path = ROOT) -> bool:
    """Whether all the tests pass on a copy as it is; prints what they say if not."""
    tests = list(dict.fromkeys(mutation.test for mutation in mutations))
    with tempfile.TemporaryDirectory(prefix="mutate_rules-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(root, tree)
        exit_code, output = run_tests(tree, tests, BASELINE_TIMEOUT_S)
    if exit_code != 0:
        print(output[-6000:], f"the tests do not pass without a mutation ({exit_code})", sep="\n")
    return exit_code == 0


def choose(only: str | None) -> list[Mutation]:
    """The mutations whose rule, file or test contains `only`; all without it."""
    return [
        m for m in MUTATIONS if only is None or any(only in x for x in (m.rule, m.file, m.test))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", metavar="SUBSTRING", help="of a rule's name, file or test")
    parser.add_argument("--list", action="store_true", help="name the mutations, run nothing")
    options = parser.parse_args(arguments)
    chosen = choose(options.only)
    if not chosen:
        parser.error(f"no rule contains {options.only!r}")
    if options.list:
        for mutation in chosen:
            print(f"{mutation.rule}\n    {mutation.file}\n    {mutation.test}")
        return 0
    if not passes_unmutated(chosen):
        return 1
    num_caught = 0
    print(f"{'rule':67}{'caught':18}{'seconds':>7}  test")
    for mutation in chosen:  # one at a time: tests measure themselves and share few cores
        outcome = try_mutation(mutation)
        num_caught += outcome.is_caught
        caught = f"{'yes' if outcome.is_caught else 'NO'} ({outcome.how})"
        name = mutation.test.partition("::test_")[2]
        print(f"{mutation.rule:67}{caught:18}{outcome.seconds:7.1f}  {name}", flush=True)
    print(f"{num_caught} of {len(chosen)} caught")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
