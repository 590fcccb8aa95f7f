"""The contract tests of the kit: a rule that is broken is noticed, in words that say which."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.interpreter import REPOSITORY, run_program
from tests.model import broken_policies as broken
from tests.model.broken_policies import Fine
from tvm_pager.errors import PolicyError
from tvm_pager.planning import Policy
from tvm_pager.testing import contract, pager_machine, policy_contract, program_machine

VICTIMS = "test_its_victims_are_legal_and_enough_and_it_never_raises"
SAME = "test_its_choice_is_the_same_every_time"
UNCHANGED = "test_none_leaves_it_unchanged"
NO_VIEW = "test_it_keeps_no_view"
WATCHED = "test_it_reads_no_clock_and_does_no_io"
FRESH = "test_it_imports_no_torch_and_decides_alike_in_every_interpreter"
LEGAL = "test_its_plans_are_legal_and_keep_to_the_budget"
ANY = "test_it_plans_any_trace_the_same_every_time"
IN_TIME = "test_a_large_trace_is_planned_in_time"
FEEDBACK = "test_it_takes_any_feedback_the_same_every_time"
SIMULATED = "test_it_runs_in_the_simulator"


def run(policy: type[Policy], test: str, **options: Any) -> None:
    made = policy_contract(policy, **options)
    getattr(made(), test)()


@pytest.fixture
def same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis takes the same examples every time, and does not look for smaller ones."""
    fixed = partial(settings, derandomize=True, database=None, phases=[Phase.generate])
    for module in (contract, program_machine):
        monkeypatch.setattr(module, "settings", fixed)


@pytest.mark.parametrize(
    ("policy", "test", "match"),
    [
        (broken.ClockReader, WATCHED, r"reads a clock: time.monotonic \(broken_policies.py:\d+\)"),
        (broken.DateReader, WATCHED, r"reads a clock: datetime.now \(broken_policies.py:\d+\)"),
        (broken.Printer, WATCHED, "does I/O: builtins.print"),
        (broken.Reader, WATCHED, "does I/O: io.open"),
        (broken.Gambler, SAME, "told the same, it chose"),
        (broken.HashSeeded, FRESH, "its victims depend on the interpreter"),
        (broken.TorchUser, FRESH, "importing or using it imports torch"),
        (broken.Spendthrift, UNCHANGED, "choose_victims gave None, it has changed its state"),
        (broken.Hoarder, NO_VIEW, "holds the View after the call"),
        (broken.LateLooker, VICTIMS, "a View was used after the call"),
        (broken.TooFew, VICTIMS, r"frees \d+ B where \d+ B were asked"),
        (broken.Unwilling, VICTIMS, "gave None where .* B were asked and .* B can leave"),
        (broken.Ruthless, VICTIMS, r"page \d+, which is not evictable"),
        (broken.Upward, VICTIMS, r"sent page \d+ to .*HOST.*, which is not a tier below HOST"),
        (broken.Twice, VICTIMS, r"named page \d+ twice"),
        (broken.Forgetful, VICTIMS, r"named page \d+, which is not in the tier"),
        (broken.Numbers, VICTIMS, r"gave \[.*\d\], not a list of Eviction"),
        (broken.Raising, VICTIMS, r"on_remove raised KeyError\(2\)"),
        (broken.OverBudget, LEGAL, r"takes \d+ B of \d+ B"),
        (broken.Beyond, LEGAL, "lies outside of the moments"),
        (broken.InUse, LEGAL, r"uses page \d+, which is "),
        (broken.NotBack, LEGAL, "absent at the end and there at the start"),
        (broken.PlanRaises, LEGAL, "plan raised IndexError"),
        (broken.PlanOfNumbers, LEGAL, r"plan gave \[1, 2\], not a MovementPlan"),
        (broken.Fickle, ANY, "plans differ"),
        (broken.PlanReadsClock, WATCHED, "reads a clock: time.perf_counter_ns"),
        (broken.FeedbackRaises, FEEDBACK, "feedback raised ZeroDivisionError"),
        (broken.FeedbackFickle, FEEDBACK, "differ"),
    ],
)
@pytest.mark.usefixtures("same_examples")
def test_a_broken_rule_is_named(policy: type[Policy], test: str, match: str) -> None:
    with pytest.raises(AssertionError, match=f"policy {policy.name or policy.__name__}") as caught:
        run(policy, test, max_examples=1000)
    assert caught.match(f"(?s){match}")


