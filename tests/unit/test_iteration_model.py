"""The iteration-time model: its regimes by hand, and that its search finds the minimum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pager.planning.cost.iteration_model import (
    IterationRates,
    IterationWork,
    SwapCandidate,
    by_benefit,
    choose_swaps,
    iteration_time,
)

LAYERS = [SwapCandidate(key, 100, 1.0) for key in range(10)]


def work(**changes: float) -> IterationWork:
    values = {"forward_s": 10.0, "backward_s": 20.0, "update_s": 1.0}
    values |= {"weight_bytes": 0, "grad_bytes": 0, **changes}
    return IterationWork(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "rates", "num_swapped", "seconds"),
    [
        # The link has time to spare: everything is swapped, nothing is computed again.
        ({}, IterationRates(1000.0, 1000.0), 10, 30.0),
        # The link moves 50 B/s: five layers hide behind forward, each more costs 2 s and saves 1 s.
        ({}, IterationRates(50.0, 1000.0), 5, 35.0),
        # The disk is busy for 60 s in backward: replays are hidden, so nothing is swapped.
        ({"disk_state_bytes": 300}, IterationRates(1e3, 1e3, 10.0, 10.0), 0, 70.0),
        # Host memory holds three layers; the disk takes 2 s out and 1 s in for each more.
        (
            {"free_host_bytes": 300, "forward_s": 0.0},
            IterationRates(1e9, 1e9, 100.0, 50.0),
            3,
            27.0,
        ),
    ],
    ids=["all", "link", "disk", "host memory"],
)
def test_regimes(
    changes: dict[str, float], rates: IterationRates, num_swapped: int, seconds: float
) -> None:
    choice = choose_swaps(work(**changes), rates, LAYERS)
    assert len(choice.swapped) == num_swapped
    assert choice.time.seconds == pytest.approx(seconds)
    assert choice.replay_s == 10 - num_swapped


def test_the_ends_of_the_pipeline_overlap_with_nothing() -> None:
    parted = work(disk_state_bytes=100, num_groups=10.0)
    time = iteration_time(parted, IterationRates(1e9, 1e9, 50.0, 25.0), 0, 0.0)
    assert time.backward["compute"] == pytest.approx(20 + (1 + 4) / 10)
    assert time.backward["disk"] == pytest.approx(2 + 4 + 1 / 10)
    assert time.backward["update"] == pytest.approx(1 + 20 / 10)


def test_layers_that_save_most_per_byte_come_first() -> None:
    found = by_benefit(
        [SwapCandidate(1, 10, 1.0), SwapCandidate(2, 0, 1.0), SwapCandidate(3, 5, 2)]
    )
    assert [candidate.key for candidate in found] == [2, 3, 1]


POSITIVE = st.integers(1, 50)
RATES = st.builds(
    IterationRates, d2h=POSITIVE, h2d=POSITIVE, disk_read=POSITIVE, disk_write=POSITIVE
)
SIZES = st.integers(0, 1000)
WORKS = st.builds(
    IterationWork,
    forward_s=SIZES,
    backward_s=SIZES,
    update_s=SIZES,
    weight_bytes=SIZES,
    grad_bytes=SIZES,
    disk_weight_bytes=SIZES,
    disk_state_bytes=SIZES,
    kept_swap_bytes=SIZES,
    free_host_bytes=st.integers(0, 3000),
    num_groups=st.sampled_from([1, 3, math.inf]),
)
CANDIDATES = st.lists(st.tuples(SIZES, st.integers(0, 30)), max_size=12).map(
    lambda pairs: [SwapCandidate(key, *pair) for key, pair in enumerate(pairs)]
)


@given(WORKS, RATES, CANDIDATES)
def test_stopping_at_the_first_increase_finds_the_best_prefix(
    work: IterationWork, rates: IterationRates, candidates: list[SwapCandidate]
) -> None:
    ranked = by_benefit(candidates)
    times = []
    for taken in range(len(ranked) + 1):
        swap_bytes = work.kept_swap_bytes + sum(c.nbytes for c in ranked[:taken])
        replay_s = sum(c.replay_s for c in ranked[taken:])
        times.append(iteration_time(work, rates, swap_bytes, replay_s).seconds)
    choice = choose_swaps(work, rates, candidates)
    assert choice.time.seconds == pytest.approx(min(times))
    assert choice.swapped == tuple(c.key for c in ranked[: len(choice.swapped)])
