"""Orderings of write-back, write, fault and free on a backend that is late on purpose."""

from __future__ import annotations

import pytest

from tvm_pager.memory import PageState
from tvm_pager.paging import DemandPager
from tvm_pager.planning import load_policy
from tvm_pager.transfer.ram_backend import RamBackend, RamMemory

NUM_SEEDS = 100


def open_page(seed: int) -> tuple[DemandPager, RamMemory]:
    backend = RamBackend(16 * 4096, 0, seed=seed, max_delay=6)
    pager = DemandPager(backend, 40 * 512, load_policy("lru"), segment_bytes=4096, strict=True)
    memory = RamMemory()
    backend.allocate_device(memory, 3000)
    memory.data[:] = b"a" * 3000
    return pager, memory


@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_write_during_write_back_supersedes_the_copy(is_read_before: bool) -> None:
    """Scenario: 1. write-back starts. 2. The page is written. 3. The copy ends, stale. 4. Evict.

    Judged clean at 4, the page would come back with a mixture of old and new bytes.
    """
    num_in_flight = 0
    for seed in range(NUM_SEEDS):
        pager, memory = open_page(seed)
        page = pager.create(3000, lambda memory=memory: memory)  # type: ignore[misc]
        pager.mover.start_write_back(page)
        if is_read_before:
            pager.admit([page], 0, "read")
        num_in_flight += page.state is PageState.WRITING_BACK
        pager.written(page)
        memory.data[:] = b"b" * 3000
        pager.evict_all()
        pager.admit([page], 0, "read")
        assert bytes(memory.data) == b"b" * 3000, f"seed {seed}"
        pager.check_invariants()
        pager.close()
    assert num_in_flight > NUM_SEEDS // 4, "the ordering was hardly ever met"


def test_a_clean_eviction_right_after_a_write_back_waits_for_the_copy() -> None:
    """Scenario: 1. write-back starts. 2. A fault finds the page resident. 3. Evict, reuse."""
    for seed in range(NUM_SEEDS):
        pager, memory = open_page(seed)
        page = pager.create(3000, lambda memory=memory: memory)  # type: ignore[misc]
        pager.mover.start_write_back(page)
        pager.admit([page], 0, "read")
        pager.evict_all()
        other = RamMemory()
        pager.backend.allocate_device(other, 3000)  # takes the block that was released
        other.data[:] = b"z" * 3000
        pager.admit([page], 0, "read")
        assert bytes(memory.data) == b"a" * 3000, f"seed {seed}"
        pager.close()
