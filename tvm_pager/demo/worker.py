"""One process of the demonstration: `python -m tvm_pager.demo.worker MODE SETTINGS.json`.

Reads one JSON file of settings, writes one JSON file with the result or with a one-line error, and
prints progress on standard error. Not for use by hand.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_pager.demo.model import Inputs, load_state, prepare
from tvm_pager.demo.workload import Outcome, run_workload
from tvm_pager.errors import PagerError

if TYPE_CHECKING:
    import torch

    from tvm_pager.api import Pager

__all__ = ["main"]

_EXIT_ERROR, _EXIT_INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    """Runs one mode; the exit code says whether the result file holds a result (0) or not."""
    mode, settings_file = (sys.argv[1:] if argv is None else argv)[:2]
    settings: dict[str, Any] = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    started_s = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"[{mode} {time.monotonic() - started_s:5.1f} s] {line}\n")
        sys.stderr.flush()

    try:
        result = _MODES[mode](settings, say)
    except PagerError as error:
        result = {"error": str(error), "error_type": type(error).__name__}
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    Path(settings["result_file"]).write_text(json.dumps(result), encoding="utf-8")
    return _EXIT_ERROR if "error" in result else 0


def _prepare(settings: dict[str, Any], say: Any) -> dict[str, Any]:
    prepare(
        Path(settings["directory"]),
        num_steps=settings["num_steps"],
        batch=settings["batch"],
        seq=settings["seq"],
        num_tokens=settings["num_tokens"],
        seed=settings["seed"],
        is_tiny=settings["is_tiny"],
        say=say,
    )
    return {"name": Inputs.read(Path(settings["directory"])).name}


def _plain(settings: dict[str, Any], say: Any) -> dict[str, Any]:
    import torch

    from tvm_pager.demo.footprint import Footprint

    device = _set_up(settings)
    inputs, state = _read(settings)
    reset_peak_rss()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        outcome = run_workload(inputs, state, device, None, say)
        need_bytes = torch.cuda.max_memory_allocated(device)
    else:
        with Footprint(torch.device(device).type) as footprint:
            outcome = run_workload(inputs, state, device, None, say)
        need_bytes = footprint.peak_bytes
    return _result(outcome, device) | {"need_bytes": need_bytes}


def _paged(settings: dict[str, Any], say: Any) -> dict[str, Any]:
    import torch

    from tvm_pager.api import Pager

    device = _set_up(settings)
    inputs, state = _read(settings)
    budget_bytes = settings["pager"]["device"]
    if device.startswith("cuda"):
        # The promise is about the process, so the framework's allocator is held to it too: a
        # twentieth more, because it hands out whole blocks, and what cuBLAS asks it for is no page.
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, budget_bytes * 1.05 / total_bytes), torch.device(device).index or 0
        )
    reset_peak_rss()
    with Pager(torch_device=device, **settings["pager"]) as pager:
        watch = _ResidencyWatch(pager)
        outcome = run_workload(inputs, state, device, watch, say)
        result = _result(outcome, device)
        result |= {"stats": pager.stats().to_dict(), "residency": watch.bytes_by_kind}
        if device.startswith("cuda"):
            result["max_memory_allocated"] = torch.cuda.max_memory_allocated(device)
            result["max_memory_reserved"] = torch.cuda.max_memory_reserved(device)
    return result


class _ResidencyWatch:
    """Notes in which tier weights, gradients, optimizer states and activations lie.

    `bytes_by_kind[kind][tier]` is the most bytes of that kind that were seen in that tier at once.
    """

    def __init__(self, pager: Pager) -> None:
        self.bytes_by_kind: dict[str, dict[str, int]] = {}
        self._pager = pager

    def after_forward(self, activations: list[torch.Tensor]) -> None:
        self._note("activations", activations)

    def after_step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(model.parameters())
        self._note("weights", parameters)
        self._note("gradients", [p.grad for p in parameters if p.grad is not None])
        states = [value for p in parameters for value in optimizer.state[p].values()]
        self._note("optimizer states", states)

    def _note(self, kind: str, tensors: list[Any]) -> None:
        here: dict[str, int] = {}
        for tensor in tensors:
            if self._pager.is_paged(tensor):
                tier = self._pager.residency(tensor).name.lower()
                here[tier] = here.get(tier, 0) + tensor.nbytes
        most = self.bytes_by_kind.setdefault(kind, {})
        for tier, nbytes in here.items():
            most[tier] = max(most.get(tier, 0), nbytes)


def _set_up(settings: dict[str, Any]) -> str:
    """Makes kernels deterministic where they are not by themselves, and chooses the device."""
    import torch

    device = settings["torch_device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        torch.use_deterministic_algorithms(True)  # cuBLAS is told by the environment, see compare
        # Filling what is about to be written anyway would only cost time.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    return str(device)


def _read(settings: dict[str, Any]) -> tuple[Inputs, dict[str, torch.Tensor]]:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    directory = Path(settings["directory"])
    return Inputs.read(directory), load_state(directory)


def _result(outcome: Outcome, device: str) -> dict[str, Any]:
    import torch

    return dataclasses.asdict(outcome) | {
        "torch_device": device,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "rss_peak_bytes": peak_rss_bytes(),
    }


def reset_peak_rss() -> None:
    """Starts the kernel's high-water mark of this process's memory anew, where it allows that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the mark then also covers the start of the process


def peak_rss_bytes() -> int:
    """Gives the high-water mark of this process's memory; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0")
    return int(line.split()[1]) * 1024


_MODES = {"prepare": _prepare, "plain": _plain, "paged": _paged}

if __name__ == "__main__":
    sys.exit(main())
