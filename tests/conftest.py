"""Profiles, markers and the leak check that every test runs under."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.leaks import pager_files, pager_threads

NIGHTLY_TIMEOUT_S = 3 * 3600.0  # twenty times as many examples, four times as long
LEAK_PATIENCE_S = 5.0  # threads and files end a little after the call that ends them


def _register_profiles() -> str:
    # No deadlines: two shared cores make any per-example limit a source of false alarms.
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    shared = {"deadline": None, "suppress_health_check": quiet, "print_blob": True}
    settings.register_profile("default", max_examples=50, stateful_step_count=50, **shared)
    settings.register_profile("ci", max_examples=100, stateful_step_count=75, **shared)
    settings.register_profile("nightly", max_examples=2000, stateful_step_count=200, **shared)
    profile = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
    settings.load_profile(profile)
    return profile


PROFILE = _register_profiles()


def pytest_configure() -> None:
    torch.set_num_threads(1)  # bitwise comparisons, and no fight for the cores
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script that starts the tests in the background has them ignore it, and all that they
        # start; the tests of interrupts would wait for nothing.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one beside a GPU, whose memory and links tests measure; else two at most.

    Each has threads of its own, for transfers, and no more than two cores are asked for.
    """
    return 1 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)


def pytest_report_header() -> str:
    return f"tvm_pager: hypothesis profile {PROFILE}, CUDA devices {torch.cuda.device_count()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_cuda = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("nightly") and PROFILE != "nightly":
            item.add_marker(pytest.mark.skip(reason="needs HYPOTHESIS_PROFILE=nightly"))
        # A module's own limit is for the usual number of examples.
        if PROFILE == "nightly" and all(marker.name != "timeout" for marker in item.own_markers):
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_S))


@pytest.fixture(autouse=True)
def no_stacks_of_long_tests() -> None:
    """Nightly tests are long: pytest's look at the stacks of running threads can crash Python."""
    if PROFILE == "nightly":
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Fails a test that leaves a pager thread running or a pager file open behind it.

    What was there before the test (a pager that a wider fixture holds) is not its fault.
    """
    threads_before, files_before = set(pager_threads()), set(pager_files())
    yield

    def leaks() -> list[str]:
        return [
            *(f"thread {t.name}" for t in pager_threads() if t not in threads_before),
            *(f"file {name} (descriptor {fd})" for fd, name in pager_files() - files_before),
        ]

    left = leaks()
    deadline = time.monotonic() + LEAK_PATIENCE_S
    while left and time.monotonic() < deadline:
        gc.collect()  # a failed test's traceback, or a cycle, may hold the owner for a moment
        time.sleep(0.02)
        left = leaks()
    if left:
        pytest.fail(f"left behind: {', '.join(left)}", pytrace=False)
