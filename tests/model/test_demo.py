"""The demonstration: its measuring is right, its verdict is honest, and its tiny form passes."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreter import killed_on_failure
from tvm_pager.demo import DemoOptions, compare
from tvm_pager.demo.budgets import DEVICE_FRACTION, choose_budgets
from tvm_pager.demo.digest import combine, digest_tensors
from tvm_pager.demo.footprint import Footprint
from tvm_pager.demo.report import Comparison, format_report
from tvm_pager.demo.text import build_batches, encode_bytes
from tvm_pager.errors import ConfigError, PagerError

ALL_EQUAL = (
    "bitwise equal: losses yes, gradients yes, weights yes, optimizer states yes, tokens yes"
)

# --- footprint ---------------------------------------------------------------------------------


def test_a_storage_counts_once_and_as_long_as_any_view_lives() -> None:
    with Footprint("cpu") as footprint:
        base = torch.zeros(1000)
        view = base[10:].view(2, -1)
        assert footprint.live_bytes == 4000
        del base
        assert footprint.live_bytes == 4000
        del view
        assert (footprint.live_bytes, footprint.peak_bytes) == (0, 4000)


def test_what_was_there_before_counts_from_the_start() -> None:
    layer = torch.nn.Linear(16, 16)
    tied = [*layer.parameters(), layer.weight]
    with Footprint("cpu", tied) as footprint:
        assert footprint.live_bytes == 17 * 16 * 4


def test_what_autograd_saves_counts_until_backward_has_run() -> None:
    leaf = torch.ones(256, requires_grad=True)
    with Footprint("cpu", [leaf]) as footprint:
        loss = leaf.exp().exp().sum()
        assert footprint.live_bytes == 3 * 1024 + 4
        loss.backward()
        assert footprint.live_bytes == 2 * 1024 + 4  # leaf, its gradient, loss
        del loss
        leaf.grad = None
        assert footprint.live_bytes == 1024
    assert footprint.peak_bytes >= 4 * 1024


def test_a_resized_storage_counts_at_its_new_size_and_ids_may_repeat() -> None:
    with Footprint("cpu") as footprint:
        grown = torch.empty(10)
        grown.resize_(100)
        assert footprint.live_bytes == 400
        del grown
        for _ in range(100):
            torch.zeros(50)
        assert (footprint.live_bytes, footprint.peak_bytes) == (0, 400)


def test_the_release_of_a_storage_runs_no_python_in_which_an_interrupt_could_be_lost() -> None:
    with Footprint("cpu"):
        storage = torch.empty(100).untyped_storage()
        callbacks = [ref.__callback__ for ref in weakref.getweakrefs(storage)]
    assert len(callbacks) == 1
    assert isinstance(callbacks[0], types.BuiltinMethodType)


# --- budgets, text, digests --------------------------------------------------------------------


def test_default_budgets_leave_a_part_for_nvme() -> None:
    need_bytes = 2_600_000_000
    device_bytes, host_bytes = choose_budgets(need_bytes, None, None)
    assert 0.3 * need_bytes < device_bytes <= DEVICE_FRACTION * need_bytes
    assert need_bytes - device_bytes - host_bytes > 0.3 * need_bytes


def test_budgets_that_were_asked_for_stand() -> None:
    assert choose_budgets(2**30, "100MiB", "50%") == (100 * 2**20, 2**29)
    with pytest.raises(ConfigError, match="tons"):
        choose_budgets(2**30, "tons", None)


def test_batches_are_the_same_each_time_and_differ_from_each_other() -> None:
    shape = {"num_steps": 3, "batch": 2, "seq": 64}
    batches = build_batches(encode_bytes, **shape, seed=0)
    assert batches == build_batches(encode_bytes, **shape, seed=0)
    assert batches != build_batches(encode_bytes, **shape, seed=1)
    sequences = [ids for batch in batches for ids in batch]
    assert [len(batch) for batch in batches] == [2, 2, 2]
    assert {len(ids) for ids in sequences} == {64}
    assert len({tuple(ids) for ids in sequences}) == 6


def test_a_digest_sees_one_bit_a_shape_and_a_dtype() -> None:
    tensor = torch.arange(12.0)
    flipped = tensor.clone()
    flipped.view(torch.int32)[5] ^= 1
    variants = [tensor, flipped, tensor.view(3, 4), tensor.view(torch.int32), tensor.bfloat16()]
    digests = [digest_tensors([("x", variant)])["x"] for variant in variants]
    assert len(set(digests)) == len(variants)
    assert digest_tensors([("x", tensor.view(3, 4).t().contiguous().t())])["x"] == digests[2]
    assert combine({"a": "1", "b": "2"}) == combine({"b": "2", "a": "1"}) != combine({"a": "1"})


# --- verdict -----------------------------------------------------------------------------------


def make_comparison() -> Comparison:
    """Two equal results, as the workers write them."""
    side: dict[str, Any] = {
        "losses": [2.5, 2.25],
        "tokens": [7, 8],
        "digests": {
            "weights": {"w": "aa"},
            "gradients": {"w": "bb"},
            "optimizer states": {"w exp_avg": "cc"},
        },
        "seconds": {"build": 1.0, "steps": [1.0, 2.0], "generate": 1.0, "checksums": 1.0},
        "torch_device": "cpu",
        "rss_peak_bytes": 10**9,
        "need_bytes": 10**6,
    }
    stats: dict[str, Any] = {
        f"{tier}_{what}_bytes": 1000
        for tier in ("device", "host", "nvme")
        for what in ("budget", "peak")
    }
    stats |= {"bytes_by_lane": {"d2h": 5}, "num_faults": 1, "num_evictions": 1, "notices": []}
    stats |= {"num_clean_evictions": 0, "stall_s": 0.5, "engine": "posix"}
    paged = copy.deepcopy(side) | {"stats": stats, "residency": {"weights": {"device": 10}}}
    options = {"steps": 2, "batch": 1, "seq": 8, "tokens": 2, "policy": "lru"}
    return Comparison("a model", options, side, paged, 1000, 3.0)


def test_equal_results_get_a_clear_yes() -> None:
    comparison = make_comparison()
    assert comparison.is_good()
    report = format_report(comparison, lambda ids: f"text {ids}")
    assert report.endswith(f"\n{ALL_EQUAL}")
    assert "'text [7, 8]'" in report
    assert json.loads(json.dumps(comparison.to_dict()))["is_good"] is True


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("losses", 1), 2.2500000000000004, "losses NO"),
        (("tokens", 0), 9, "tokens NO"),
        (("digests", "weights", "w"), "ab", "weights differ in w"),
        (("digests", "gradients", "v"), "dd", "gradients differ in v"),
        (("digests", "optimizer states", "w exp_avg"), "00", "optimizer states NO"),
        (("stats", "host_peak_bytes"), 1001, "the host tier went over its budget"),
    ],
)
def test_any_difference_and_any_byte_over_budget_fails(
    path: tuple[Any, ...], value: Any, says: str
) -> None:
    comparison = make_comparison()
    place: Any = comparison.paged
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert not comparison.is_good()
    assert says in format_report(comparison, None)


def test_losses_that_are_nan_in_both_runs_are_equal() -> None:
    comparison = make_comparison()
    comparison.plain["losses"][0] = comparison.paged["losses"][0] = float("nan")
    assert comparison.is_good()


# --- the whole of it ---------------------------------------------------------------------------

TINY = ["demo", "--tiny", "--torch-device", "cpu", "--seq", "48", "--tokens", "4"]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tvm_pager.cli", *TINY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_the_tiny_demo_pages_every_kind_to_every_tier_and_is_equal(tmp_path: Path) -> None:
    result = run_demo("--json", str(tmp_path / "demo.json"), "--nvme", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(f"\n{ALL_EQUAL}\n")
    figures = json.loads((tmp_path / "demo.json").read_text())
    stats = figures["paged"]["stats"]
    assert stats["device_peak_bytes"] <= figures["device_budget_bytes"]
    assert figures["device_budget_bytes"] <= DEVICE_FRACTION * figures["plain"]["need_bytes"]
    moved = stats["bytes_by_lane"]
    assert min(moved["d2h"], moved["h2d"]) > 0
    assert moved["h2n"] + moved["d2n"] > 0
    assert moved["n2h"] + moved["n2d"] > 0
    kinds = figures["paged"]["residency"]
    assert set(kinds) == {"weights", "gradients", "optimizer states", "activations"}
    off_device = {kind: set(tiers) - {"device"} for kind, tiers in kinds.items()}
    assert all(off_device.values()), kinds
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]  # no swap file left


@pytest.mark.slow
def test_a_budget_too_small_for_one_operation_is_one_line() -> None:
    result = run_demo("--device", "64KiB", "--steps", "1")
    assert (result.returncode, result.stdout) == (2, "")
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("tvm-pager: error: paged run: ")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_an_interrupt_ends_the_worker_too_without_a_traceback() -> None:
    command = [sys.executable, "-m", "tvm_pager.cli", *TINY, "--steps", "100000"]
    demo = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with killed_on_failure(demo):
        assert demo.stderr is not None
        first_line = demo.stderr.readline()  # the plain run has begun its steps
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        _, rest = demo.communicate(timeout=60)
    assert demo.returncode == 130, first_line + rest
    assert rest.splitlines()[-1] == "tvm-pager: interrupted"
    assert "Traceback" not in rest
    with pytest.raises(ProcessLookupError):
        os.killpg(demo.pid, 0)


def test_a_worker_that_dies_is_named_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PagerError, match=re.escape("killed by signal SIGKILL")):
        compare.run_demo(DemoOptions(is_tiny=True))
