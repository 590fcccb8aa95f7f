"""Trains for long while budgets and shapes change at random; fails where anything drifts.

    python tools/soak.py                                       # 5,000 iterations on CPU tensors
    python tools/soak.py --torch-device cuda --iterations 300
    python tools/soak.py --seed 7 --iterations 60 --every 10   # one seed again, shorter

A small language model trains twice from the same seeds, first in plain torch, then paged. Before
each phase of a paged iteration (forward, backward, update) chance may change the device's or the
host's budget, prefetch some tensors, or push everything off the device; batch and sequence change
from iteration to iteration in both runs. Every few iterations the pager is brought to a standard
state and measured. The exit code is 1 if a loss or a final weight differs in any bit, if a column
of the table grows (or free runs shrink) by more than its noise, or if anything is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

import tvm_pager
from tools.soak_training import SCALES, Scale, Training
from tvm_pager import assembly
from tvm_pager.memory import Tier
from tvm_pager.observe.table import format_rows
from tvm_pager.transfer.torch_backend import TorchBackendOptions
from tvm_pager.units import format_bytes

__all__ = ["Sample", "drifts", "growth", "main"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """What is measured, in a standard state: budgets at their most, everything off the device."""

    iteration: int
    rss_bytes: int
    device_bytes: int  # held by tensors on CUDA; 0 on the CPU
    file_bytes: int  # of the swap file
    mapped_bytes: int  # of the slab, staging included
    host_run_bytes: int  # largest free run
    nvme_run_bytes: int
    num_pages: int
    num_tickets: int  # transfers in flight, and frames that wait for one
    num_threads: int  # of the pager
    num_files: int  # open descriptors of this process


# --- chance ---------------------------------------------------------------------------------------


class Chance:
    """What happens between the phases of a paged iteration.

    Args:
        pager: whose budgets change.
        training: whose tensors are prefetched.
        ranges: least and most of the device's budget, and of the host's.
        seed: of everything here.
    """

    def __init__(
        self, pager: Any, training: Training, ranges: dict[str, tuple[int, int]], seed: int
    ) -> None:
        self._pager, self._training, self._ranges = pager, training, ranges
        self._draw = random.Random(f"{seed}/chance")
        names = ("device", "host", "refused", "asked", "prefetched", "evict_all")
        self.count = dict.fromkeys(names, 0)

    def __call__(self) -> None:
        draw = self._draw
        for tier, probability in (("device", 0.12), ("host", 0.06)):
            if draw.random() < probability:
                self._resize(tier, draw.randint(*self._ranges[tier]))
        if draw.random() < 0.3:
            tensors = self._training.tensors()
            some = draw.sample(tensors, min(6, len(tensors)))
            self.count["asked"] += len(some)
            self.count["prefetched"] += self._pager.prefetch(*some)
        if draw.random() < 0.02:
            self._pager.evict_all()
            self.count["evict_all"] += 1

    def _resize(self, tier: str, nbytes: int) -> None:
        try:
            self._pager.set_budgets(**{tier: nbytes})
            self.count[tier] += 1
        except (tvm_pager.BudgetError, tvm_pager.CommitError):
            self.count["refused"] += 1  # it says that nothing has changed, and training goes on


def measure(pager: Any, iteration: int, ranges: dict[str, tuple[int, int]]) -> Sample:
    """Brings the pager to the standard state and measures it. Blocks.

    Raises:
        AssertionError: its books contradict each other.
    """
    pager.set_budgets(device=ranges["device"][1], host=ranges["host"][1])
    pager.evict_all()
    gc.collect()
    core, backend = pager._core, pager._backend
    with core.lock:
        core.drain()
        core.flight.reap()
        pager.check_invariants()
        table = core.table
        return Sample(
            iteration=iteration,
            rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
            device_bytes=backend.allocated_bytes(),
            file_bytes=os.fstat(backend._file.fd).st_blocks * 512,
            mapped_bytes=backend.host_mapped_bytes,
            host_run_bytes=table.frames[Tier.HOST].largest_run_bytes,
            nvme_run_bytes=table.frames[Tier.NVME].largest_run_bytes,
            num_pages=len(table.pages),
            num_tickets=len(core.flight.pages) + len(table.zombies) + len(table.limbo),
            num_threads=num_pager_threads(),
            num_files=num_open_files(),
        )


def num_pager_threads() -> int:
    """Live threads of any pager."""
    return sum(thread.name.startswith("tvm_pager") for thread in threading.enumerate())


def num_open_files() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


# --- drift ----------------------------------------------------------------------------------------


def growth(values: Sequence[float]) -> tuple[float, float]:
    """Fits a line through equally spaced values: what it grows by in all, and the noise of that.

    The noise is three standard errors; both are 0 for less than three values.
    """
    num = len(values)
    if num < 3:
        return 0.0, 0.0
    middle, mean = (num - 1) / 2, sum(values) / num
    spread = sum((i - middle) ** 2 for i in range(num))
    slope = sum((i - middle) * value for i, value in enumerate(values)) / spread
    residuals = sum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(values))
    error = (residuals / (num - 2) / spread) ** 0.5
    return slope * (num - 1), 3 * error * (num - 1)


def drifts(samples: Sequence[Sample], scale: Scale) -> list[str]:
    """Names the columns that drift, and by how much, leaving out the first third as warm-up."""
    settled = samples[len(samples) // 3 :]
    # A column may fragment or wander by this much; negative: it must not shrink.
    tolerances = {
        "rss_bytes": scale.rss_tolerance_bytes,
        "device_bytes": 0,
        "file_bytes": 0,
        "mapped_bytes": scale.region_bytes,
        "host_run_bytes": -scale.host_bytes[1] // 4,
        "nvme_run_bytes": -scale.nvme_bytes // 4,
        "num_pages": 0,
        "num_tickets": 0,
        "num_threads": 1,  # they end when idle, and start again
        "num_files": 0,
    }
    found = []
    for name, tolerance in tolerances.items():
        values = [float(getattr(sample, name)) for sample in settled]
        is_run = name.endswith("_run_bytes")
        grown, noise = growth([-value for value in values] if is_run else values)
        if grown > abs(tolerance) + noise:
            verb = "shrank" if is_run else "grew"
            found.append(
                f"{name} {verb} by {grown:,.0f} from iteration {settled[0].iteration} to "
                f"{settled[-1].iteration} (tolerance {abs(tolerance):,}, noise {noise:,.0f})"
            )
    if stuck := [sample.iteration for sample in samples if sample.num_tickets]:
        found.append(f"transfers are in flight although nothing moves, at iterations {stuck[:5]}")
    return found


def differences(plain: Sequence[str], paged: Sequence[str]) -> list[str]:
    """Says where two lists of losses differ."""
    wrong = [i for i, (a, b) in enumerate(zip(plain, paged, strict=True)) if a != b]
    if not wrong:
        return []
    first = wrong[0]
    return [
        f"{len(wrong)} of {len(plain)} losses differ, the first at iteration {first}: "
        f"{float.fromhex(plain[first])!r} plain, {float.fromhex(paged[first])!r} paged"
    ]


def left_behind(num_files_before: int) -> list[str]:
    """Says what a closed pager has left: threads, open files."""
    gc.collect()
    found = []
    if num_threads := num_pager_threads():
        found.append(f"{num_threads} threads are left after close")
    if (num_more := num_open_files() - num_files_before) > 0:
        found.append(f"{num_more} files are left open after close")
    return found


# --- the runs -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _slab_regions_of(nbytes: int) -> Iterator[None]:
    """Pagers made meanwhile get slab regions of this size: a gigabyte would never be given back."""
    real = assembly.TorchBackend
    options = TorchBackendOptions(region_bytes=nbytes)
    assembly.TorchBackend = functools.partial(real, options=options)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        assembly.TorchBackend = real  # type: ignore[misc]


def run_plain(scale: Scale, args: argparse.Namespace) -> tuple[list[str], str]:
    """Gives the losses and the digest of plain torch."""
    training = Training(scale, args.seed, args.torch_device)
    losses = [training.step(i, lambda: None) for i in range(args.iterations)]
    return losses, training.digest()


def run_paged(
    scale: Scale, args: argparse.Namespace, nvme: str
) -> tuple[list[str], str, list[Sample], dict[str, int], str]:
    """Gives losses, digest, samples, what chance did, and the pager's table."""
    beside = 0
    if args.torch_device != "cpu":
        torch.cuda.empty_cache()
        beside = torch.cuda.memory_allocated()  # of libraries: the budget is the whole process's
    low, high = scale.device_bytes
    ranges = {"device": (low + beside, high + beside), "host": scale.host_bytes}
    losses: list[str] = []
    samples: list[Sample] = []
    with (
        _slab_regions_of(scale.region_bytes),
        tvm_pager.Pager(
            ranges["device"][1], scale.host_bytes[1], nvme, nvme_bytes=scale.nvme_bytes,
            torch_device=args.torch_device, segment_bytes=scale.segment_bytes, check=args.check,
            strict=True,
        ) as pager,
    ):  # fmt: skip
        training = Training(scale, args.seed, args.torch_device)
        chance = Chance(pager, training, ranges, args.seed)
        for iteration in range(args.iterations):
            losses.append(training.step(iteration, chance))
            if (iteration + 1) % args.every == 0:
                samples.append(measure(pager, iteration + 1, ranges))
                print(f"iteration {iteration + 1} of {args.iterations}", flush=True)
        digest = training.digest()
        count, table = chance.count, str(pager.stats())
        del training, chance
    return losses, digest, samples, count, table


