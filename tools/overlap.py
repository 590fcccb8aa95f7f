"""Shows how far transfers run beside kernels: one training step under a budget, as a timeline.

    python tools/overlap.py --model 3.5b --budget 20GB --host 44GiB --trace step.json

Prints the seconds in which kernels, copies in and copies out were busy, how much of the copies ran
beside kernels (the overlap fraction) and beside each other, what the kernels' streams idled for,
and where the launching thread spent its time. The trace is for chrome://tracing and Perfetto.

[Note: What a stream idles for]
    A kernel that starts as soon as it has been launched has kept its stream waiting for the
    launching thread. One that was launched long before waited for something on the device, here a
    copy. So the idle time before each kernel is cut in two where its launch ended.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

import tvm_pager
from tools.bench_llama import MODELS, Trainer

__all__ = [
    "Idle",
    "Kernel",
    "busy_seconds",
    "idle_spans",
    "main",
    "merge",
    "overlap",
    "read_step",
    "read_trace",
]

Spans = list[tuple[float, float]]


class Kernel(NamedTuple):
    """One kernel; microseconds."""

    start: float
    end: float
    launched: float  # when the call that launched it returned


class Idle(NamedTuple):
    """See [Note: What a stream idles for]."""

    for_launches: Spans
    for_copies: Spans


def merge(spans: Iterable[tuple[float, float]]) -> Spans:
    """Joins spans that touch or overlap; gives them in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy_seconds(spans: Spans) -> float:
    """The length of merged spans (microseconds) in seconds."""
    return sum(end - start for start, end in spans) / 1e6


def overlap(one: Spans, other: Spans) -> Spans:
    """The parts that two merged lists have in common."""
    common: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def idle_spans(kernels: Iterable[Kernel], started: float) -> Idle:
    """Cuts the time between kernels, from `started` on, in two; see the note above."""
    idle = Idle([], [])
    last = started
    for kernel in sorted(kernels):
        if kernel.start > last:
            cut = min(max(kernel.launched, last), kernel.start)
            idle.for_launches.append((last, cut))
            idle.for_copies.append((cut, kernel.start))
        last = max(last, kernel.end)
    return Idle(merge(idle.for_launches), merge(idle.for_copies))


def read_step(
    profiler: profile, trace: Path | None = None
) -> tuple[dict[str, Spans], list[Kernel]]:
    """Spans of kernels, copies in and out, merged, and every kernel, of a profile that has ended.

    Args:
        profiler: with the activity CUDA; without, everything is empty.
        trace: where it is written as a timeline, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(trace: Path) -> tuple[dict[str, Spans], list[Kernel]]:
    """As `read_step`, of the file that torch's profiler has written."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    spans: dict[str, Spans] = {"kernels": [], "in": [], "out": []}
    kernels: list[Kernel] = []
    for event in events:
        span = event["ts"], event["ts"] + event["dur"]
        if event.get("cat") == "kernel":
            spans["kernels"].append(span)
            kernels.append(Kernel(*span, launched.get(event["args"]["correlation"], span[0])))
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            spans["in"].append(span)
        elif event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]:
            spans["out"].append(span)
    return {kind: merge(found) for kind, found in spans.items()}, kernels


def summarise(spans: dict[str, Spans], wall_s: float) -> list[str]:
    """The figures as lines of text."""
    copies = merge([*spans["in"], *spans["out"]])
    beside = busy_seconds(overlap(copies, spans["kernels"]))
    both = busy_seconds(overlap(spans["in"], spans["out"]))
    copying = busy_seconds(copies)
    busy = busy_seconds(merge([*copies, *spans["kernels"]]))
    share = beside / copying if copying else 0.0
    return [
        f"step {wall_s:.3f} s under the profiler; device busy {busy:.3f} s",
        f"kernels {busy_seconds(spans['kernels']):.3f} s, copies in "
        f"{busy_seconds(spans['in']):.3f} s, out {busy_seconds(spans['out']):.3f} s",
        f"overlap: {beside:.3f} s of {copying:.3f} s of copies ran beside kernels "
        f"(fraction {share:.2f}); both directions at once {both:.3f} s",
    ]


def summarise_idle(spans: dict[str, Spans], kernels: Sequence[Kernel]) -> list[str]:
    """What the kernels' streams idled for, as lines of text; nothing without kernels."""
    if not kernels:
        return []
    started = min(span[0] for found in spans.values() for span in found[:1])
    idle = idle_spans(kernels, started)
    during = {kind: busy_seconds(overlap(idle.for_copies, spans[kind])) for kind in ("in", "out")}
    return [
        f"kernels idle: {busy_seconds(idle.for_launches):.3f} s for launches, "
        f"{busy_seconds(idle.for_copies):.3f} s for copies (during those, copies in busy "
        f"{during['in']:.3f} s, out {during['out']:.3f} s)"
    ]


def _profile_host(step: Any, num_lines: int) -> list[str]:
    profiler = cProfile.Profile()
    profiler.runcall(step)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(num_lines)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return [line.replace(str(Path(__file__).parents[1]), "")[-110:] for line in lines[-num_lines:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures one step and returns 0."""
    args = _parse(argv)
    is_cuda = args.torch_device.startswith("cuda")
    with tvm_pager.Pager(
        args.budget, args.host, policy=args.policy, torch_device=args.torch_device
    ) as pager:
        trainer: Trainer | None = Trainer(args)

        def step() -> None:
            assert trainer is not None
            trainer.step()
            if is_cuda:
                torch.cuda.synchronize()

        for _ in range(args.warmup):
            step()
        activities = [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            started_s = time.perf_counter()
            step()
            wall_s = time.perf_counter() - started_s
        spans, kernels = read_step(profiler, args.trace)
        print("\n".join([*summarise(spans, wall_s), *summarise_idle(spans, kernels)]), flush=True)
        if args.host_lines:
            print("\n".join(_profile_host(step, args.host_lines)), flush=True)
        print(f"stalled {pager.stats().stall_s:.3f} s in all")
        trainer = None  # its pages would be read back at the end
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--model", choices=MODELS, default="3.5b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--torch-device", default=device)
    parser.add_argument("--budget", default="20GB")
    parser.add_argument("--host", default="44GiB")
    parser.add_argument("--policy", default="lru", help="one that plans needs a warm-up of 6")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--host-lines", type=int, default=25, help="of the host profile; 0: none")
    parser.add_argument("--trace", type=Path, help="write the timeline")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
