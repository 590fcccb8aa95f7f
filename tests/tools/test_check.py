"""The repository's own checks run and find what they look for; CI calls what README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import check, sz

ROOT = check.ROOT


def write_lines(path: Path, num_lines: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * num_lines)


def test_a_passing_check_keeps_its_output_to_itself(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = check.run_check(check.Check("quiet", ("-c", "print('secret')")))
    assert (outcome.name, outcome.exit_code) == ("quiet", 0)
    assert outcome.seconds > 0
    assert capfd.readouterr().out == "== quiet\n"


def test_a_failing_check_shows_all_its_output(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    outcome = check.run_check(check.Check("loud", ("-c", program)))
    assert outcome.exit_code == 3
    assert set(capfd.readouterr().out.splitlines()) == {"== loud", "out", "err"}


def test_every_check_runs_and_one_failure_fails_all(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [check.Check(name, ()) for name in ("one", "two", "three")]
    ran: list[str] = []

    def run(one: check.Check) -> check.Outcome:
        ran.append(one.name)
        return check.Outcome(one.name, int(one.name == "two"), 1.25)

    assert check.run_all(checks, run)[1] == 1
    assert ran == ["one", "two", "three"]
    summary = capsys.readouterr().out
    assert re.search(r"^one +1\.2 s  ok$", summary, re.MULTILINE)
    assert re.search(r"^two +1\.2 s  FAILED \(1\)$", summary, re.MULTILINE)
    assert check.run_all(checks[:1], run)[1] == 0


def test_the_command_line_chooses_checks() -> None:
    everything = [one.name for one in check.CHECKS]
    assert [one.name for one in check.choose_checks([])] == everything
    assert [one.name for one in check.choose_checks(["--tests"])] == [*everything, "tests"]
    assert [one.name for one in check.choose_checks(["--only", "types", "lint"])] == [
        "lint",
        "types",
    ]
    tests = check.choose_checks(["--tests", "--", "-k", "lru"])[-1]
    assert tests.arguments[-2:] == ("-k", "lru")
    for wrong in (["--only", "nonsense"], ["--", "-x"]):
        with pytest.raises(SystemExit):
            check.choose_checks(wrong)


def test_the_layer_check_catches_torch_in_the_core(tmp_path: Path) -> None:
    """Scenario: 1. a copy of the source tree is clean; 2. an import is planted; 3. it is named."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "tvm_pager", tmp_path / "tvm_pager", ignore=shutil.ignore_patterns("__pycache__")
    )
    layers = next(one for one in check.CHECKS if one.name == "layers")
    command = [sys.executable, "-P", *layers.arguments]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def lint() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )

    clean = lint()
    assert clean.returncode == 0, clean.stdout
    planted = {
        "memory": ("import torch", "the core reaches no torch BROKEN"),
        "planning": ("import tvm_pager.paging", "rooms import downwards only BROKEN"),
        "policies": ("import tvm_pager.units", "policies know the planning room only BROKEN"),
        "paging": ("import numpy", "numpy only where decisions are computed BROKEN"),
        "unplaced": ("", "rooms import downwards only BROKEN"),
    }
    for room, (text, verdict) in planted.items():
        path = tmp_path / "tvm_pager" / room / ("__init__.py" if room == "unplaced" else "plant.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text}\n")
        result = lint()
        path.unlink()
        assert result.returncode != 0, f"{text!r} in {room} passed"
        assert verdict in result.stdout, result.stdout
        if room == "unplaced":
            path.parent.rmdir()


def test_sizes_warn_above_the_soft_limit_and_fail_above_the_hard_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "tvm_pager" / "small.py", 400)
    assert sz.main(["--root", str(tmp_path)]) == 0
    assert "warning" not in capsys.readouterr().out
    write_lines(tmp_path / "tests" / "deep" / "large.py", 450)
    assert sz.main(["--root", str(tmp_path)]) == 0
    assert "warning: tests/deep/large.py has 450 lines" in capsys.readouterr().out
    write_lines(tmp_path / "tools" / "huge.py", 451)
    assert sz.main(["--root", str(tmp_path)]) == 1
    assert "error: tools/huge.py has 451 lines" in capsys.readouterr().out


def test_sizes_count_a_linked_folder_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "policies" / "lru.py", 3)
    write_lines(tmp_path / "tvm_pager" / "a.py", 5)
    (tmp_path / "tvm_pager" / "policies").symlink_to("../policies")
    assert sz.measure(tmp_path) == [(Path("tvm_pager/a.py"), 5), (Path("policies/lru.py"), 3)]


def test_ci_takes_its_test_command_from_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    shown = subprocess.run(
        ["bash", str(script), "--show"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip() in (ROOT / "README.md").read_text()
    assert shown.rstrip().endswith(".venv/bin/python tools/check.py --tests")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_room_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    on_disk = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "tvm_pager").rglob("__init__.py")
    }
    on_disk |= {"tvm_pager.policies"}  # behind a link, which rglob may or may not follow
    assert set(project["tool"]["setuptools"]["packages"]) == on_disk
