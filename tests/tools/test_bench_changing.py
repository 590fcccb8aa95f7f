"""Programs that change run under each policy, with the bits of plain torch, and a bound holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import bench_changing, changing_programs

TINY = ["--scale", "tiny", "--torch-device", "cpu", "--host", "64MiB", "--iterations", "5"]
TINY += ["--rounds", "1"]


@pytest.mark.bench
def test_every_program_gives_the_bits_of_plain_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "changing.json"
    assert bench_changing.main([*TINY, "--bound", "100", "--json", str(json_file)]) == 0
    rows = json.loads(json_file.read_text())
    assert [row["program"] for row in rows] == list(changing_programs.PROGRAMS)
    for row in rows:
        assert row["is_equal"]
        assert set(row["policies"]) == {"lru", "lookahead"}
        for cell in row["policies"].values():
            assert cell["is_equal"]
            assert 0 < cell["peak_bytes"] <= row["budget_bytes"] < row["need_bytes"]
            assert min(cell["moved_bytes"]) > 0
            assert len(cell["ratios"]) == 1
        assert row["policies"]["lru"]["ratios"] == [1.0]
    assert "met" in capsys.readouterr().out


def test_a_bound_that_is_missed_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_changing.main([*TINY, "--programs", "skipping", "--bound", "0.001"]) == 1
    assert "MISSED" in capsys.readouterr().out


def test_other_bits_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout's masks differ from run to run where nobody sets the seed."""

    class Noisy(changing_programs.Skipping):
        def rows(self, i: int) -> torch.Tensor:
            torch.seed()
            return torch.nn.functional.dropout(super().rows(i))

    monkeypatch.setitem(changing_programs.PROGRAMS, "skipping", Noisy)
    assert bench_changing.main([*TINY, "--programs", "skipping", "--bound", "100"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_programs_do_not_repeat() -> None:
    """Else the benchmark would measure what every other one does."""
    scale = changing_programs.SCALES["tiny"]
    skipping = changing_programs.Skipping(scale, "cpu")
    runs: list[int] = []
    for layer in skipping.model.get_submodule("layers").children():
        layer.register_forward_hook(lambda *_: runs.append(1))
    counts = []
    for i in range(8):
        runs.clear()
        skipping.iterate(i)
        counts.append(len(runs))
    assert len(set(counts)) > 1
    growing = changing_programs.Growing(scale, "cpu")
    shapes: list[int] = []
    growing.model.register_forward_hook(lambda _m, _a, out: shapes.append(out.logits.shape[1]))
    for i in range(4):
        growing.iterate(i)
    assert shapes == sorted(set(shapes))


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit):
        bench_changing.main(["--programs", "shrinking"])
