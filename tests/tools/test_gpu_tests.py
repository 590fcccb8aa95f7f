"""All tests for a GPU are found, each runs in a process, and what fails or is skipped counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tools import gpu_session, gpu_tests

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_marked_test_is_found() -> None:
    files = {test.partition("::")[0] for test in gpu_tests.collect([])}
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^(pytestmark = |@)pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    }
    assert len(marked) > 10
    assert marked <= files
    assert "tests/unit/test_torch_backend.py" in files  # by a parameter


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with four files of tests; the working directory of the processes."""
    tests = tmp_path / "tests"
    (tests / "gpu").mkdir(parents=True)
    mark = "import pytest, time\npytestmark = pytest.mark.gpu\n"
    (tests / "gpu" / "test_good.py").write_text(mark + "def test_a(): pass\ndef test_b(): pass\n")
    (tests / "gpu" / "test_bad.py").write_text(mark + "def test_c(): assert 1 == 2, 'oh no'\n")
    skipped = mark + "def test_d(): pytest.skip('no reason')\n"
    (tests / "gpu" / "test_skipped.py").write_text(skipped)
    (tests / "gpu" / "test_endless.py").write_text(mark + "def test_e(): time.sleep(600)\n")
    (tests / "test_other.py").write_text("def test_f(): assert False\n")
    (tests / "test_broken.py").write_text("import no_such_package\n")
    for module in (gpu_tests, gpu_session):
        monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "_ALONE", frozenset({"tests/gpu/test_bad.py"}))
    monkeypatch.setattr(gpu_tests, "_CUT", frozenset({"tests/gpu/test_good.py"}))
    return tmp_path


def test_what_fails_hangs_or_is_skipped_is_told(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = suite / "out"
    assert gpu_tests.main(["--out", str(out), "--jobs", "2", "--limit-s", "8"]) == 1
    printed, told = capsys.readouterr()
    assert "2 of 5 processes passed" in printed
    assert "AssertionError: oh no" in printed
    assert "tests/gpu/test_endless.py: out of time" in printed
    assert "1 skipped" in printed
    assert "test_other" not in printed
    assert "test_broken" in told
    names = {path.name for path in out.iterdir()}
    assert names == {"good-test_a.log", "good-test_b.log", "bad.log", "skipped.log", "endless.log"}


def test_all_is_well_where_all_pass(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_tests.main(["--out", str(suite / "out"), "--only", "test_good"]) == 0
    assert "2 of 2 processes passed" in capsys.readouterr().out


def test_no_time_is_no_success(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(suite / "out"), "--only", "test_good", "--total-s", "0"]
    assert gpu_tests.main(arguments) == 1
    assert "out of time" in capsys.readouterr().out


def test_a_name_that_no_file_has_is_refused(suite: Path) -> None:
    with pytest.raises(SystemExit):
        gpu_tests.main(["--out", str(suite / "out"), "--only", "nothing"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run them")
def test_without_a_gpu_nothing_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_tests.main(["--out", str(tmp_path), "--only", "device_copy", "--jobs", "1"]) == 1
    assert "0 of 1 processes passed" in capsys.readouterr().out
