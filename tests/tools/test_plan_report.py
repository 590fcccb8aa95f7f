"""The report on plans: its figures agree with each other, and what cannot be planned is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.small_traces import training
from tools import plan_report
from tvm_pager.planning.traces.trace_file import save
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.testing.machines import example_profile


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    trace, profile = tmp_path / "trace.json.gz", tmp_path / "profile.json"
    save(training(4, weight=1 << 17, activation=1 << 17, ns=1_000_000).build(), trace)
    example_profile().save(profile)
    return [str(trace), "--profile", str(profile)]


def test_every_budget_gets_a_row(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    peak = TraceIndex(training(4, weight=1 << 17, activation=1 << 17).build()).peak_bytes
    budgets = f"{peak},{peak // 2}"
    assert plan_report.main([*files, "--device", budgets, "--nvme", "1TB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = lines[1].split()
    rows = [dict(zip(names, map(float, line.split()), strict=True)) for line in lines[2:4]]
    assert rows[0]["h2d"] == rows[0]["d2h"] == rows[0]["bound"] == 0
    assert rows[0]["step"] == rows[0]["roof"] == rows[0]["least"]
    assert 0 < rows[1]["bound"] <= rows[1]["h2d"] + rows[1]["d2h"] + 0.02
    assert rows[1]["roof"] <= rows[1]["step"]
    assert rows[1]["least"] <= rows[1]["step"]


def test_budgets_without_a_plan_and_bad_files_fail(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_report.main([*files, "--device", "1MB"]) == 1
    assert "no plan keeps" in capsys.readouterr().out
    assert plan_report.main(["missing.json.gz", *files[1:]]) == 2
    assert "missing.json.gz" in capsys.readouterr().err
