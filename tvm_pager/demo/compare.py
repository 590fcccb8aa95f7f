"""The parent of the demonstration: runs the workers in turn, judges the results. No torch here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_pager.child import describe_exit, wait_for
from tvm_pager.demo.budgets import choose_budgets
from tvm_pager.demo.report import Comparison, format_report
from tvm_pager.errors import ConfigError, PagerError

__all__ = ["DemoOptions", "run_demo"]

# What keeps the libraries of the workers offline, silent and deterministic.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # must be there before CUDA starts
    # glibc keeps freed blocks of up to 32 MiB unless the limit is fixed, and a process that frees
    # and allocates all the time looks as if it needed them: 3.6 instead of 2.0 GiB, measured.
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `tvm-pager demo` was asked for; see `tvm-pager demo --help`. None: the demo decides."""

    device: str | None = None
    host: str | None = None
    nvme: str | None = None
    num_steps: int = 3
    batch: int = 2
    seq: int = 256
    num_tokens: int = 16
    torch_device: str | None = None
    seed: int = 0
    policy: str = "lru"
    json_file: str | None = None
    is_tiny: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be run, before minutes are spent on it."""
        for option, value in (
            ("steps", self.num_steps),
            ("batch", self.batch),
            ("seq", self.seq),
            ("tokens", self.num_tokens),
        ):
            least = 2 if option == "seq" else 1
            if value < least:
                raise ConfigError(f"--{option} {value}: at least {least} is needed")
        choose_budgets(2**32, self.device, self.host)
        if self.nvme is not None and not Path(self.nvme).is_dir():
            raise ConfigError(f"--nvme {self.nvme}: not a directory; create it or name another")
        if self.json_file is not None and not Path(self.json_file).resolve().parent.is_dir():
            raise ConfigError(f"--json {self.json_file}: there is no such directory")


def run_demo(options: DemoOptions) -> int:
    """Runs the demonstration, prints the report, and returns 0 if everything was equal, else 1.

    Raises:
        ConfigError: an option cannot be used, or transformers is missing.
        PagerError: a budget is too small, or a worker ended without a result.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tvm-pager-demo-") as name:
        directory = Path(name)
        settings: dict[str, Any] = {
            "directory": name,
            "num_steps": options.num_steps,
            "batch": options.batch,
            "seq": options.seq,
            "num_tokens": options.num_tokens,
            "seed": options.seed,
            "is_tiny": options.is_tiny,
            "torch_device": options.torch_device,
        }
        prepared = _run_worker("prepare", settings, directory)
        plain = _run_worker("plain", settings, directory)
        device_bytes, host_bytes = choose_budgets(plain["need_bytes"], options.device, options.host)
        swap_directory = options.nvme or str(directory / "nvme")
        Path(swap_directory).mkdir(mode=0o700, exist_ok=True)
        settings["pager"] = {
            "device": device_bytes,
            "host": host_bytes,
            "nvme": swap_directory,
            "policy": options.policy,
        }
        if options.is_tiny:  # staging comes out of the host budget, in units of segments
            settings["pager"]["segment_bytes"] = 64 * 1024
        paged = _run_worker("paged", settings, directory)
        comparison = Comparison(
            name=prepared["name"],
            options={
                "steps": options.num_steps,
                "batch": options.batch,
                "seq": options.seq,
                "tokens": options.num_tokens,
                "seed": options.seed,
                "policy": options.policy,
                "nvme": swap_directory,
            },
            plain=plain,
            paged=paged,
            device_budget_bytes=device_bytes,
            seconds=time.monotonic() - started_s,
        )
        sys.stdout.write(format_report(comparison, _load_decoder(directory)) + "\n")
    if options.json_file is not None:
        text = json.dumps(comparison.to_dict(), indent=2)
        Path(options.json_file).write_text(text + "\n", encoding="utf-8")
    return 0 if comparison.is_good() else 1


def _run_worker(mode: str, settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Runs one worker to its end and returns its result; on Ctrl-C it is ended too."""
    result_file = directory / f"{mode}-result.json"
    settings_file = directory / f"{mode}.json"
    settings_file.write_text(
        json.dumps(settings | {"result_file": str(result_file)}), encoding="utf-8"
    )
    command = [sys.executable, "-m", "tvm_pager.demo.worker", mode, str(settings_file)]
    root = str(Path(__file__).resolve().parents[2])  # the worker must find this very package
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Half of the cores: the pager's own threads need some, and one compute thread that has to wait
    # for a core holds up all others. With 2 threads on 2 busy cores a step took 60 s, with 1 15 s.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}
    environment = threads | os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    worker = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    exit_code = wait_for(worker)
    result: dict[str, Any] = {}
    if result_file.is_file():
        result = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in result:
        raise PagerError(f"{mode} run: {result['error']}")
    if exit_code != 0 or not result:
        raise PagerError(
            f"the {mode} run ended without a result: {describe_exit(exit_code)}; what it said "
            "itself is above"
        )
    return result


def _load_decoder(directory: Path) -> Any:
    """Gives a function from token ids to text; without a tokenizer tokens stay numbers."""
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_file)).decode
