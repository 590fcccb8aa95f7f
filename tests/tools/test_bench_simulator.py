"""The simulator's benchmark runs, and says whether the target is met."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.machines import make_hardware, make_trace
from tools.bench_simulator import hits, main
from tvm_pager.planning.traces.trace_file import save

if TYPE_CHECKING:
    import pytest


def test_it_prints_operations_a_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, trace = tmp_path / "p.json", tmp_path / "t.trace"
    make_hardware().save(profile)
    main(["--profile", str(profile), "--ops", "2000", "--rounds", "1"])
    assert "0 faults in 2,000 operations" in capsys.readouterr().out
    save(make_trace({"A": 4096, "B": 4096}, [("A", "", 1), ("B", "", 1)]), trace)
    command = ["--profile", str(profile), "--trace", str(trace), "--device", "4096"]
    assert main([*command, "--rounds", "1"]) == 0
    assert "2 faults in 2 operations" in capsys.readouterr().out


def test_its_trace_is_a_chain_of_hits() -> None:
    trace = hits(10, 3, 512)
    assert [len(op.reads) for op in trace.ops] == [1] + [2] * 9
    assert trace.pages[3].died == 2
