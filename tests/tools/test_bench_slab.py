"""The slab's benchmark runs, on sizes so small that its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_slab


@pytest.mark.bench
@pytest.mark.parametrize("threads", [1, 2])
def test_every_variant_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: int
) -> None:
    json_file = tmp_path / "slab.json"
    few = ["--bytes", "5MiB", "--region-bytes", "2MiB", "--rounds", "2"]
    assert bench_slab.main([*few, "--threads", str(threads), "--json", str(json_file)]) == 0
    figures = json.loads(json_file.read_text())
    assert len(figures["rows"]) == 4 * threads
    for row in figures["rows"]:
        assert len(row["touch_s"]) == len(row["lock_s"]) == 2
        assert row["gb_per_s"] > 0
    first_s, all_s = figures["background_s"]
    assert 0 < first_s <= all_s
    text = capsys.readouterr().out
    assert text.count("GB/s") == 4 * threads
    assert "the slab, in the background" in text


def test_the_best_round_counts_with_both_of_its_parts() -> None:
    row = bench_slab.Row("x", 3_000_000_000, touch_s=[1.0, 2.0], lock_s=[3.0, 1.0])
    assert row.best_s == 3.0
    assert row.gb_per_s == 1.0
