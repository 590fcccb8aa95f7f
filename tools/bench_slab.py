"""Measures how fast host memory becomes usable for device copies: touched, then page-locked.

    python tools/bench_slab.py
    python tools/bench_slab.py --torch-device cuda --bytes 4GiB --json slab.json

Variants take turns, so that a busy machine hits all of them alike:

    regions    as the host slab makes them: backed by several threads, with and without huge pages,
               by MADV_POPULATE_WRITE or by writing zeros; on CUDA then registered
    untouched  on CUDA: registered without having been touched
    torch      on CUDA: `torch.empty(..., pin_memory=True)`, that is, torch's own allocator

A figure is the best round. GB/s count each byte once, from nothing to usable; on the CPU nothing is
locked, so there it is the touching alone. At the end the slab itself is built in the background.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from tvm_pager.transfer.region import CudaLocker, PageLocker, Region, touch
from tvm_pager.transfer.slab import HostSlab
from tvm_pager.units import format_bytes, format_seconds, parse_bytes

__all__ = ["Row", "main", "measure"]

_BUILD_LIMIT_S = 600.0


@dataclass
class Row:
    """One variant: seconds of each round, touching and locking apart."""

    name: str
    nbytes: int
    touch_s: list[float] = field(default_factory=list)
    lock_s: list[float] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        return min(t + r for t, r in zip(self.touch_s, self.lock_s, strict=True))

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.best_s / 1e9


class NoLocker:
    """Locks nothing: where there is no CUDA, touching is all that can be measured."""

    def lock(self, address: int, nbytes: int) -> None:
        pass

    def unlock(self, address: int, nbytes: int) -> None:
        pass


class _TimedLocker:
    """Adds up the seconds of another locker."""

    def __init__(self, locker: PageLocker) -> None:
        self._locker = locker
        self.seconds = 0.0

    def lock(self, address: int, nbytes: int) -> None:
        started_s = time.perf_counter()
        self._locker.lock(address, nbytes)
        self.seconds += time.perf_counter() - started_s

    def unlock(self, address: int, nbytes: int) -> None:
        self._locker.unlock(address, nbytes)


def _variants(num_threads: int) -> dict[str, tuple[bool, Callable[[int, int], None]]]:
    """By name: whether huge pages are asked for, and how a range is touched."""
    variants: dict[str, tuple[bool, Callable[[int, int], None]]] = {}
    for huge in (False, True):
        pages = "huge pages" if huge else "small pages"
        for threads in sorted({1, num_threads}):
            for populate in (False, True):
                how = "populated" if populate else "zeros written"
                variants[f"regions, {pages}, {how}, {threads} threads"] = (
                    huge,
                    partial(touch, num_threads=threads, populate=populate),
                )
    return variants


def measure(
    nbytes: int, region_bytes: int, *, num_threads: int, num_rounds: int, is_cuda: bool
) -> list[Row]:
    """Measures every variant on `nbytes` bytes in regions of `region_bytes`."""
    variants = _variants(num_threads)
    if is_cuda:
        variants["regions, huge pages, untouched"] = (True, lambda address, nbytes: None)
    rows = {name: Row(name, nbytes) for name in variants}
    if is_cuda:
        rows["torch, pin_memory"] = Row("torch, pin_memory", nbytes)
    kept: list[torch.Tensor] = []  # else torch's next round would get the same memory back
    for _ in range(num_rounds):
        for name, (huge_pages, touch_with) in variants.items():
            _measure_regions(rows[name], region_bytes, huge_pages, touch_with, is_cuda)
        if is_cuda:
            kept.append(_measure_torch(rows["torch, pin_memory"]))
    return list(rows.values())


def _measure_regions(
    row: Row,
    region_bytes: int,
    huge_pages: bool,
    touch_with: Callable[[int, int], None],
    is_cuda: bool,
) -> None:
    locker = _TimedLocker(CudaLocker() if is_cuda else NoLocker())
    regions = [
        Region(start, min(region_bytes, row.nbytes - start))
        for start in range(0, row.nbytes, region_bytes)
    ]
    started_s = time.perf_counter()
    for region in regions:
        region.map(locker, huge_pages=huge_pages, touch_with=touch_with)
    seconds = time.perf_counter() - started_s
    row.lock_s.append(locker.seconds)
    row.touch_s.append(seconds - locker.seconds)
    for region in regions:
        locker.unlock(region.address, region.nbytes)


def _measure_torch(row: Row) -> torch.Tensor:
    started_s = time.perf_counter()
    tensor = torch.empty(row.nbytes, dtype=torch.uint8, pin_memory=True)
    row.lock_s.append(time.perf_counter() - started_s)
    row.touch_s.append(0.0)
    return tensor


def measure_background(nbytes: int, region_bytes: int, *, is_cuda: bool) -> tuple[float, float]:
    """Builds a slab in the background; gives the seconds to its first region and to all of it."""
    slab = HostSlab(
        nbytes,
        region_bytes=region_bytes,
        page_lock=True,
        locker=CudaLocker() if is_cuda else NoLocker(),
    )
    done = threading.Event()
    started_s = time.perf_counter()

    def note(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            done.set()

    try:
        slab.build_in_background(nbytes, note)
        slab.view(0, 1)
        first_s = time.perf_counter() - started_s
        if not done.wait(_BUILD_LIMIT_S) or slab.error is not None:
            raise RuntimeError(f"the slab was not built: {slab.error}")
        return first_s, time.perf_counter() - started_s
    finally:
        slab.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and gives 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--bytes", default="2GiB", help="size of each variant; default 2GiB")
    parser.add_argument("--region-bytes", default="1GiB", help="of the slab's regions")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    args = parser.parse_args(argv)
    nbytes, region_bytes = parse_bytes(args.bytes), parse_bytes(args.region_bytes)
    is_cuda = args.torch_device == "cuda"
    if is_cuda:
        torch.empty(1, device="cuda")  # the context's start is not to be charged to the first row
    rows = measure(
        nbytes,
        region_bytes,
        num_threads=args.threads,
        num_rounds=args.rounds,
        is_cuda=is_cuda,
    )
    background = measure_background(nbytes, region_bytes, is_cuda=is_cuda)
    if args.json:
        document = {
            "torch": torch.__version__,
            "torch_device": args.torch_device,
            "rows": [asdict(row) | {"gb_per_s": row.gb_per_s} for row in rows],
            "background_s": background,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _print(rows, background)
    return 0


def _print(rows: list[Row], background: tuple[float, float]) -> None:
    print(f"torch {torch.__version__}, {format_bytes(rows[0].nbytes)}, best of each variant")
    for row in rows:
        best = min(range(len(row.touch_s)), key=lambda i: row.touch_s[i] + row.lock_s[i])
        print(
            f"{row.name:<48} {row.gb_per_s:>7.2f} GB/s   touch "
            f"{format_seconds(row.touch_s[best]):>8}, lock {format_seconds(row.lock_s[best]):>8}"
        )
    first_s, all_s = background
    print(
        f"the slab, in the background: first region after {format_seconds(first_s)}, all after "
        f"{format_seconds(all_s)}"
    )
    torch_rows = [row for row in rows if row.name.startswith("torch")]
    if torch_rows:
        ratio = torch_rows[0].best_s / all_s
        print(f"torch's allocator takes {ratio:.2f} times as long as the slab")


if __name__ == "__main__":
    sys.exit(main())
