"""Runs the rules of machine.py; `HYPOTHESIS_PROFILE=nightly` runs 2,000 examples of 200 steps."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import PagerMachine


def test_the_pager_gives_back_the_last_bytes_written_whatever_the_backend_does() -> None:
    run_state_machine_as_test(PagerMachine, settings=settings())
