"""The first pager of a machine measures it, alone, with a pager that needs no profile itself."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.interpreter import start_program
from tests.tools.profile_rig import QUICK_TINY
from tvm_pager import Pager, assembly, cli
from tvm_pager.observe.profile import cache
from tvm_pager.pager import plain_pager

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tvm_pager.planning import HardwareProfile


@pytest.fixture
def num_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """CPU tensors as the device, measured as a GPU is where no figures are assumed for it."""
    asked: list[str] = []

    def as_on_a_gpu(engine: str) -> HardwareProfile:
        asked.append(engine)
        assert len(asked) < 3, "the pager that is measured has itself measured"
        return cache.load_or_measure(plain_pager, torch_device="cpu", is_quick=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(assembly, "assumed_profile", as_on_a_gpu)
    monkeypatch.setattr(cache, "QUICK", QUICK_TINY)
    return asked


def test_the_first_pager_of_a_machine_measures_it_once(
    num_measured: list[str], tmp_path: Path
) -> None:
    with Pager(device="1MiB", host="1MiB", torch_device="cpu") as pager:
        assert pager.config.policy == "lookahead"  # one that plans, or this says nothing
        assert torch.ones(4).sum() == 4
    assert len(num_measured) == 1
    assert len(list(tmp_path.glob("tvm_pager/profile-*-quick.json"))) == 1


def test_the_command_measures_whatever_policy_the_environment_names(
    num_measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setenv("TVM_PAGER_POLICY", "lookahead")
    monkeypatch.setenv("TVM_PAGER_CHECK", "2")  # would be measured too
    assert cli.main(["profile", "--quick", "--torch-device", "cpu"]) == 0
    assert num_measured == []
    assert "launch" in capsys.readouterr().out


PROCESS = """
import sys
from pathlib import Path
from tests.tools.profile_rig import TINY, no_pager
from tvm_pager.observe.profile import cache, measure

real = measure.measure
def measured(*arguments):
    print("measures", flush=True)
    sys.stdin.readline()  # until it may
    return real(*arguments)
measure.measure = measured
def say(line):
    if "another process" in line:
        print("waits", flush=True)
profile = cache.load_or_measure(
    no_pager, torch_device="cpu", effort=TINY, directory=Path(sys.argv[1]), say=say
)
print(profile.machine.measured_at, flush=True)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts such processes; they end with the test, whatever becomes of it."""
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[str]:
            process = stack.enter_context(start_program(PROCESS, tmp_path / "cache"))
            stack.callback(process.kill)
            return process

        yield start


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def let_measure(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_of_two_processes_one_measures_and_the_other_waits_for_it(
    started: Callable[[], subprocess.Popen[str]],
) -> None:
    first = started()
    assert read_line(first) == "measures"
    second = started()
    assert read_line(second) == "waits"
    let_measure(first)
    found = read_line(first)
    assert found
    assert read_line(second) == found
    assert (first.wait(), second.wait()) == (0, 0)


def test_a_process_that_is_killed_while_it_measures_blocks_nobody(
    started: Callable[[], subprocess.Popen[str]],
) -> None:
    first = started()
    assert read_line(first) == "measures"
    first.kill()
    first.wait()
    second = started()
    assert read_line(second) == "measures"
    let_measure(second)
    assert read_line(second)
    assert second.wait() == 0


def test_what_takes_ten_seconds_is_told_before(num_measured: list[str], tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        cache.load_or_measure(plain_pager, torch_device="cpu", is_quick=True, announce=told.append)
    (text,) = told
    assert "about ten seconds" in text
    assert str(tmp_path) in text
