"""Policies are really run in turns, and the table says what ran, what could not, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.small_traces import training
from tools import bench_policies
from tools.policy_table import Block, Cell, bound_of, format_cells
from tvm_pager.planning.traces.trace_file import load
from tvm_pager.planning.traces.trace_index import TraceIndex

TINY = ["--model", "tiny", "--torch-device", "cpu", "--dtype", "float32", "--batch", "1"]
TINY += ["--seq", "64", "--host", "16MiB"]


def measured(*arguments: str, tmp_path: Path, exit_code: int = 0) -> dict[str, Any]:
    json_file = tmp_path / "policies.json"
    assert bench_policies.main([*TINY, *arguments, "--json", str(json_file)]) == exit_code
    figures: dict[str, Any] = json.loads(json_file.read_text())
    return figures


@pytest.mark.bench
def test_policies_run_in_turns_and_beside_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["lru", "lookahead", "belady", "flashneuron"]
    options = ["--policies", ",".join(names), "--budgets", "5MB", "--steps", "3", "--rounds", "2"]
    traces = ["--traces", str(tmp_path / "traces")]
    traces += ["--max-warmup", "16"]  # a busy machine has `lookahead` plan four times
    figures = measured(*options, *traces, "--simulate", "--jobs", "1", tmp_path=tmp_path)
    (budget,) = figures["budgets"]
    assert [cell["policy"] for cell in budget["cells"]] == names
    for cell in budget["cells"]:
        assert not cell["failure"]
        assert [block["round"] for block in cell["blocks"]] == [0, 1]
        assert all(block["is_settled"] for block in cell["blocks"]), cell
        assert cell["num_steps"] == 4  # as many in each round, at least what was asked
        assert 0 < cell["min_s"] <= cell["median_s"] <= cell["max_s"]
        assert 0 < cell["device_peak_bytes"] <= 5_000_000
        assert cell["bytes_per_step"]["h2d"] > 0
        assert not cell["num_policy_errors"]
        assert cell["simulated"]["step_s"] > 0
        assert abs(cell["simulated"]["bytes_error"]) < 0.3
    lru, lookahead, belady, flashneuron = budget["cells"]
    moved = [sum(cell["bytes_per_step"].values()) for cell in (lookahead, lru)]
    assert moved[0] < moved[1]
    warmups = [cell["blocks"][1]["num_warmup"] for cell in (lru, lookahead, belady)]
    assert warmups == [2, *(max(3, num) for num in warmups[1:])]
    (file,) = (tmp_path / "traces").iterdir()
    trace = load(file)
    assert len(trace.ops) == budget["operations"]
    assert flashneuron["bound_bytes"] == bound_of("flashneuron", trace)
    assert flashneuron["had_help"]
    out, err = capsys.readouterr()
    assert "round 2 of 2, lookahead" in err
    lines = out.splitlines()
    assert any(line.startswith("flashneuron  needs ") for line in lines), out
    assert any(line.startswith("flashneuron+lru") for line in lines)
    assert "activation only" in out


def test_orders_rotate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        bench_policies.Bench, "_run_block", lambda self, cell, *_: order.append(cell.policy)
    )
    options = ["--policies", "lru,clock,belady", "--budgets", "64MB", "--rounds", "4"]
    measured(*options, tmp_path=tmp_path)
    rounds = [order[i : i + 3] for i in range(0, 12, 3)]
    assert rounds[:3] == [
        ["lru", "clock", "belady"],
        ["clock", "belady", "lru"],
        ["belady", "lru", "clock"],
    ]
    assert rounds[3] == rounds[0]
    assert "not reached" in capsys.readouterr().out


def test_what_fails_and_what_there_is_no_time_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench_policies.Bench._time_steps

    def fail(self: Any, num_steps: int) -> Any:
        if self._pager.config.policy == "clock":
            raise MemoryError("nothing left")
        self._deadline_s = 0.0  # once the first block has run
        return run(self, num_steps)

    monkeypatch.setattr(bench_policies.Bench, "_time_steps", fail)
    options = ["--policies", "clock,lru,lookahead", "--budgets", "4KiB,64MB", "--steps", "2"]
    figures = measured(*options, "--rounds", "2", tmp_path=tmp_path, exit_code=1)
    refused, budget = figures["budgets"]
    assert "Error: " in refused["failure"]
    clock, lru, lookahead = budget["cells"]
    assert clock["failure"] == "MemoryError: nothing left"
    assert lru["num_steps"] == 1
    assert not lookahead["blocks"]
    out = capsys.readouterr().out
    assert "clock: MemoryError: nothing left" in out
    assert "2 of 2 rounds were left out or cut short (2 policies of it have run)" in out
    assert out.index("4KiB: ") < out.index("64MB (at the fullest operation: param ")


def test_a_bound_counts_what_the_policy_never_moves() -> None:
    trace = training(4, weight=1 << 17, activation=1 << 17).build()
    whole = TraceIndex(trace).peak_bytes
    states = sum(page.frame_bytes for page in trace.pages if page.kind.value == "param")
    assert bound_of("lru", trace) < bound_of("flashneuron", trace) < whole
    assert bound_of("flashneuron", trace) >= states


def test_a_cell_is_labelled_by_who_moved_what() -> None:
    def cell(policy: str, bound: int, other_bytes: int) -> Cell:
        lanes = {"d2h": 2_000_000, "h2d": 4_000_000}
        block = Block(0, 3, True, [0.5, 0.6], 1.1, lanes, 0.2, 4, other_bytes, 3_000_000)
        return Cell(policy, bound, [block])

    unsettled = cell("lookahead", 1, 0)
    unsettled.blocks[0].is_settled = False
    cells = [cell("flashneuron", 1, 0), cell("capuchin", 1, 512), cell("dtr", 10**7, 0), unsettled]
    cells.append(Cell("clock", 10**7))
    lines = format_cells(cells, 5_000_000, is_simulated=False).splitlines()
    names = [line.split()[0] for line in lines[1:7]]
    assert names == ["flashneuron", "capuchin+lru", "dtr", "dtr+lru", "lookahead", "clock"]
    assert lines[3].endswith("needs 10 MB: moves activation, temporary only")
    assert lines[6].endswith("needs 10 MB")
    assert lines[1].split() == [
        "flashneuron",
        *["0.5500", "0.5000", "18%", "1", "2", "0.100", "3", "-", "2"],
    ]
    assert "lookahead: 1 of 1 blocks were measured 3 steps after the switch" in lines[7]


def test_a_cell_says_the_least_that_the_machine_has_given_beside_it() -> None:
    def block(*links: float) -> Block:
        machine = [{"link_bytes_per_s": link, "launch_s": 1e-6 * link / 1e9} for link in links]
        return Block(0, 3, True, [0.5], 0.5, {"h2d": 1000}, 0.0, 0, 0, 3_000_000, machine)

    cell = Cell("lru", 1, [block(96e9, 50e9), block(97e9, 98e9)])
    assert cell.figures()["link_bytes_per_s"] == 50e9
    assert cell.figures()["launch_s"] == pytest.approx(98e-6)
    row = format_cells([cell], 5_000_000, is_simulated=False).splitlines()[1]
    assert row.split()[-2:] == ["50", "2"]


@pytest.mark.parametrize(
    "wrong", [["--policies", "nobody"], ["--budgets", "much"], ["--rounds", "0"]]
)
def test_what_makes_no_sense_is_refused_before_anything_runs(wrong: list[str]) -> None:
    with pytest.raises((SystemExit, bench_policies.tvm_pager.PagerError)):
        bench_policies.main([*TINY, *wrong])
