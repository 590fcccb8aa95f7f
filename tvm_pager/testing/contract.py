"""What every policy owes, as a class of tests.

`TestMine = policy_contract(Mine)` in a test file is all. A failure shows the smallest example that
Hypothesis finds, and the calls that led to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings

from tvm_pager.memory import PageKind, Tier
from tvm_pager.planning import IterationReport, Limits, Policy
from tvm_pager.simulation.simulator import SimulationOptions, simulate
from tvm_pager.testing.demand import (
    Access,
    Ask,
    DemandRun,
    History,
    Insert,
    PolicyFaultError,
    Remove,
    histories,
)
from tvm_pager.testing.plan_checks import (
    HARDWARE,
    PlanCase,
    check_plan,
    fed_back,
    plan_cases,
    planned,
    reports,
    timed_plan,
)
from tvm_pager.testing.purity import fresh_runs, watching
from tvm_pager.testing.training import training_trace

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["policy_contract"]

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
_NUM_LAYERS = 106  # of the large trace: 30,000 operations
_CASE = PlanCase(training_trace(4), Limits(12 << 20, 1 << 30, 1 << 30))
# Pages of all kinds come, are used and leave.
_HISTORY = History(
    Tier.DEVICE,
    True,
    (
        *(Insert(512 * (1 + n % 4), kind, False) for n, kind in enumerate([*PageKind] * 4)),
        *(Access(place) for place in range(0, 28, 3)),
        *(Ask(512 * need, frozenset({need})) for need in range(1, 12)),
        Remove(0),
        Ask(1 << 40),
    ),
)


def policy_contract(
    policy: type[Policy], *, max_examples: int | None = None, max_plan_s: float = 2.0
) -> type:
    """Makes a class of tests for pytest, of what the policy overrides.

    Args:
        policy: to be tested; it is made without arguments, once for each tier and example.
        max_examples: random examples of each test; None: as many as Hypothesis's profile says.
        max_plan_s: CPU time that a plan for 30,000 operations may take.

    Returns:
        A class to be bound to a name that begins with `Test`.

    Raises:
        TypeError: it is no policy, or decides nothing.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise TypeError(f"{policy!r} is no subclass of tvm_pager.planning.Policy")
    chooses = policy.choose_victims is not Policy.choose_victims
    plans = policy.plan is not Policy.plan
    if not chooses and not plans:
        raise TypeError(
            f"{policy.__name__} decides nothing: override choose_victims, or plan, or both"
        )
    contract = _Contract(policy, max_examples, max_plan_s)
    tests = contract.pure()
    if chooses:
        tests |= contract.on_demand()
    if plans:
        tests |= contract.by_plan()
    if policy.feedback is not Policy.feedback:
        tests |= contract.with_feedback()
    tests["__doc__"] = f"What {policy.__name__} owes as a policy."
    return type(f"Test{policy.__name__}", (), tests)


