"""The timeline: a file that Chrome's viewer and Perfetto read, written as things happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interpreter import run_program
from tvm_pager.errors import ConfigError
from tvm_pager.events import Event, EventKind, EventSink
from tvm_pager.observe.timeline import Timeline


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def rows_of(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_events_become_spans_on_the_rows_of_their_lanes(tmp_path: Path) -> None:
    with Timeline(tmp_path / "t.json") as timeline:
        assert isinstance(timeline, EventSink)
        timeline.emit(Event(EventKind.FETCH, 7, 4096, "h2d", 5_000, 9_500))
        timeline.emit(Event(EventKind.FAULT, 7, 4096, None, 5_000, 9_600, "aten::mm.default"))
        timeline.emit(Event(EventKind.EVICT, 8, 512, None, 9_600, 9_600, "clean"))
    events = read(tmp_path / "t.json")
    rows = rows_of(events)
    shown = [e for e in events if e["ph"] in "Xi"]
    assert [rows[e["tid"]] for e in shown] == ["h2d", "faults", "evictions"]
    fetch, fault, evict = shown
    assert (fetch["ts"], fetch["dur"]) == (0.0, 4.5)  # microseconds since the first
    assert fetch["args"] == {"page": 7, "bytes": 4096}
    assert fault["name"] == "aten::mm.default"
    assert (evict["ph"], evict["ts"]) == ("i", 4.6)
    assert evict["args"]["detail"] == "clean"


def test_what_overlaps_on_a_lane_goes_to_rows_of_its_own(tmp_path: Path) -> None:
    with Timeline(tmp_path / "t.json") as timeline:
        for begin, end in ((0, 10), (5, 20), (10, 15), (20, 30)):
            timeline.add("h2d", f"{begin}", begin, end)
    events = read(tmp_path / "t.json")
    rows = rows_of(events)
    shown = {e["name"]: rows[e["tid"]] for e in events if e["ph"] == "X"}
    assert shown == {"0": "h2d", "5": "h2d (2)", "10": "h2d", "20": "h2d"}


def test_a_file_that_is_cut_off_is_whole_but_for_its_last_bracket(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json")
    timeline.add("h2d", "copy", 0, 10)
    timeline._file.flush()
    text = (tmp_path / "t.json").read_text()
    timeline.close()
    assert len(json.loads(text.rstrip().rstrip(",") + "]")) == 4


def test_transfers_can_be_left_to_who_knows_better(tmp_path: Path) -> None:
    with Timeline(tmp_path / "t.json", has_moves=False) as timeline:
        timeline.emit(Event(EventKind.FETCH, 7, 4096, "h2d", 5_000, 9_500))
        timeline.emit(Event(EventKind.WRITE_BACK, 7, 4096, "d2h", 5_000, 9_500))
    assert not [e for e in read(tmp_path / "t.json") if e["ph"] == "X"]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Timeline(tmp_path / "absent" / "t.json")


def test_a_disk_that_fills_up_stops_the_timeline_and_not_the_program() -> None:
    timeline = Timeline("/dev/full")
    for index in range(10_000):
        timeline.add("h2d", "copy", index, index + 1)
    with pytest.raises(ConfigError, match="No space left"):
        timeline.close()
    timeline.add("h2d", "late", 0, 1)
    timeline.close()


def test_a_run_writes_its_timeline_whatever_becomes_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "held = [torch.ones(1000) for _ in range(8)]\n"
        "total = sum(t.sum() for t in held)\n"
        "sys.exit(int(total) // 1000)\n"
    )
    budgets = ["--torch-device", "cpu", "--device", "20000", "--host", "1MiB"]
    command = ["run", *budgets, "--timeline", str(tmp_path / "t.json"), str(script)]
    program = "import sys; from tvm_pager.cli import main; sys.exit(main(sys.argv[1:]))"
    assert run_program(program, *command).returncode == 8
    rows = set(rows_of(read(tmp_path / "t.json")).values())
    assert {"faults", "h2d", "d2h", "evictions"} <= rows
