"""Random tensor programs under a budget of a few tensors give the bits that plain torch gives."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

import tvm_pager
from tests.parity.harness import Result, check_nothing_left, differences, pager_options
from tests.parity.random_machine import OPERATIONS, Instruction, execute

pytestmark = pytest.mark.timeout(100)  # two tiers that wait for each other fail soon

DEVICE_BYTES = 40 << 10  # all operands of one instruction fit, the pool does not
STAGING_BYTES = 256 << 10

indices = st.integers(0, 23)
instructions = st.tuples(st.sampled_from(list(OPERATIONS)), indices, indices, indices)
programs = st.lists(instructions, min_size=1, max_size=40)

EVERYTHING: list[Instruction] = [
    (name, seed, seed + 5, seed + 2)
    for seed in range(0, 12, 2)
    for name in OPERATIONS
    if name != "drop"
]


def run_both(
    program: list[Instruction], policy: str, nvme: bool, evict_each: bool, check: int
) -> object:
    """Runs a program plain and paged, compares, and returns the pager's statistics."""
    plain = execute(program, lambda: None, evict_each)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        host_bytes = STAGING_BYTES + (4 << 10 if nvme else 8 << 20)
        options = pager_options(
            directory,
            device_bytes=DEVICE_BYTES,
            host_bytes=host_bytes,
            nvme=nvme,
            policy=policy,
            check=check,
        )
        with tvm_pager.Pager(**options) as pager:
            paged = execute(program, pager.evict_all, evict_each)
            gc.collect()
            pager.check_invariants()
            stats = pager.stats()
        check_nothing_left(directory)
    found = differences(Result(outputs=plain), Result(outputs=paged))
    assert not found, "\n".join(found[:10])
    assert stats.device_peak_bytes <= DEVICE_BYTES, f"device over budget:\n{stats}"
    assert stats.host_peak_bytes <= host_bytes, f"host over budget:\n{stats}"
    return stats


@given(
    program=programs,
    policy=st.sampled_from(["lru", "clock"]),
    nvme=st.booleans(),
    evict_each=st.booleans(),
    check=st.sampled_from([0, 2]),  # without checks: the fast path, also for what has just moved
)
@example(program=EVERYTHING, policy="lru", nvme=True, evict_each=False, check=2)
@example(program=EVERYTHING, policy="clock", nvme=False, evict_each=True, check=2)
@example(program=EVERYTHING, policy="lru", nvme=True, evict_each=True, check=0)
@settings(max_examples=max(settings().max_examples // 2, 10))
def test_random_program_matches_plain_torch(
    program: list[Instruction], policy: str, nvme: bool, evict_each: bool, check: int
) -> None:
    stats = run_both(program, policy, nvme, evict_each, check)
    event(f"evicted: {stats.num_evictions > 0}")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_a_program_of_every_operation_pages(seed: int, nvme: bool) -> None:
    shift = len(EVERYTHING) // 4 * seed
    program = EVERYTHING[shift:] + EVERYTHING[:shift]
    stats = run_both(program, "lru", nvme, evict_each=False, check=2 * (seed % 2))
    assert stats.num_faults > 0
    lanes = stats.bytes_by_lane
    assert (lanes.get("h2n", 0) + lanes.get("d2n", 0) > 0) == nvme
