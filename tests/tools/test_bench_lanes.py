"""The lanes' benchmark runs, on sizes so small that its figures mean nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tools import bench_lanes
from tools.bench_lanes import DISKS, LINKS, MIB, QUICK, Row

CPU = ["--torch-device", "cpu", "--quick", "--engine", "posix"]


@pytest.mark.bench
def test_every_lane_is_measured_at_every_size_against_the_raw_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "lanes.json"
    folder = tmp_path / "swap"
    folder.mkdir()
    assert bench_lanes.main([*CPU, "--nvme", str(folder), "--json", str(json_file)]) == 0
    assert os.listdir(folder) == []
    figures = json.loads(json_file.read_text())
    found = [(row["lane"], row["page_bytes"], row["urgency"]) for row in figures["rows"]]
    expected = {
        *((lane, size, how) for lane in LINKS for size in QUICK.page_bytes for how in HOW),
        *((lane, size, "queued") for lane in DISKS for size in QUICK.page_bytes),
    }
    assert len(found) == len(expected)
    assert set(found) == expected
    for row in figures["rows"]:
        assert len(row["lane_rates"]) == len(row["raw_rates"]) == QUICK.num_rounds
        assert min(*row["lane_rates"], *row["raw_rates"], row["ratio"]) > 0
        assert row["verdict"] == "no target"
    assert figures["engine"].startswith("posix (")
    assert {figures["raw_write_bytes"], figures["raw_read_bytes"]} <= set(QUICK.task_bytes)
    text = capsys.readouterr().out
    assert text.count("no target") == len(expected)
    assert "0 of 0 rows met it" in text


HOW = ("fault", "queued")


@pytest.mark.bench
def test_a_few_lanes_can_be_chosen(tmp_path: Path) -> None:
    rows, facts = bench_lanes.measure("cpu", str(tmp_path), QUICK, only=["h2d"])
    assert {row.lane for row in rows} == {"h2d"}
    assert "raw_read_bytes" not in facts
    rows, facts = bench_lanes.measure("cpu", str(tmp_path), QUICK, only=["n2h"])
    assert {row.lane for row in rows} == {"n2h"}
    assert facts["raw_read_bytes"] in QUICK.task_bytes


def test_an_unknown_lane_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_lanes.main([*CPU, "--only", "d2h,x2y"])
    assert "x2y" in capsys.readouterr().err


def test_the_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    row = Row("d2h", 8 * MIB, "fault", [9.0, 1.0, 10.0], [10.0, 1.0, 100.0])
    assert row.ratio == 0.9


def test_a_row_below_the_target_is_named_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Row("d2h", 8 * MIB, "fault", [9e9], [10e9]),
        Row("h2d", 8 * MIB, "queued", [8e9], [10e9]),
        Row("h2d", MIB, "queued", [1e9], [10e9]),  # small pages have no target
    ]
    monkeypatch.setattr(bench_lanes, "measure", lambda *_, **__: (rows, {}))
    assert bench_lanes.main(CPU) == 1
    text = capsys.readouterr().out
    assert "MISSED: h2d (queued) at 8.00 MiB: 0.80" in text
    assert "1 of 2 rows met it" in text
    assert bench_lanes.main([*CPU, "--target", "0.8"]) == 0
    assert "MISSED" not in capsys.readouterr().out


def test_the_full_run_keeps_to_its_sizes() -> None:
    full = bench_lanes.FULL
    num_runs = full.num_rounds + 1
    assert full.link_bytes * num_runs <= 4096 * MIB
    assert full.disk_bytes * num_runs <= 2048 * MIB
    for effort in (full, bench_lanes.STAND_IN, QUICK):
        for nbytes in (effort.link_bytes, effort.disk_bytes):
            assert all(nbytes % page_bytes == 0 for page_bytes in effort.page_bytes)
