"""Runs the rules of the kit; `HYPOTHESIS_PROFILE=nightly` runs 2,000 examples of 200 steps."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tvm_pager.planning import load_policy
from tvm_pager.testing import pager_machine
from tvm_pager.testing.machine import PagerMachine


class Machine(PagerMachine):
    policies = (load_policy("lru"), load_policy("clock"))


def test_the_pager_gives_back_the_last_bytes_written_whatever_the_backend_does() -> None:
    run_state_machine_as_test(Machine, settings=settings())


TestLookahead = pager_machine(load_policy("lookahead"))