def _table(samples: Sequence[Sample]) -> list[str]:
    names = list(asdict(samples[0]))
    rows = [[name.removesuffix("_bytes").removeprefix("num_") for name in names]]
    for sample in samples:
        values = asdict(sample).items()
        rows.append([format_bytes(v) if n.endswith("_bytes") else f"{v:,}" for n, v in values])
    return format_rows(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains twice and compares; returns 0 if nothing differs, drifts or is left behind."""
    args = _parse(argv)
    scale = SCALES[torch.device(args.torch_device).type]
    torch.set_num_threads(1)
    if args.torch_device != "cpu":
        torch.use_deterministic_algorithms(True)
    print(f"seed {args.seed}, {args.iterations} iterations on {args.torch_device}", flush=True)
    started_s = time.perf_counter()
    plain, plain_digest = run_plain(scale, args)
    plain_s = time.perf_counter() - started_s
    gc.collect()
    num_files = num_open_files()
    with tempfile.TemporaryDirectory(dir=args.nvme) as directory:
        started_s = time.perf_counter()
        paged, paged_digest, samples, count, table = run_paged(scale, args, directory)
        paged_s = time.perf_counter() - started_s
        problems = [f"left in the directory: {name}" for name in os.listdir(directory)]
    problems += left_behind(num_files) + drifts(samples, scale) + differences(plain, paged)
    if plain_digest != paged_digest:
        problems.append("the final weights or optimizer states differ")
    lines = [*(_table(samples) if samples else []), table]
    lines.append("chance: " + ", ".join(f"{name} {num:,}" for name, num in count.items()))
    lines += [f"FAILED: {problem}" for problem in problems]
    verdict = "losses and weights bitwise equal, nothing drifts" if not problems else "failed"
    lines.append(f"seed {args.seed}: {verdict}; plain {plain_s:.1f} s, paged {paged_s:.1f} s")
    print("\n".join(lines), flush=True)
    if args.json:
        figures = {"problems": problems, "samples": [asdict(s) for s in samples], "chance": count}
        figures |= {"seed": args.seed, "plain_s": plain_s, "paged_s": paged_s}
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 1 if problems else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--every", type=int, default=50, help="iterations between measurements")
    parser.add_argument("--seed", type=int, help="of everything; else one is drawn and printed")
    parser.add_argument("--torch-device", default="cpu", help="cpu or cuda")
    parser.add_argument("--check", type=int, default=0, help="the pager's check level")
    parser.add_argument("--nvme", help="where the swap file goes; else the temporary directory")
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args(argv)
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 20)
    return args


if __name__ == "__main__":
    sys.exit(main())
