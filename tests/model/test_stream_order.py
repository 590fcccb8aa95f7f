"""Orders in which device memory leaves and returns before copies are done, each by its scenario.

The backend releases and uses device memory in stream order, as on CUDA: see [Note: Stream order] in
transfer/protocol.py. Every scenario runs for many seeds, which decide when each copy is done.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import pytest

from tests.model.rig import FRAME, NBYTES, NUM_SEEDS, Rig
from tvm_pager.errors import TransferError
from tvm_pager.memory import PageState, Tier
from tvm_pager.paging import DemandPager
from tvm_pager.planning import load_policy
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.ram_backend import RamBackend, RamMemory


def rigs(*, host: int = 16 * FRAME) -> Iterator[Rig]:
    for seed in range(1, 2 * NUM_SEEDS, 2):  # the odd ones are in stream order
        rig = Rig(seed, host=host)
        yield rig
        rig.check()
        rig.end()


def test_memory_that_left_before_its_copy_was_done_may_be_taken_at_once() -> None:
    """Scenario: 1. Evict dirty. 2. Another page takes the memory and writes it. 3. Fault."""
    num_leaving = 0
    for rig in rigs():
        page = rig.create()
        rig.evict()
        num_leaving += page.state is PageState.LEAVING
        rig.take_over()
        rig.read()
    assert num_leaving > NUM_SEEDS // 2


def test_a_page_that_dies_while_leaving_keeps_its_frames_until_the_copy_is_done() -> None:
    """Scenario: 1. Evict dirty. 2. The page dies. 3. Another page takes its frames."""
    for rig in rigs(host=2 * FRAME):
        rig.create()
        rig.evict()
        rig.free()
        rig.take_over()


def test_frames_that_a_fetch_still_reads_are_not_reused_after_a_write() -> None:
    """Scenario: 1. Fault. 2. Write before the copy is done. 3. Others take the frames it reads."""
    num_limbo = 0
    for rig in rigs(host=3 * FRAME):
        rig.create()
        rig.evict()
        rig.read()
        rig.write()
        num_limbo += bool(rig.pager.table.limbo)
        rig.take_over()
    assert num_limbo > NUM_SEEDS // 4


def test_frames_that_a_fetch_still_reads_are_not_reused_after_the_pages_death() -> None:
    """Scenario: 1. Fault. 2. The page dies before the copy is done. 3. Others take the frames."""
    num_limbo = 0
    for rig in rigs(host=3 * FRAME):
        rig.create()
        rig.evict()
        rig.read()
        rig.free()
        num_limbo += bool(rig.pager.table.limbo)
        rig.take_over()
    assert num_limbo > NUM_SEEDS // 4


def test_a_page_may_leave_clean_and_return_while_its_first_fetch_is_under_way() -> None:
    """Scenario: 1. Fault. 2. Clean eviction. 3. Fault. 4. Write. 5. Others take the frames."""
    for rig in rigs(host=3 * FRAME):
        rig.create()
        rig.evict()
        rig.read()
        rig.evict()
        rig.read()
        rig.write()
        rig.take_over()
        rig.evict()
        rig.read()


def test_a_page_on_its_way_down_is_fetched_behind_its_copy() -> None:
    """Scenario: 1. Evict dirty. 2. Fault before the copy is done. 3. Write. 4. Evict. 5. Fault."""
    num_turned = 0
    for rig in rigs():
        page = rig.create()
        rig.evict()
        is_leaving = page.state is PageState.LEAVING
        rig.fetch()
        num_turned += is_leaving and any(not t.is_over for t in page.readers)
        assert all(t.transfer.memory is None for t in page.readers), "it would never die"
        rig.read()
        rig.check()
        rig.write()
        rig.take_over()
        rig.evict()
        rig.read()
    assert num_turned > NUM_SEEDS // 4


def test_a_fetch_behind_a_copy_down_is_not_called_off() -> None:
    """The page would be off the device, and its frames would not hold its bytes yet."""
    num_refused = 0
    for rig in rigs():
        page = rig.create()
        rig.evict()
        rig.fetch()
        is_behind = any(not t.is_over for t in page.readers)
        if rig.pager.flight.cancel(page):
            assert all(t.is_over for t in page.readers)
            with contextlib.suppress(TransferError):
                rig.settle()
        else:
            num_refused += is_behind
        rig.take_over()
        rig.read()
    assert num_refused > NUM_SEEDS // 4


def test_frames_that_a_copy_down_still_fills_are_read_and_reused_behind_it() -> None:
    """Scenario: 1. Evict dirty. 2. Fault at once. 3. Clean eviction. 4. Demote, or die."""
    num_filling = 0
    for rig in rigs(host=3 * FRAME):
        page = rig.create()
        rig.evict()
        rig.read()
        rig.evict()
        num_filling += any(not t.is_over for t in page.readers)
        if rig.seed % 4 == 1:
            rig.demote()
            rig.read()
        else:
            rig.free()
        rig.take_over()
    assert num_filling > NUM_SEEDS // 8


def test_every_lane_of_a_page_is_waited_for() -> None:
    """Scenario: 1. Write-back to DRAM and NVMe at once. 2. Evict. 3. Others write. 4. Fault."""
    num_lanes = set()
    for seed in range(NUM_SEEDS):
        rig = Rig(seed, host=FRAME)  # the first segment; the second one goes to NVMe
        page = rig.create()
        rig.write_back()
        num_lanes.add(len(page.tickets))
        rig.pager.flight.settle(page)
        rig.evict()
        rig.take_over()
        rig.read()
        rig.check()
        rig.end()
    assert num_lanes == {2}


def test_a_write_to_nvme_is_waited_for_before_the_memory_leaves() -> None:
    """It can fail; and when it does, the page is on the device and unharmed."""
    for rig in rigs(host=0):
        page = rig.create()
        rig.backend.fail_next(lane=Lane.D2N, code=errno.EAGAIN)
        with pytest.raises(TransferError, match="as the test asked for"):
            rig.evict()
        assert page.is_on_device
        rig.read()


def test_a_prefetch_that_has_not_begun_is_called_off_and_its_bytes_are_free() -> None:
    """Scenario: 1. Prefetch. 2. A request needs the room. 3. Fault on the page all the same."""
    outcomes = set()
    for rig in rigs():
        page = rig.create()
        rig.pager.evict_all()
        rig.pager.admission.largest_need_bytes = 0
        assert rig.pager.prefetcher.start(page)
        for _ in range(rig.seed % 5):
            rig.backend.tick()
        outcomes.add(rig.pager.prefetcher.cancel())
        rig.take_over()
        rig.read()
    assert outcomes == {True, False}, "both must have been seen: called off, and too late for it"


def test_a_prefetch_never_takes_the_last_bytes_that_an_operation_needs() -> None:
    rig = Rig(1)
    page = rig.create()
    rig.pager.evict_all()
    rig.pager.admit([], 51 * 512, "the largest operation")
    assert not rig.pager.prefetcher.start(page)
    rig.pager.admission.largest_need_bytes = 0
    assert rig.pager.prefetcher.start(page)
    rig.read()


def chosen_ahead(write_behind_bytes: int) -> tuple[DemandPager, list[RamMemory]]:
    """Four pages on a device with room for them, and a policy that looks ahead."""
    backend = RamBackend(16 * FRAME, 0, max_delay=0)
    pager = DemandPager(
        backend,
        4 * NBYTES // 512 * 512,
        load_policy("lru"),
        segment_bytes=FRAME,
        strict=True,
        write_behind_bytes=write_behind_bytes,
    )
    memories = []
    for fill in range(3):
        pager.admit([], -(-NBYTES // 512) * 512, "create")
        memory = RamMemory()
        backend.allocate_device(memory, NBYTES)
        memory.data[:] = bytes([fill + 1]) * NBYTES
        pager.create(NBYTES, lambda memory=memory: memory)
        memories.append(memory)
    return pager, memories


def test_the_next_victims_are_clean_before_their_turn() -> None:
    pager, _ = chosen_ahead(2 * NBYTES)
    first, second, third = pager.table.pages.values()
    pager.admit([], NBYTES, "an operation")
    pager.flight.reap()
    assert not first.is_on_device
    assert second.is_on_device
    assert second.is_clean
    assert third.is_on_device
    pager.check_invariants()


def test_a_victim_that_was_used_since_it_was_chosen_is_passed_over() -> None:
    pager, _ = chosen_ahead(2 * NBYTES)
    first, second, third = pager.table.pages.values()
    pager.admit([], NBYTES, "an operation")
    pager.admit([second], 0, "its use")
    pager.device_policy.journal.append([second])
    pager.admit([], 4 * NBYTES - 2 * third.frame_bytes, "an operation")
    assert pager.table.tier_of(second) is Tier.DEVICE
    assert not first.is_on_device
    pager.check_invariants()
