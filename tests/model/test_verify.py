"""`tvm-pager verify` on scripts that know nothing of it: equal, different, failing, interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import killed_on_failure

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--torch-device", "cpu", "--device", "200KiB", "--host", "16MiB"]

# The weights, gradients and states of this one take 560 KiB.
MLP = """
import os, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for i in range(int(sys.argv[1]) if len(sys.argv) > 1 else 50):
    try:
        loss = (model(torch.randn(8, 64)) - 1).square().mean()
        {before}
        optimizer.zero_grad()
        loss.backward()
        {after}
        optimizer.step()
    except ArithmeticError as error:
        print(f"a framework catches {{error!r}}")
"""


def mlp(before: str = "pass", after: str = "pass") -> str:
    return MLP.format(before=before, after=after)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where scripts are run; its "tmp" takes temporary files."""
    (tmp_path / "tmp").mkdir()
    return tmp_path


def left_behind(folder: Path) -> list[str]:
    """What is there after a run, other than the cache that torch makes in any process."""
    names = [path.name for path in (folder / "tmp").iterdir()]
    return [name for name in names if not name.startswith("torchinductor")]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tvm_pager.cli", "verify", *arguments]


def environment(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
    }


def verify(
    folder: Path, source: str, *options: str, script: tuple[str, ...] = ("script.py",)
) -> subprocess.CompletedProcess[str]:
    """Runs the command line on a script in a process of its own."""
    (folder / "script.py").write_text(source)
    result = subprocess.run(
        command(*OPTIONS, *options, *script),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert left_behind(folder) == []
    return result


def test_a_training_script_is_equal_under_paging_and_stops_after_its_steps(folder: Path) -> None:
    result = verify(folder, mlp())
    assert result.returncode == 0, result.stdout + result.stderr
    plain, paged, verdict = result.stdout.splitlines()
    assert plain.startswith("plain        3 steps, 114 tensors, ")
    assert paged.startswith("paged        3 steps, 114 tensors, ")
    evictions = re.search(r" (\d+) evictions", paged)
    assert evictions is not None
    assert int(evictions[1]) > 20
    assert verdict == (
        "EQUAL, every bit of 114 tensors in 3 steps: 9 initial values, 3 forward outputs, "
        "3 losses, 9 buffers, 18 gradients, 18 weights, 54 optimizer states"
    )


@pytest.mark.slow
def test_the_first_tensor_that_differs_is_named_with_its_elements(folder: Path) -> None:
    spoil = (
        "from tvm_pager import PagedTensor; "
        "i == 1 and isinstance(model[3].weight, PagedTensor) "
        "and model[3].weight.grad[7, 9].add_(0.25)"
    )
    result = verify(folder, mlp(after=spoil), "--max-elements", "1")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stdout.splitlines()[3:]
    assert lines[0] == "DIFFERENT at step 2: gradient 3.weight, float32[64, 256]"
    assert lines[1] == "  different elements: 1 of 16,384"
    index, plain, paged, plain_bits, paged_bits = lines[3].replace(", ", ",").split()
    assert index == "[7,9]"
    assert abs(float(paged) - float(plain) - 0.25) < 1e-6
    assert plain_bits != paged_bits
    assert lines[4].startswith("  largest difference 0.25, relative ")
    assert lines[5] == "  53 tensors before that are equal"
    assert lines[6] == "two plain runs agree up to there, so paging makes the difference"
    assert lines[7] == "run again with --trace to find the operation"


FLIP = """
from tvm_pager.paging.pager import DemandPager
admit, is_armed = DemandPager.admit, False

def flip(self, pages, new_bytes, operation):
    # As a fault on the way up would: one bit of a weight that has left the device and comes back.
    global is_armed
    away = [page for page in pages if page.kind.name == "PARAM" and page.state.name != "RESIDENT"]
    admit(self, pages, new_bytes, operation)
    for page in away if is_armed else ():
        page.memory()[403] ^= 64
        is_armed = False
        break

DemandPager.admit = flip
"""


@pytest.mark.slow
def test_a_bit_that_flips_on_its_way_is_traced_to_where_it_is_first_used(folder: Path) -> None:
    result = verify(folder, FLIP + mlp(after="is_armed = i == 1"), "--trace")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "\nDIFFERENT at step 2: " in result.stdout
    assert "\n  different elements: 1 of " in result.stdout
    found = result.stdout.partition("\nfirst operation that differs: ")[2].splitlines()
    assert re.match(r"number \d+ of step 2, aten\.\S+\(float32\[", found[0]), result.stdout
    assert "differs before it runs, and every operation before it gave the same" in found[1]
    assert found[3].startswith("  script.py:")


@pytest.mark.slow
def test_an_operation_that_only_the_paged_run_has_is_shown(folder: Path) -> None:
    spoil = (
        "from tvm_pager import PagedTensor; "
        "loss = loss * 3 if i == 1 and isinstance(model[3].weight, PagedTensor) else loss"
    )
    result = verify(folder, mlp(before=spoil), "--trace")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "\nDIFFERENT at step 2: loss, float32\n" in result.stdout
    found = result.stdout.partition("\nfirst operation that differs: ")[2].splitlines()
    assert re.match(r"number \d+ of step 2, aten\.mul\.Tensor\(float32, 3\)", found[0]), (
        result.stdout
    )
    assert found[1:3] == ["  only the paged run has it", f"  script.py:10 in <module>: {spoil}"]


@pytest.mark.slow
def test_a_script_that_differs_from_itself_is_not_blamed_on_paging(folder: Path) -> None:
    noise = "loss = loss * (1 + int.from_bytes(os.urandom(2), 'big') * (i == 1))"
    result = verify(folder, mlp(before=noise))
    assert result.returncode == 1, result.stdout + result.stderr
    verdict, advice = result.stdout.splitlines()[-2:]
    assert verdict == (
        "DIFFERENT, but two plain runs of this script differ as well, first at step 2, loss"
    )
    assert "try --seed 0" in advice
    assert "paging makes" not in result.stdout


def test_a_script_without_seeds_is_equal_once_it_is_given_one(folder: Path) -> None:
    source = (
        mlp()
        .replace("torch.manual_seed(0)", "import random, numpy as np")
        .replace("torch.randn(8, 64)", "torch.randn(8, 64) * random.random() * np.random.rand()")
    )
    result = verify(folder, source, "--seed", "3", "--steps", "1")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_short_inference_module_with_arguments_and_an_exit_code_of_its_own(folder: Path) -> None:
    source = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))).eval()
