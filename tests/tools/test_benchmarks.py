"""The benchmarks run, on sizes so small that their figures mean nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tools import bench_dispatch, bench_llama, bench_moves, gpu_session, profile_dispatch

LLAMA = ["--model", "tiny", "--torch-device", "cpu", "--dtype", "float32", "--batch", "2"]
LLAMA += ["--seq", "32", "--warmup", "1", "--steps", "1", "--blocks", "2", "--budget-steps", "2"]


@pytest.mark.bench
def test_dispatch_is_measured_for_every_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_threads = torch.get_num_threads()
    few = ["--rounds", "2", "--blocks", "2", "--calls", "20"]
    json_file = tmp_path / "dispatch.json"
    assert bench_dispatch.main([*few, "--target", "1000", "--json", str(json_file)]) == 0
    assert torch.get_num_threads() == num_threads
    figures = json.loads(json_file.read_text())
    assert [row["operation"] for row in figures["rows"]] == list(bench_dispatch.OPERATIONS)
    for row in figures["rows"]:
        assert min(row["plain_ns"], row["dispatched_ns"], row["guarded_ns"]) > 0
        assert all(len(rounds) == 2 for rounds in row["rounds_ns"].values())
    assert "met" in capsys.readouterr().out


def test_a_missed_target_is_said_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--rounds", "1", "--blocks", "1", "--calls", "5", "--target", "0.000001"]
    assert bench_dispatch.main(few) == 1
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.bench
def test_llama_is_measured_resident_and_under_budgets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "llama.json"
    budgets = ["--budgets", "3MB,64MB", "--host", "32MiB", "--segment-bytes", "64KiB"]
    assert bench_llama.main([*LLAMA, *budgets, "--json", str(json_file)]) == 0
    figures = json.loads(json_file.read_text())
    assert figures["resident"]["losses_equal"]
    assert figures["resident"]["evictions"] == 0
    assert len(figures["resident"]["block_s"]["plain"]) == 2
    tight, roomy = figures["budgets"]
    assert tight["device_peak_bytes"] <= 3_000_000
    assert tight["bytes_per_step"]["h2d"] > 0
    assert roomy["bytes_per_step"]["h2d"] == 0
    assert tight["losses"] == roomy["losses"]
    assert "ratio" in capsys.readouterr().out


@pytest.mark.bench
def test_the_cost_of_moves_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "moves.json"
    few = ["--warmup", "4", "--steps", "1", "--blocks", "3", "--model", "tiny", "--share", "0.6"]
    assert bench_moves.main([*few, "--json", str(json_file)]) == 0
    figures = json.loads(json_file.read_text())
    assert figures["num_operations"] > 100
    assert figures["num_moves"] > 0
    assert 0 < figures["num_slow"] < figures["num_operations"]
    assert figures["resident_ms"] > figures["plain_ms"]
    assert "us a move" in capsys.readouterr().out


def test_a_budget_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "llama.json"
    budgets = ["--no-resident", "--budgets", "4KiB,64MB", "--host", "32MiB"]
    assert bench_llama.main([*LLAMA, *budgets, "--json", str(json_file)]) == 1
    figures = json.loads(json_file.read_text())
    assert len(figures["failures"]) == len(figures["budgets"]) == 1
    assert "4KiB: " in capsys.readouterr().out


def test_a_host_slab_beyond_the_limit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_llama.main([*LLAMA, "--host", "101GiB"])
    assert "100.00 GiB at most" in capsys.readouterr().err


def test_the_models_have_the_size_of_their_names() -> None:
    for name, billions in {"0.95b": 0.95, "3.5b": 3.5}.items():
        shape = bench_llama.MODELS[name]
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        layer = 4 * hidden**2 + 3 * hidden * shape["intermediate_size"] + 2 * hidden
        num_parameters = layers * layer + 2 * shape["vocab_size"] * hidden + hidden
        assert num_parameters / 1e9 == pytest.approx(billions, rel=0.02)


# --- the session -------------------------------------------------------------------------------


def test_a_session_survives_failing_and_endless_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"x\": 1}')"
    parts = [
        gpu_session.Part("fails", ["python3", "-c", "print('oh no'); raise SystemExit(3)"], 30),
        gpu_session.Part("hangs", ["python3", "-c", "import time; time.sleep(60)"], 0.5),
        gpu_session.Part("works", ["python3", "-c", write, "{json}"], 30),
    ]
    monkeypatch.setattr(gpu_session, "list_parts", lambda *, is_dry_run: parts)
    assert gpu_session.main(["--out", str(tmp_path), "--dry-run-cpu"]) == 1
    session = json.loads((tmp_path / "session.json").read_text())["parts"]
    assert [session[part.name]["exit_code"] for part in parts] == [3, None, 0]
    assert session["works"]["figures"] == {"x": 1}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"fails.log", "hangs.log", "works.log", "session.json"}
    table = capsys.readouterr().out
    assert "oh no" in table
    assert "out of time" in table


def test_parts_fit_in_the_time_of_a_session_and_in_its_files() -> None:
    parts = gpu_session.list_parts(is_dry_run=False)
    assert len(parts) + 1 <= 8
    assert sum(part.limit_s for part in parts) <= 600
    assert len({part.name for part in parts}) == len(parts)


@pytest.mark.slow
def test_the_dry_run_of_a_session_ends_well(tmp_path: Path) -> None:
    assert gpu_session.main(["--out", str(tmp_path), "--dry-run-cpu"]) == 0
    session = json.loads((tmp_path / "session.json").read_text())["parts"]
    assert session["demo"]["figures"]["is_good"]


# --- the profile of dispatch ---------------------------------------------------------------------


def test_the_profile_tells_paths_and_operators_of_both_kinds_of_kernels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert profile_dispatch.main(LLAMA) == 0
    any_kernels, deterministic = capsys.readouterr().out.split("deterministic kernels")
    for text in (any_kernels, deterministic):
        total, fast, general, measured = (
            int(number)
            for number in re.findall(r"(\d+) (?:operations|fast|general|measured)\b", text)[:4]
        )
        assert total == fast + general + measured > 500
        assert fast > 0.9 * total
        assert measured == 0, "in a steady state without a budget nothing needs to be measured"
        assert text.count(": aten.") == 16
    assert profile_dispatch.main([*LLAMA, "--deterministic"]) == 0
    assert "any kernels" not in capsys.readouterr().out