class _Contract:
    """The tests of one policy, as functions by name."""

    def __init__(self, policy: type[Policy], max_examples: int | None, max_plan_s: float) -> None:
        self.policy = policy
        self.name = policy.name or policy.__name__
        self._max_plan_s = max_plan_s
        number: dict[str, Any] = {} if max_examples is None else {"max_examples": max_examples}
        self._settings = settings(deadline=None, suppress_health_check=_QUIET, **number)

    def on_demand(self) -> dict[str, Any]:
        """Of `on_insert`, `on_access`, `on_remove` and `choose_victims`."""
        return {
            "test_its_victims_are_legal_and_enough_and_it_never_raises": self._over_histories(
                self._victims
            ),
            "test_its_choice_is_the_same_every_time": self._over_histories(self._same_choice),
            "test_none_leaves_it_unchanged": self._over_histories(self._none_changes_nothing),
            "test_it_keeps_no_view": self._over_histories(self._keeps_no_view),
        }

    def by_plan(self) -> dict[str, Any]:
        """Of `plan`."""

        @self._settings
        @given(case=plan_cases())
        def test_legal(self_: Any, case: PlanCase) -> None:
            policy = self.policy()
            plan = planned(policy, case)
            if plan is not None:
                check_plan(policy, case, plan)

        @self._settings
        @given(case=plan_cases(is_roomy=False))
        def test_same(self_: Any, case: PlanCase) -> None:
            first, second = planned(self.policy(), case), planned(self.policy(), case)
            self._expect(first == second, f"plans differ:\n    {first}\n    {second}")

        def test_time(self_: Any) -> None:
            took_s, num_ops = timed_plan(self.policy, _NUM_LAYERS, self._max_plan_s)
            self._expect(
                took_s <= self._max_plan_s,
                f"planning {num_ops:,} operations took {took_s:.1f} s of CPU time, and "
                f"{self._max_plan_s:.1f} s are allowed",
            )

        return {
            "test_its_plans_are_legal_and_keep_to_the_budget": test_legal,
            "test_it_plans_any_trace_the_same_every_time": test_same,
            "test_a_large_trace_is_planned_in_time": test_time,
        }

    def with_feedback(self) -> dict[str, Any]:
        """Of `feedback`."""

        @self._settings
        @given(report=reports())
        def test_feedback(self_: Any, report: IterationReport) -> None:
            case = PlanCase(report.trace, report.limits)
            answers = []
            for _ in range(2):
                policy = self.policy()
                planned(policy, case)
                answers.append(fed_back(policy, report))
            self._expect(answers[0] == answers[1], f"answers to {report} differ: {answers}")

        return {"test_it_takes_any_feedback_the_same_every_time": test_feedback}

    def pure(self) -> dict[str, Any]:
        """Of everything that it overrides."""

        def test_watched(self_: Any) -> None:
            self._go_through()  # imports what it imports late
            with watching() as seen:
                self._go_through()
            self._expect(not seen, "it " + "\n    ".join(dict.fromkeys(seen)))

        def test_fresh(self_: Any) -> None:
            first, second = fresh_runs(self.policy)
            self._expect(
                not first["heavy"], f"importing or using it imports {', '.join(first['heavy'])}"
            )
            for what in ("victims", "plan"):
                self._expect(
                    first[what] == second[what],
                    f"its {what} depend on the interpreter (PYTHONHASHSEED, ids or unseeded "
                    f"randomness):\n    {first[what]}\n    {second[what]}",
                )

        def test_simulated(self_: Any) -> None:
            simulate(_CASE.trace, HARDWARE, _CASE.limits, SimulationOptions(policy=self.policy))

        return {
            "test_it_reads_no_clock_and_does_no_io": test_watched,
            "test_it_imports_no_torch_and_decides_alike_in_every_interpreter": test_fresh,
            "test_it_runs_in_the_simulator": test_simulated,
        }

    # --- on demand -------------------------------------------------------------------------------

    def _over_histories(self, look: Callable[[History], None]) -> Callable[..., None]:
        @self._settings
        @given(history=histories())
        def test(self_: Any, history: History) -> None:
            look(history)

        return test

    def _victims(self, history: History) -> None:
        DemandRun(self.policy(), history).run()

    def _same_choice(self, history: History) -> None:
        first, second = self._decisions(history), self._decisions(history)
        if first is not None and second is not None:
            self._expect(
                first.decisions == second.decisions,
                f"told the same, it chose {first.decisions} and {second.decisions}:"
                f"\n{first.calls()}",
            )

    def _none_changes_nothing(self, history: History) -> None:
        asked, spared = self._decisions(history), self._decisions(history, asks_in_vain=False)
        if asked is not None and spared is not None:
            self._expect(
                asked.decisions == spared.decisions,
                "where choose_victims gave None, it has changed its state: without these calls it "
                f"chooses {spared.decisions}, with them {asked.decisions}:\n{asked.calls()}",
            )

    def _keeps_no_view(self, history: History) -> None:
        run = self._decisions(history)
        if run is not None and run.kept_view():
            self._expect(False, "it holds the View after the call that it was passed to")

    def _decisions(self, history: History, *, asks_in_vain: bool = True) -> DemandRun | None:
        """None where it breaks another rule, which is another test's matter."""
        run = DemandRun(self.policy(), history, asks_in_vain=asks_in_vain)
        try:
            run.run()
        except PolicyFaultError:
            return None
        return run

    # --- everything ------------------------------------------------------------------------------

    def _go_through(self) -> None:
        """Calls every hook that the policy overrides."""
        policy = self.policy()
        if self.policy.choose_victims is not Policy.choose_victims:
            DemandRun(policy, _HISTORY).run()
        if self.policy.plan is not Policy.plan:
            planned(policy, _CASE)
        if self.policy.feedback is not Policy.feedback:
            fed_back(policy, IterationReport(*_CASE, True, 10**9, 10**8, 3, (1,), (2,)))

    def _expect(self, is_right: bool, what: str) -> None:
        if not is_right:
            raise PolicyFaultError(f"policy {self.name}: {what}")
