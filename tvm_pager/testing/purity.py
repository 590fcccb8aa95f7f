"""What a policy must not reach for: clocks, files, the network, and torch.

[Note: Watching]
    Python tells a profile function of each call of a C function, however it was imported; all
    clocks and all I/O end in such calls. What imports do is not the policy's doing: what it imports
    late is to be imported before.

[Note: Fresh interpreters]
    Two interpreters with other hash seeds import the policy, take it through one history and one
    plan, and print what came out. So a decision that hangs on the order of a set of strings, on
    unseeded randomness or on ids shows.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tvm_pager.planning import Policy

__all__ = ["fresh_runs", "importable_name", "watching"]

_TIMEOUT_S = 120

_MODULES = {"time": "reads a clock", "posix": "does I/O", "nt": "does I/O", "select": "does I/O"}
_MODULES |= {"io": "does I/O", "_io": "does I/O", "_socket": "does I/O", "socket": "does I/O"}
_CALLS = {
    "datetime.now": "reads a clock",
    "datetime.utcnow": "reads a clock",
    "datetime.today": "reads a clock",
    "date.today": "reads a clock",
    "print": "does I/O",
    "input": "does I/O",
    "breakpoint": "does I/O",
    "start_new_thread": "starts a thread",
    "fork_exec": "starts a process",
}
_TYPES = {"FileIO", "TextIOWrapper", "BufferedReader", "BufferedWriter", "BufferedRandom", "socket"}
_HARMLESS = {("posix", "fspath"), ("nt", "fspath")}


@contextlib.contextmanager
def watching() -> Iterator[list[str]]:
    """Collects what the block does that no policy may: "reads a clock: time.time (mine.py:7)".

    See [Note: Watching]. Of this thread; a profiler that is active meanwhile sees nothing.
    """
    seen: list[str] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or frame.f_code.co_filename.startswith("<frozen importlib"):
            return
        module = getattr(called, "__module__", None)
        name = getattr(called, "__qualname__", "")
        kind = _CALLS.get(name) or _MODULES.get(module or "")
        if kind is None and name.partition(".")[0] in _TYPES:
            kind = "does I/O"
        if kind is not None and (module, name) not in _HARMLESS:
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            seen.append(f"{kind}: {f'{module}.' if module else ''}{name} ({where})")

    before, had_gc = sys.getprofile(), gc.isenabled()
    gc.disable()  # finalisers of others would be taken for the policy's calls
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        if had_gc:
            gc.enable()


def importable_name(policy: type[Policy]) -> str:
    """What `load_policy` finds the class by in another interpreter.

    Raises:
        AssertionError: it is defined inside a function.
    """
    name = policy.__qualname__
    if "<" in name:
        raise AssertionError(
            f"policy {name}: a class inside a function cannot be imported by another interpreter, "
            "which has to find out what it does there; define it at the top of a module"
        )
    module, file = policy.__module__, Path(inspect.getfile(policy)).resolve()
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(module)
        if spec is not None and spec.origin and Path(spec.origin).resolve() == file:
            return f"{module}:{name}"
    return f"{file}:{name}"


def fresh_runs(policy: type[Policy]) -> list[dict[str, Any]]:
    """Runs `tvm_pager.testing.fresh` under two hash seeds; see [Note: Fresh interpreters]. Blocks.

    Raises:
        AssertionError: the policy cannot be imported or raised there.
    """
    name = importable_name(policy)
    results = []
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }
        result = subprocess.run(
            [sys.executable, "-m", "tvm_pager.testing.fresh", name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            raise AssertionError(
                f"policy {name} fails in an interpreter of its own:\n{result.stderr}"
            )
        results.append(json.loads(result.stdout.splitlines()[-1]))
    return results
