"""`tvm-pager simulate`: a table, CSV, a timeline, and mistakes that are told before any work."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.machines import make_hardware, make_trace
from tvm_pager.cli import main
from tvm_pager.planning import Limits
from tvm_pager.planning.traces.trace_file import save
from tvm_pager.policies.lru import LRU
from tvm_pager.simulation.plot import save_plot
from tvm_pager.simulation.sweep import sweep

P = 512 * 1000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A trace and a hardware profile."""
    directory = tmp_path_factory.mktemp("simulate")
    trace = make_trace(
        {"A": P, "B": P, "x": P}, [("A!", "x", 1000), ("B", "", 1000), ("A x", "", 1000)]
    )
    save(trace, directory / "t.trace")
    make_hardware(empty_copy_ns=100).save(directory / "p.json")
    return str(directory / "t.trace"), str(directory / "p.json")


def test_a_row_for_each_policy_and_budget(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, profile = files
    table = tmp_path / "o.csv"
    budgets = f"{P},{2 * P},{3 * P}"
    command = ["simulate", trace, "--profile", profile, "--policy", "lru,clock"]
    assert main([*command, "--device", budgets, "--jobs", "1", "--csv", str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["policy", "device", "step", "bound"]
    assert "needs device >= 1000.00 KiB" in lines[2]
    assert lines[2].split()[0] == "lru"
    assert lines[3].split()[0] == "clock"
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["policy"], int(row["device_bytes"])) for row in rows] == [
        (policy, device) for device in (P, 2 * P, 3 * P) for policy in ("lru", "clock")
    ]
    short, enough = rows[2], rows[4]
    assert rows[0]["step_s"] == ""
    assert rows[0]["refusal"]
    assert float(short["step_s"]) > float(enough["step_s"]) == pytest.approx(3001e-9)
    assert int(short["h2d_bytes"]) >= int(short["bound_in_bytes"]) > 0
    assert int(enough["h2d_bytes"]) == int(enough["bound_in_bytes"]) == 0
    assert float(short["step_regret"]) >= 0
    assert enough["traffic_regret"] == ""


def test_several_processes_say_the_same_as_one(files: tuple[str, str], tmp_path: Path) -> None:
    trace, profile = files
    texts = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.csv"
        command = ["simulate", trace, "--profile", profile, "--policy", "lru,clock"]
        command += ["--device", f"{2 * P},{3 * P}", "--jobs", jobs, "--csv", str(path)]
        assert main(command) == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_the_timeline_shows_operations_copies_and_faults(
    files: tuple[str, str], tmp_path: Path
) -> None:
    trace, profile = files
    path = tmp_path / "t.json"
    command = ["simulate", trace, "--profile", profile, "--device", str(2 * P)]
    assert main([*command, "--timeline", str(path)]) == 0
    events = json.loads(path.read_text())
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = [(rows[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    for lane in ("operations", "h2d", "d2h"):
        spans = sorted(span[1:] for span in shown if span[0] == lane)
        assert spans
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))
    assert any(name == "faults" for name, _, _ in shown)
    assert f"{lane} (2)" not in rows.values()


def test_a_budget_that_cannot_back_the_pages_says_what_would(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, profile = files
    command = ["simulate", trace, "--profile", profile, "--device", str(2 * P), "--host", "4096"]
    assert main(command) == 1
    assert "needs host + nvme >= " in capsys.readouterr().out


def test_a_policy_that_fails_costs_its_own_cells_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: LRU, *_: object) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(LRU, "choose_victims", fail)
    trace = make_trace({"A": P, "B": P}, [("A!", "", 100), ("B", "", 100)])
    failed, well = sweep(trace, make_hardware(), ["lru", "clock"], [Limits(P, 1 << 30)])
    assert "policy lru raised RuntimeError('no idea')" in failed.refusal
    assert failed.result is None
    assert well.result is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "8GiB", "--policy", "nobody"], "no policy is called 'nobody'"),
        (["--device", "much"], "'much' is not a byte size"),
        (["--device", ","], "at least one policy"),
        (["--device", "8GiB", "--iterations", "0"], "at least one"),
        (["--device", "8GiB,9GiB", "--timeline", "t.json"], "--timeline shows one"),
        (["--device", "8GiB", "--csv", "/absent/o.csv"], "no such directory"),
        (["--device", "8GiB", "--nvme", "1GiB", "--engine", "tape"], "no disk engine 'tape'"),
    ],
)
def test_mistakes_are_told_in_one_line(
    files: tuple[str, str],
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace, profile = files
    assert main(["simulate", trace, "--profile", profile, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_any_work(
    files: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trace, profile = files
    command = ["simulate", trace, "--profile", profile, "--device", str(2 * P)]
    assert main([*command, "--plot", str(tmp_path / "o.png")]) == 2
    assert "pip install 'tvm_pager[plot]'" in capsys.readouterr().err


def test_a_picture_of_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    trace = make_trace({"A": P, "B": P}, [("A!", "", 100), ("B", "", 100)])
    budgets = [Limits(size * P, 1 << 30) for size in (1, 2)]
    save_plot(sweep(trace, make_hardware(), ["lru"], budgets), tmp_path / "o.png", "two pages")
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