assert sys.argv[1:] == ["--device", "7"], sys.argv
with torch.inference_mode():
    for _ in range(2):
        model(torch.randn(2, 128))
sys.exit(3)
"""
    script = ("-m", "script", "--device", "7")
    result = verify(folder, source, "--steps", "5", script=script)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[2:] == [
        "EQUAL, every bit of 10 tensors in 2 steps: 8 initial values, 2 forward outputs",
        "note: the script ended after 2 of 5 steps",
    ]


def test_a_script_that_fails_by_itself_shows_its_own_traceback(folder: Path) -> None:
    result = verify(folder, "def f():\n    return 1 / 0\n\n\nf()\n")
    assert result.returncode == 2, result.stdout + result.stderr
    *traceback, error = result.stderr.splitlines()
    assert traceback[:2] == [
        "  | Traceback (most recent call last):",
        f'  |   File "{folder}/script.py", line 5, in <module>',
    ]
    assert error == (
        "tvm-pager: error: the plain run raised ZeroDivisionError: division by zero: the script "
        "must run by itself first"
    )


def test_a_crash_of_the_paged_run_alone_is_a_difference(folder: Path) -> None:
    spoil = (
        "from tvm_pager import PagedTensor; "
        "i == 1 and isinstance(model[3].weight, PagedTensor) and os.abort()"
    )
    result = verify(folder, mlp(after=spoil))
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.splitlines()[2:] == [
        "DIFFERENT: the plain run ended after 3 steps, the paged run ended without a word "
        "(killed by signal SIGABRT)",
        "  46 tensors before that are equal",
    ]


def test_a_budget_too_small_for_one_operation_is_no_difference(folder: Path) -> None:
    result = verify(folder, mlp(), "--device", "64KiB")
    assert result.returncode == 2, result.stdout + result.stderr
    error = result.stderr.splitlines()[-1]
    assert error.startswith("tvm-pager: error: the paged run could not go on: BudgetError: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_runs_and_leaves_nothing(
    folder: Path, number: signal.Signals
) -> None:
    (folder / "script.py").write_text(mlp(after="i == 1 and print('under way', flush=True)"))
    verification = subprocess.Popen(
        command(*OPTIONS, "--verbose", "--steps", "1000000", "script.py", "1000000"),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with killed_on_failure(verification):
        assert verification.stderr is not None
        assert verification.stderr.readline() == "under way\n"
        if number is signal.SIGINT:
            os.killpg(verification.pid, number)  # as a terminal does
        else:
            verification.send_signal(number)
        out, rest = verification.communicate(timeout=60)
    assert verification.returncode == 128 + number, out + rest
    assert "tvm_pager/cli.py" not in out + rest  # no traceback of ours
    with pytest.raises(ProcessLookupError):
        os.killpg(verification.pid, 0)
    assert left_behind(folder) == []
