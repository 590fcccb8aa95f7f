"""What `verify` makes of two runs: elements, operations, verdicts, and mistakes in one line."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tvm_pager.cli import main
from tvm_pager.errors import BudgetError, ConfigError, PagerError
from tvm_pager.script import Script
from tvm_pager.verify import VerifyOptions, compare, report, run_verify, worker
from tvm_pager.verify.elements import Elements, compare_elements
from tvm_pager.verify.operation import Operation, find_difference
from tvm_pager.verify.record import Outcome, Record, write_line
from tvm_pager.verify.tensor_bytes import read_bytes

if TYPE_CHECKING:
    from tvm_pager.verify.process import Run

# --- elements ----------------------------------------------------------------------------------


def elements(plain: torch.Tensor, paged: torch.Tensor, max_elements: int = 3) -> Elements:
    with tempfile.TemporaryFile() as mine, tempfile.TemporaryFile() as theirs:
        for tensor, file in ((plain, mine), (paged, theirs)):
            read_bytes(tensor, file.write)
            file.flush()
        dtype = str(plain.dtype).removeprefix("torch.")
        return compare_elements(mine, theirs, dtype, tuple(plain.shape), max_elements)


def test_elements_are_found_where_they_lie_and_shown_with_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tvm_pager.verify.elements._PIECE_ELEMENTS", 4)
    plain = torch.arange(1.0, 13.0).reshape(3, 4)
    paged = plain.clone()
    paged[1, 2] = 7.5
    paged[2, 3] = 12.000001
    found = elements(plain, paged)
    assert (found.num_elements, found.num_different) == (12, 2)
    assert dataclasses.astuple(found.first[0]) == ((1, 2), "7", "7.5", "0x40e00000", "0x40f00000")
    assert found.first[1].index == (2, 3)
    assert found.first[1].paged == "12.000001"
    assert found.max_absolute == 0.5
    assert found.max_relative == pytest.approx(0.5 / 7.5)
    assert len(elements(plain, -plain, max_elements=5).first) == 5


@pytest.mark.parametrize(
    ("plain", "paged", "bits"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), ("0x00000000", "0x80000000")),
        (torch.tensor(1.0).bfloat16(), torch.tensor(1.0078125).bfloat16(), ("0x3f80", "0x3f81")),
        (torch.tensor([3]), torch.tensor([2]), ("0x0000000000000003", "0x0000000000000002")),
        (torch.tensor(True), torch.tensor(False), ("0x01", "0x00")),
        (torch.tensor(1j), torch.tensor(2j), ("0x3f80000000000000", "0x4000000000000000")),
    ],
    ids=["zeros", "bfloat16", "int", "bool", "complex"],
)
def test_elements_of_every_kind_are_compared(
    plain: torch.Tensor, paged: torch.Tensor, bits: tuple[str, str]
) -> None:
    found = elements(plain, paged)
    assert found.num_different == 1
    assert (found.first[0].plain_bits, found.first[0].paged_bits) == bits
    assert found.first[0].plain != found.first[0].paged


def test_infinities_and_nans_are_counted_and_leave_the_difference_finite() -> None:
    found = elements(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([float("nan"), float("inf"), 4.0]))
    assert (found.num_different, found.num_not_finite, found.max_absolute) == (3, 2, 1.0)
    assert "; 2 of them inf or nan in one run at least" in report.format_elements(found)[0]


# --- operations --------------------------------------------------------------------------------


def operation(name: str, operands: str = "", results: str = "", shape: int = 2) -> Operation:
    """One operation with a tensor per letter, which is its digest."""
    described = [[("float32", (shape,), letter) for letter in text] for text in (operands, results)]
    return Operation(name, "", "", *described, stack=[f"script.py: {name}"])


def kinds(found: Any) -> tuple[int, str, int]:
    assert found is not None
    return found.index, found.kind, found.position


def test_the_first_operation_whose_numbers_differ_is_found() -> None:
    plain = [operation("mul", "ab", "c"), operation("add", "cd", "e"), operation("sum", "e", "f")]
    assert find_difference(plain, plain, plain) is None
    wrong_result = [plain[0], operation("add", "cd", "x"), operation("sum", "x", "y")]
    assert kinds(find_difference(plain, plain, wrong_result)) == (2, "result", 0)
    wrong_operand = [plain[0], operation("add", "cx", "y"), operation("sum", "y", "z")]
    assert kinds(find_difference(plain, plain, wrong_operand)) == (2, "operand", 1)


def test_what_differs_between_two_plain_runs_is_left_out() -> None:
    plain = [operation("attention", "ab", "cr"), operation("sum", "c", "d")]
    again = [operation("attention", "ab", "cs"), plain[1]]
    paged = [operation("attention", "ab", "ct"), plain[1]]
    assert find_difference(plain, again, paged) is None


def test_operations_that_one_run_has_more_are_passed_over() -> None:
    plain = [operation(f"op{i}", "a", "b") for i in range(8)]
    extra = operation("clone", "a", "q")
    assert find_difference(plain, plain, [*plain[:3], extra, extra, *plain[3:]]) is None
    assert find_difference(plain, plain, [*plain[:3], *plain[5:]]) is None
    flat = operation("clone", "a", "q", shape=9)
    assert find_difference([*plain, extra], [*plain, extra], [*plain, flat]) is None


def test_a_wrong_operand_that_an_extra_operation_made_is_its_doing() -> None:
    plain = [operation(f"op{i}", "a", "b") for i in range(4)]
    extra = operation("mul", "a", "q")
    paged = [plain[0], extra, operation("op1", "q", "r"), *plain[2:]]
    found = find_difference(plain, plain, paged)
    assert kinds(found) == (2, "extra", 0)
    assert found is not None
    assert report.format_operation(found, 1)[-1] == "  script.py: mul"


@pytest.mark.parametrize("num_after", [0, 2])
def test_an_extra_operation_whose_result_is_wrong_is_found(num_after: int) -> None:
    plain = [operation(f"op{i}", "a", "b") for i in range(3)]
    place = len(plain) - num_after
    paged = [*plain[:place], operation("mul", "b", "c"), *plain[place:]]
    assert find_difference(plain, plain, paged, wrong="d") is None
    found = find_difference(plain, plain, paged, wrong="c")
    assert kinds(found) == (place + 1, "more", 0)
    assert found is not None
    assert "  only the paged run has it" in report.format_operation(found, 1)


def test_runs_that_part_for_good_are_named_where_they_part() -> None:
    plain = [operation(f"op{i}", "a", "b") for i in range(4)]
    other = [operation(f"else{i}", "a", "b") for i in range(4)]
    assert kinds(find_difference(plain, plain, [plain[0], *other])) == (2, "program", 0)
    found = find_difference(plain, plain, plain[:2])
    assert kinds(found) == (3, "program", 0)
    assert found is not None
    assert "the paged run calls another one here: no more" in report.format_operation(found, 1)[1]


# --- verdicts ----------------------------------------------------------------------------------

STATS = {
    "num_evictions": 0,
    "bytes_by_lane": {"d2h": 5},
    "device_peak_bytes": 2048,
    "notices": ["one", "two", "three", "four"],
}
WEIGHT = Record(1, "weight", "w", "float32", (2,), "aa")
OTHER = dataclasses.replace(WEIGHT, digest="bb")


def outcome(end: str = "stopped", num_weights: int = 1, **values: Any) -> Outcome:
    return Outcome(end, num_steps=3, num_by_phase={"weight": num_weights}, **values)


def verdict(
    monkeypatch: pytest.MonkeyPatch,
    runs: list[tuple[list[Record], Outcome]],
    **options: Any,
) -> int:
    """Runs `verify` on runs that are made up."""
    left = iter(runs)

    def run(self: Run, settings: Any, **_: Any) -> None:
        records, self.outcome = next(left)
        for record in records:
            write_line(self.records, record.to_list())

    monkeypatch.setattr(compare.Run, "run", run)
    code = run_verify(VerifyOptions(Script("os", is_module=True), **options))
    assert next(left, None) is None, "a run was left out"
    return code


def test_equal_runs_with_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paged = outcome("finished", stats=STATS, unreadable=["Strange"])
    assert verdict(monkeypatch, [([], outcome("finished")), ([], paged)], num_steps=9) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "EQUAL, every bit of 1 tensor in 3 steps: 1 weight",
        "note: the script ended after 3 of 9 steps",
        "note: no page ever left the device, so little was tested; pages took 2.00 KiB at most: "
        "give --device less than that",
        "note: the bytes of these types cannot be read and were not compared: Strange",
        *("note: one", "note: two", "note: three"),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"end": "exit", "exit_code": 3}, "the paged run called sys.exit(3)"),
        ({"end": "error", "error": "ValueError: x"}, "the paged run raised ValueError: x"),
        ({"end": "finished", "num_weights": 2}, "the paged run ended after 3 steps"),
        ({"end": "died", "exit_code": -11}, "ended without a word (killed by signal SIGSEGV)"),
    ],
)
def test_runs_that_end_differently_are_different(
    changes: dict[str, Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verdict(monkeypatch, [([], outcome()), ([], outcome(**changes))]) == 1
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("paged", "lines"),
    [
        (OTHER, ["DIFFERENT at step 1: weight w, float32[2]"]),
        (
            dataclasses.replace(OTHER, shape=(3,)),
            ["DIFFERENT at step 1: weight w", "  plain  float32[2]", "  paged  float32[3]"],
        ),
        (
            dataclasses.replace(OTHER, phase="gradient"),
            [
                "DIFFERENT: the script does something else in the two runs",
                "  plain  step 1, weight w",
                "  paged  step 1, gradient w",
            ],
        ),
    ],
    ids=["bits", "shape", "place"],
)
def test_the_difference_is_named_also_without_a_second_plain_run(
    paged: Record,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    different = outcome(found_at=0, is_different=True)
    runs = [([WEIGHT], outcome()), ([paged], different)]
    assert verdict(monkeypatch, runs, has_self_check=False) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        *lines,
        "  0 tensors before that are equal",
        "whether the script is the same in two plain runs was not checked",
    ]


def test_a_record_that_the_plain_run_does_not_have_is_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    different = outcome(found_at=1, is_different=True)
    runs = [([WEIGHT], outcome()), ([WEIGHT, OTHER], different), ([WEIGHT], outcome())]
    assert verdict(monkeypatch, runs) == 1
    assert "  plain  no more\n  paged  step 1, weight w\n" in capsys.readouterr().out


def test_numbers_of_python_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [Record(2, "optimizer state", "d of w", "float", (), text) for text in ("0.1", "0.2")]
    different = outcome(found_at=0, is_different=True)
    runs = [([sides[0]], outcome()), ([sides[1]], different), ([sides[0]], outcome(found_at=0))]
    assert verdict(monkeypatch, runs) == 1
    assert capsys.readouterr().out.splitlines()[3:6] == [
        "DIFFERENT at step 2: optimizer state d of w, float",
        "  plain  0.1",
        "  paged  0.2",
    ]


def test_a_script_that_differs_from_itself_is_told_so_and_how_to_seed_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    different = outcome(found_at=0, is_different=True)
    runs = [([WEIGHT], outcome()), ([OTHER], different), ([OTHER], different)]
    assert verdict(monkeypatch, runs, has_trace=True) == 1  # and no trace, which would mean nothing
    verdict_line, advice = capsys.readouterr().out.splitlines()[3:]
    assert verdict_line.endswith("differ as well, first at step 1, weight w")
    assert "try --seed 0" in advice
    assert verdict(monkeypatch, runs, seed=0) == 1
    assert "try --seed 0" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (outcome("error", error="MemoryError", error_kind="memory"), "try a smaller batch"),
        (outcome("died", exit_code=-signal.SIGKILL), "try a smaller batch"),
        (outcome("error", error="ValueError: x", error_kind="script"), "raised ValueError: x"),
        (outcome("finished", num_weights=0), "without a tensor to compare"),
    ],
    ids=["memory", "killed", "error", "nothing"],
)
def test_a_plain_run_that_cannot_be_compared_with_is_an_error(
    plain: Outcome, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PagerError, match=says.replace("(", r"\(")):
        verdict(monkeypatch, [([], plain)])


def test_paging_that_is_refused_is_an_error_and_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = outcome("error", error="BudgetError: more", error_kind="pager")
    with pytest.raises(PagerError, match="could not go on: BudgetError: more"):
        verdict(monkeypatch, [([], outcome()), ([], refused)])


# --- ends of a script --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "end", "kind"),
    [
        (MemoryError(), "error", "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes"), "error", "memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "error", "memory"),
        (BudgetError("asked for more memory than there is: out of memory"), "error", "pager"),
        (ValueError("not enough memory of things past"), "error", "script"),
        (SystemExit("text"), "exit", ""),
        (KeyboardInterrupt(), "interrupted", ""),
    ],
)
def test_how_a_script_ended_is_told_apart(
    error: BaseException, end: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Script) -> None:
        raise error

    monkeypatch.setattr(Script, "run", run)
    found = worker._end_of(Script("os", is_module=True))
    assert (found.end, found.error_kind) == (end, kind)
    assert found.exit_code == (130 if end == "interrupted" else 1)


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["missing.py"], "missing.py"),
        (["--steps", "0", "script.py"], "--steps 0"),
        (["--max-elements", "0", "script.py"], "--max-elements 0"),
        (["--seed", "-1", "script.py"], "--seed -1"),
        (["--trace", "--no-self-check", "script.py"], "--trace"),
        (["--device", "4QiB", "script.py"], "4QiB"),
        (["--policy", "nobody", "script.py"], "nobody"),
        (["--nvme", "missing", "script.py"], "missing"),
        (["--config", "missing.json", "script.py"], "missing.json"),
    ],
)
def test_a_mistake_is_said_before_anything_is_run(
    arguments: list[str],
    mentions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("print('ran')")
    assert main(["verify", *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("tvm-pager: error: ")
    assert mentions in error


def test_a_device_that_is_not_there_is_said_after_the_plain_run_has_started_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = Outcome("error", 1, "ConfigError: torch_device='cuda': none here", "pager")
    with pytest.raises(PagerError, match=r"^torch_device='cuda': none here$"):
        verdict(monkeypatch, [([], refused)])
    with pytest.raises(ConfigError, match="tons"):
        VerifyOptions(Script("os", is_module=True), pager={"host": "tons"})