@pytest.mark.usefixtures("same_examples")
@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (broken.Ruthless, "Ruthless chose PageView.*, which cannot leave DEVICE"),
        (broken.TooFew, r"freed \d+ B where \d+ B were asked"),
        (broken.Raising, r"on_remove: KeyError\(2\)"),
        (broken.Beyond, "planned 1 illegal actions, such as Evict"),
        (broken.FeedbackRaises, "no fault"),
    ],
)
def test_the_pager_machine_stops_at_what_is_illegal(policy: type[Policy], match: str) -> None:
    test = pager_machine(policy, max_examples=200)("runTest")
    if match == "no fault":  # nothing is planned, so no report is given
        test.debug()
        return
    with pytest.raises((AssertionError, PolicyError)) as caught:
        test.debug()
    assert caught.match(f"(?s){match}")


def test_a_slow_plan_is_refused_with_its_time() -> None:
    with pytest.raises(
        AssertionError, match=r"30,\d+ operations took 0\.\d s of CPU time, and 0.1"
    ):
        run(broken.Slow, IN_TIME, max_plan_s=0.1)
    run(broken.Slow, IN_TIME)


@pytest.mark.parametrize("policy", [Fine, broken.NoPlan, broken.OnHost])
def test_a_policy_without_fault_passes(policy: type[Policy]) -> None:
    made = policy_contract(policy, max_examples=10)
    tests = [name for name in vars(made) if name.startswith("test")]
    assert (VICTIMS in tests) is (policy is Fine)
    assert (LEGAL in tests) is (policy is not Fine)
    assert {WATCHED, FRESH, SIMULATED} <= set(tests)
    for test in tests:
        getattr(made(), test)()


def test_the_calls_that_led_to_a_fault_are_shown_and_are_few() -> None:
    with pytest.raises(AssertionError) as caught:
        run(broken.TooFew, VICTIMS, max_examples=200)
    assert str(caught.value).splitlines()[1:] == [
        "    policy.on_insert(0)  # 512 B, OTHER",
        "    policy.choose_victims(Tier.DEVICE, 512, view)  # 512 B can leave -> []",
    ]


def test_a_class_inside_a_function_is_told_to_move() -> None:
    class Local(Fine):
        pass

    with pytest.raises(AssertionError, match="define it at the top of a module"):
        run(Local, FRESH)


@pytest.mark.parametrize("make", [policy_contract, pager_machine])
def test_what_is_no_policy_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="is no subclass of"):
        make(Fine())


def test_a_policy_that_decides_nothing_is_refused() -> None:
    class Idle(Policy):
        pass

    with pytest.raises(TypeError, match="Idle decides nothing"):
        policy_contract(Idle)


def test_an_author_needs_one_import_and_no_plugin_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tvm_pager.policies.lru import LRU\nclass Mine(LRU):\n    name = 'mine'\n"
    )
    (tmp_path / "test_mine.py").write_text(
        "from mine import Mine\n"
        "from tvm_pager.testing import pager_machine, policy_contract\n"
        "TestContract = policy_contract(Mine, max_examples=5)\n"
        "TestMachine = pager_machine(Mine, max_examples=5, num_steps=10)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "8 passed" in result.stdout, result.stdout + result.stderr


def test_without_hypothesis_the_remedy_is_named() -> None:
    program = (
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'hypothesis' else find(name, *rest)\n"
        "import tvm_pager.testing"
    )
    result = run_program(program)
    assert "ImportError: tvm_pager.testing needs Hypothesis" in result.stderr
    assert "pip install hypothesis" in result.stderr
