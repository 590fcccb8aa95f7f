"""The rule machine for any policy: one that plans gets a program whose iterations are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tvm_pager.errors import BudgetError, CommitError, TransferError
from tvm_pager.memory import Page, PageKind
from tvm_pager.planning import Policy
from tvm_pager.testing.machine import PagerMachine
from tvm_pager.testing.machines import example_profile

if TYPE_CHECKING:
    import unittest

__all__ = ["ProgramMachine", "pager_machine"]

_NBYTES: Final = 1500  # of each page of the program: three units of 512
_NUM_LAYERS: Final = 4


class _Op(NamedTuple):
    """One operation on pages that have names."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    creates: str = ""
    frees: tuple[str, ...] = ()


def _program() -> list[_Op]:
    layers = range(_NUM_LAYERS)
    ops = [_Op("input", (), creates="a0")]
    ops += [_Op("forward", (f"w{i}", f"a{i}"), creates=f"a{i + 1}") for i in layers]
    last = f"a{_NUM_LAYERS}"
    ops.append(_Op("loss", (last,), creates=f"d{_NUM_LAYERS}", frees=(last,)))
    for i in reversed(layers):
        reads = (f"w{i}", f"a{i}", f"d{i + 1}")
        ops.append(_Op("backward", reads, creates=f"d{i}", frees=(f"a{i}", f"d{i + 1}")))
        ops.append(_Op("update", (f"w{i}",), (f"w{i}",), frees=("d0",) if not i else ()))
    return ops


class ProgramMachine(PagerMachine):
    """More rules: an iteration of a small training program. It is recorded, planned and followed.

    What the other rules do in between makes iterations that are not like the recorded one.
    """

    hardware = example_profile()

    def _open_program(self) -> None:
        self._ops = _program()
        self._named: dict[str, Page] = {}

    @rule(num_left_out=st.sampled_from([0, 0, 0, 1]), num=st.integers(1, 3))
    def iterate(self, num_left_out: int, num: int) -> None:
        """Runs whole iterations, or all but an operation of them."""
        if not hasattr(self, "_ops"):
            self._open_program()
        for _ in range(num):
            for op in self._ops[num_left_out:]:
                self._run(op)
            with self.pager.lock:
                self.pager.iterations.pass_boundary()
            if self.pager.iterations.is_planned:
                event("a plan is followed")
            self.books_are_right()

    def _run(self, op: _Op) -> None:
        """As an operation under dispatch; one that is refused is skipped."""
        pager = self.pager
        for name in op.reads:
            if name.startswith("w") and name not in self._named:
                self._make_weight(name)
        pages = [self._named[name] for name in op.reads if name in self._named]
        written = [self._named[name] for name in op.writes if name in self._named]
        try:
            with pager.lock:
                pager.drain()
                entry = pager.iterations.enter(op.name, pages, written)
                pager.admit(pages, (-(-_NBYTES // 512) * 512) if op.creates else 0, op.name)
                for page in pages:
                    self._check(page)
                for page in written:
                    pager.written(page)
                    self._store(page)
                pager.device_policy.journal.append(pages)
                if op.creates:
                    self._free(op.creates)
                    self._named[op.creates] = self._born(_NBYTES, PageKind.ACTIVATION)
                pager.device_policy.trim()
                if entry is not None:
                    entry.compute_ns = 1000
        except (BudgetError, TransferError, CommitError) as error:
            event(f"{op.name} refused: {type(error).__name__}")
        for name in op.frees:
            self._free(name)

    def _make_weight(self, name: str) -> None:
        if self._has_room(_NBYTES):
            self._named[name] = self._born(_NBYTES, PageKind.PARAM)

    def _free(self, name: str) -> None:
        page = self._named.pop(name, None)
        if page is not None:
            self._die(page)


def pager_machine(
    policy: type[Policy], *, max_examples: int | None = None, num_steps: int | None = None
) -> type[unittest.TestCase]:
    """Makes a test of a policy in a pager whose copies are late, out of order, and fail.

    Every operation's bytes are compared, all invariants are checked after each step, and a decision
    that is not legal is an error.

    Args:
        policy: made without arguments, once for each tier and example.
        max_examples: random runs; None: as many as Hypothesis's profile says.
        num_steps: of each, at most; None: as above.

    Returns:
        A `unittest.TestCase`, which pytest runs too.

    Raises:
        TypeError: it is no policy.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise TypeError(f"{policy!r} is no subclass of tvm_pager.planning.Policy")
    plans = policy.plan is not Policy.plan
    base = ProgramMachine if plans else PagerMachine
    machine: Any = type(f"{policy.__name__}Machine", (base,), {"policies": (policy,)})
    given: dict[str, Any] = {"max_examples": max_examples, "stateful_step_count": num_steps}
    test: type[unittest.TestCase] = machine.TestCase
    test.settings = settings(  # type: ignore[attr-defined]  # Hypothesis's
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **{name: value for name, value in given.items() if value is not None},
    )
    return test
