"""Trace files: what is saved comes back exactly; everything else is refused with a reason."""

from __future__ import annotations

import gzip
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tvm_pager.errors import TraceError
from tvm_pager.memory import PageKind
from tvm_pager.planning import Phase, Trace, TraceOp, TracePage
from tvm_pager.planning.traces.trace_file import TRACE_VERSION, load, save
from tvm_pager.testing.strategies import traces

SMALL = Trace(
    ops=(
        TraceOp("aten::mm.default", (0,), (), (1,), 2500, 512, Phase.FORWARD, 0, True),
        TraceOp("aten::add_.Tensor", (0, 1), (0,), (), 2000, 0, Phase.UPDATE),
    ),
    pages=(
        TracePage(4096, PageKind.PARAM, "bfloat16", "layer.weight", None, None, 0),
        TracePage(1000, PageKind.TEMPORARY, "float32", "", 0, 2),
    ),
    modules=("layer",),
    launch_ns=5000,
    overhead_bytes=33,
    facts={"model": "two operations"},
)


def document(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return values


@given(traces(min_ops=0, is_steady=False), st.dictionaries(st.text(), st.text(), max_size=2))
@example(Trace((), ()), {})
@example(SMALL, {})
def test_a_trace_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, facts: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("traces") / "x.trace.gz"
    original = Trace(
        trace.ops, trace.pages, trace.modules, trace.launch_ns, trace.overhead_bytes, facts
    )
    save(original, path)
    assert load(path) == original


def test_a_file_is_private_equal_for_equal_traces_and_readable_unpacked(tmp_path: Path) -> None:
    first, second, unpacked = (tmp_path / name for name in ("a.gz", "b.gz", "c.json"))
    save(SMALL, first)
    save(SMALL, second)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert first.read_bytes() == second.read_bytes()
    unpacked.write_bytes(gzip.decompress(first.read_bytes()))
    assert load(unpacked) == SMALL
    assert sorted(tmp_path.iterdir()) == [first, second, unpacked]  # and no temporary file


def test_the_example_of_the_documentation_is_a_file(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "trace-format.md"
    text = page.read_text(encoding="utf-8")
    example_json = text.partition("```json\n")[2].partition("```")[0]
    path = tmp_path / "example.json"
    path.write_text(example_json, encoding="utf-8")
    trace = load(path)
    assert [op.name for op in trace.ops] == ["aten::mm.default", "aten::add_.Tensor"]
    save(trace, tmp_path / "again.gz")
    assert document(tmp_path / "again.gz") == json.loads(example_json)


def test_other_versions_are_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    save(SMALL, path)
    values = document(path) | {"version": TRACE_VERSION + 1}
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(TraceError, match=f"version {TRACE_VERSION + 1}, but {TRACE_VERSION} is"):
        load(path)


@given(st.data())
def test_a_file_cut_short_or_changed_is_never_another_trace(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("traces") / "x.gz"
    save(SMALL, path)
    good = path.read_bytes()
    cut = data.draw(st.integers(0, len(good) - 1))
    path.write_bytes(good[:cut])
    with pytest.raises(TraceError, match="record the trace again"):
        load(path)
    # Behind the header, which is not checked, and not in the byte before the checksum and the
    # length: the end of the deflate stream fills it up with bits that mean nothing.
    places = st.integers(10, len(good) - 1).filter(lambda place: place != len(good) - 9)
    place = data.draw(places)
    flipped = bytearray(good)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(flipped)
    with pytest.raises(TraceError, match="record the trace again"):
        load(path)


@given(st.binary(max_size=64))
def test_garbage_is_refused(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    path = tmp_path_factory.mktemp("traces") / "x.gz"
    path.write_bytes(garbage)
    with pytest.raises(TraceError, match="record the trace again"):
        load(path)


def test_a_missing_file_and_a_directory_that_is_not_there_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load(tmp_path / "none.gz")
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        save(SMALL, tmp_path / "none" / "x.gz")


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("ops", "compute_ns"), [1], "compute_ns has 1 entries instead of 2"),
        (("ops", "compute_ns"), [1, 2.5], "compute_ns holds 2.5, not a whole number"),
        (("ops", "compute_ns"), [1, True], "compute_ns holds True"),
        (("ops", "compute_ns"), [1, -1], "compute_ns holds -1"),
        (("ops", "num_reads"), [1, 1], "reads has 3 entries instead of 2"),
        (("ops", "reads"), [0, 0, 7], "names page 7 of 2"),
        (("ops", "writes"), [1, 0], "writes has 2 entries instead of 1"),
        (("ops", "reads"), [0, 1, 1], r"writes pages \(0,\) that are not among"),
        (("ops", "reads"), [1, 1, 0], "reads page 1, which is not alive"),
        (("pages", "born"), [None, None], "creates page 1, which was born in None"),
        (("pages", "died"), [None, 1], "reads page 1, which is not alive"),
        (("ops", "name"), [0, 9], "name holds a number above the 2 of its table"),
        (("ops", "module"), [0, 1], "module holds a number above the 1 modules"),
        (("ops", "phase"), [0, 5], "phase holds a number"),
        (("ops", "is_replayable"), [0, 2], "is_replayable holds a number"),
        (("phases",), ["FORWARD", "SIDEWAYS"], "no phase 'SIDEWAYS'"),
        (("kinds",), ["param", "thing"], "thing"),
        (("pages", "nbytes"), [1, None], "nbytes holds None"),
        (("pages", "name"), ["a", 1], "name holds 1, not a text"),
        (("pages", "becomes"), [1, None], "becomes page 1, which is not alive"),
        (("pages",), [], "pages is missing or no dict"),
        (("facts",), {"a": 1}, "facts holds 1, not a text"),
        (("launch_ns",), 1 << 63, "launch_ns holds"),
        (("format",), "something else", "the file is no trace"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, where: tuple[str, ...], value: Any, message: str
) -> None:
    path = tmp_path / "x.gz"
    save(SMALL, path)
    values = document(path)
    inner = values
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(TraceError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)
    assert "record the trace again" in str(raised.value)
