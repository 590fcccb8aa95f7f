"""The timeline's arithmetic: spans that touch, overlap, or do neither."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tools.overlap import Kernel, busy_seconds, idle_spans, main, merge, overlap, read_trace

SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=8,
)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


@given(one=SPANS, other=SPANS)
def test_merged_spans_and_overlaps_cover_what_the_spans_cover(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    first, second = merge(one), merge(other)
    assert busy_seconds(first) == len(covered(one)) / 1e6
    common = overlap(first, second)
    assert busy_seconds(common) == len(covered(one) & covered(other)) / 1e6


def test_idle_time_is_cut_where_the_launch_ended() -> None:
    kernels = [
        Kernel(10, 20, launched=3),  # idle from 0 on: 3 for its launch, 7 for what it waited for
        Kernel(20, 30, launched=5),  # at once
        Kernel(32, 40, launched=32),  # late by all of the gap
        Kernel(35, 38, launched=36),  # on another stream, beside the last
        Kernel(50, 60, launched=30),  # waited for all of the gap
    ]
    idle = idle_spans(reversed(kernels), 0)
    assert idle.for_launches == [(0, 3), (30, 32), (40, 40)]
    assert idle.for_copies == [(3, 10), (32, 32), (40, 50)]


def test_a_trace_is_read_by_kind_and_kernels_find_their_launch(tmp_path: Path) -> None:
    def event(cat: str, name: str, ts: float, dur: float, correlation: int) -> dict[str, object]:
        args = {"correlation": correlation}
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        event("cuda_runtime", "cudaLaunchKernel", 1, 2, 7),
        event("cuda_driver", "cuLaunchKernelEx", 4, 1, 8),
        event("kernel", "gemm", 10, 5, 7),
        event("kernel", "add", 15, 5, 8),
        event("kernel", "launched before the profile", 30, 1, 9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 3, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 3, 11),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 40, 3, 12),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    spans, kernels = read_trace(path)
    assert spans == {"kernels": [(10, 20), (30, 31)], "in": [(10, 13)], "out": [(20, 23)]}
    assert kernels == [Kernel(10, 15, 3), Kernel(15, 20, 5), Kernel(30, 31, 30)]


def test_a_step_is_shown_without_a_gpu_too(capsys) -> None:  # type: ignore[no-untyped-def]
    options = ["--model", "tiny", "--torch-device", "cpu", "--batch", "1", "--seq", "16"]
    options += ["--dtype", "float32", "--budget", "3MB", "--host", "32MiB", "--warmup", "1"]
    assert main([*options, "--host-lines", "3"]) == 0
    out = capsys.readouterr().out
    assert "overlap: 0.000 s of 0.000 s of copies ran beside kernels" in out
    assert "stalled" in out
