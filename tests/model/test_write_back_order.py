"""Orderings of write-back, fetch, demotion, write, eviction and death, on a backend that is late.

Every scenario runs for many seeds of the backend, which decide when each half of each copy is done.
What is compared is the page's bytes, and those of the pages that took over its memory and frames.
"""

from __future__ import annotations

import errno
import itertools

import pytest

from tests.model.rig import FRAME, NUM_SEEDS, Rig, rigs
from tvm_pager.errors import TransferError
from tvm_pager.memory import Page, PageState, Tier
from tvm_pager.transfer.protocol import Lane

# --- write-back ---


@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_write_during_write_back_supersedes_the_copy(is_read_before: bool) -> None:
    """Scenario: 1. write-back starts. 2. The page is written. 3. The copy ends, stale. 4. Evict.

    Judged clean at 4, the page would come back with a mixture of old and new bytes.
    """
    num_in_flight = 0
    for rig in rigs():
        page = rig.create()
        rig.write_back()
        if is_read_before:
            rig.read()
        num_in_flight += page.state is PageState.WRITING_BACK
        rig.write()
        rig.evict()
        rig.read()
    assert num_in_flight > NUM_SEEDS // 4, "the ordering was hardly ever met"


def test_a_superseded_write_back_is_no_copy_for_the_clean_eviction_after_the_next_one() -> None:
    """Scenario: 1. write-back starts. 2. Write. 3. A second write-back ends. 4. Clean eviction."""
    for rig in rigs():
        page = rig.create()
        rig.write_back()
        rig.write()
        rig.settle()
        assert not page.is_clean
        rig.write_back()
        rig.take_over()  # of the frames that the first one gave up
        rig.settle()
        assert page.is_clean
        num_written = rig.backend.num_submitted[Lane.D2H]
        rig.evict()
        assert rig.backend.num_submitted[Lane.D2H] == num_written
        rig.read()


def test_an_eviction_waits_for_frames_that_a_fetch_is_about_to_free() -> None:
    """Scenario: 1. one page is being fetched, and has frames below too. 2. Another one must leave.

    No other frames are free. Where two pages were under way, reads failed for want of room.
    """
    num_in_flight = 0
    for rig in rigs(host=6 * FRAME, nvme=0):
        fetched = rig.create("fetched")
        rig.evict("fetched")
        page = rig.create()
        free = rig.pager.table.frames[Tier.HOST]
        taken = [rig.pager.table.allocate(Tier.HOST, FRAME) for _ in range(4)]
        assert free.free_bytes == 0
        rig.fetch("fetched")
        num_in_flight += fetched.state is PageState.FETCHING
        rig.evict()
        assert not page.is_on_device
        assert fetched.state is PageState.RESIDENT
        assert free.free_bytes == 0
        for frame in taken:
            free.free(frame)
        rig.read()
        rig.read("fetched")
    assert num_in_flight == NUM_SEEDS


def test_an_eviction_finds_room_in_a_slab_that_is_shrinking() -> None:
    """Scenario: 1. the slab shrinks, in one thread. 2. In another one a page must leave.

    Frames beyond the new end are free, and of no use; those before it hold redundant copies.
    """
    for rig in rigs(host=10 * FRAME, nvme=0):
        kept = rig.create("kept")
        rig.write_back("kept")
        rig.settle("kept")
        page = rig.create()
        assert kept.is_clean
        rig.pager.table.host_limit_bytes = 2 * FRAME
        rig.evict()
        rig.pager.table.host_limit_bytes = None
        assert not page.is_on_device
        assert _offsets_in_dram(page) <= {0, FRAME}
        rig.read()


@pytest.mark.parametrize("is_tried", [False, True])
def test_an_eviction_goes_beyond_a_limit_that_is_only_tried(is_tried: bool) -> None:
    """The slab shrinks to a region's border if all fits before it; others must not fail for it."""
    rig = Rig(0, host=10 * FRAME, nvme=0)
    page = rig.create()
    table = rig.pager.table
    table.host_limit_bytes, table.may_exceed_limit = FRAME, is_tried
    if is_tried:
        rig.evict()
    else:
        with pytest.raises(TransferError, match="no tier below"):
            rig.evict()
    assert page.is_on_device == (not is_tried)
    table.host_limit_bytes, table.may_exceed_limit = None, False
    rig.read()
    rig.end()


def _offsets_in_dram(page: Page) -> set[int]:
    return {extent.offset for segment in page.segments for extent in segment.host or ()}


def test_a_clean_eviction_right_after_a_write_back_waits_for_the_copy() -> None:
    """Scenario: 1. write-back starts. 2. A fault finds the page resident. 3. Evict, reuse."""
    for rig in rigs():
        rig.create()
        rig.write_back()
        rig.read()
        rig.evict()
        rig.take_over()
        rig.read()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_frames_of_a_page_that_dies_in_write_back_are_free_after_the_copy_only(tier: Tier) -> None:
    """Scenario: 1. write-back starts. 2. The page dies. 3. Another is written back and evicted."""
    for rig in rigs():
        rig.create()
        rig.write_back(to=tier)
        rig.free()
        rig.create("other")
        rig.write_back("other", to=tier)
        rig.check()
        rig.evict("other")
        rig.read("other")


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_a_page_whose_write_back_failed_is_written_again_before_it_leaves(tier: Tier) -> None:
    """Scenario: 1. write-back fails half done. 2. Evict. Its frames are no copy, and not lost."""
    for rig in rigs():
        page = rig.create()
        rig.backend.fail_next(lane=Lane.D2H if tier is Tier.HOST else Lane.D2N, code=errno.EAGAIN)
        rig.write_back(to=tier)
        with pytest.raises(TransferError):
            rig.settle()
        assert page.state is PageState.RESIDENT
        assert not page.has_copies
        rig.check()
        rig.evict(to=tier)
        rig.take_over()
        rig.read()


# --- fetch ---


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_frames_of_a_page_that_dies_while_it_is_fetched_are_free_after_the_copy_only(
    tier: Tier,
) -> None:
    """Scenario: 1. a prefetch starts. 2. The page dies. 3. Another takes memory and frames."""
    for rig in rigs():
        rig.create()
        rig.evict(to=tier)
        rig.fetch()
        rig.free()
        rig.create("other")
        rig.evict("other", to=tier)
        rig.check()
        rig.read("other")


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_a_fault_after_a_failed_fetch_reads_the_copies_that_are_still_below(tier: Tier) -> None:
    """Scenario: 1. a fetch fails half done. 2. Others take its device memory. 3. Fault."""
    for rig in rigs():
        page = rig.create()
        rig.evict(to=tier)
        rig.backend.fail_next(lane=Lane.H2D if tier is Tier.HOST else Lane.N2D, code=errno.EIO)
        rig.fetch()
        with pytest.raises(TransferError):
            rig.read()
        assert page.state is PageState.FAILED
        rig.check()
        rig.take_over()
        rig.read()
        rig.evict()  # clean: the copies below are still current
        rig.read()


# --- demotion ---


def test_a_fault_calls_a_demotion_off_or_waits_for_what_has_begun() -> None:
    """Scenario: 1. demotion starts. 2. Fault. 3. Others take the frames that became free."""
    where = set()
    for rig in rigs():
        page = rig.create()
        rig.evict()
        rig.demote()
        assert page.state is PageState.DEMOTING
        rig.read()
        where |= {segment.host is None for segment in page.segments}
        rig.take_over()
        rig.evict()
        rig.read()
    assert where == {True, False}, "both ways must have been seen"


def test_frames_of_a_page_that_dies_in_demotion_are_free_after_the_copy_only() -> None:
    """Scenario: 1. demotion starts. 2. The page dies. 3. Others take frames of both tiers."""
    for rig in rigs():
        rig.create()
        rig.evict()
        rig.demote()
        rig.free()
        for tier in (Tier.HOST, Tier.NVME):
            rig.create(tier.name)
            rig.write_back(tier.name, to=tier)
        rig.check()


def test_a_page_whose_demotion_failed_is_still_in_dram() -> None:
    """Scenario: 1. demotion fails half done. 2. Fetch. 3. Evict, demote again, fetch."""
    for rig in rigs():
        page = rig.create()
        rig.evict()
        rig.backend.fail_next(lane=Lane.H2N, code=errno.EAGAIN)
        rig.demote()
        with pytest.raises(TransferError):
            rig.settle()
        assert page.state is PageState.EVICTED
        rig.check()
        rig.take_over()
        rig.read()
        rig.evict()
        rig.demote()
        rig.settle()
        rig.take_over()
        rig.read()
        assert all(segment.host is None for segment in page.segments)


# --- two pages ---


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_two_pages_that_take_each_others_frames_in_turn_keep_their_bytes(tier: Tier) -> None:
    """Scenario: 1. one is written, which frees its frames. 2. The other's write-back takes them.

    At each turn one write-back is still on its way when its page is written.
    """
    shared: set[int] = set()
    for rig in rigs(NUM_SEEDS // 2):
        frames: dict[str, set[int]] = {"first": set(), "second": set()}
        for name in frames:
            rig.create(name)
        for turn in range(6):
            one, other = ("first", "second")[:: -1 if turn % 2 else 1]
            rig.write(one)
            rig.write(other)
            rig.evict(one, to=tier)
            for segment in rig.pages[one].segments:
                below = segment.host if tier is Tier.HOST else segment.nvme
                frames[one] |= {extent.offset for extent in below or ()}
            rig.write_back(other, to=tier)
            rig.read(one)
            rig.check()
        shared |= frames["first"] & frames["second"]
    assert shared, "no frame was ever shared"


# --- every order ---

STEPS = ("read", "write", "evict", "free")
STARTS: dict[str, tuple[str, ...]] = {
    "write_back": ("write_back",),
    "fetch": ("evict", "fetch"),
    "demote": ("evict", "demote"),
}
ORDERS = [
    order
    for num in range(1, len(STEPS) + 1)
    for order in itertools.permutations(STEPS, num)
    if "free" not in order[:-1]  # nothing can be asked of a page that is dead
]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_bytes_survive_every_order_of_steps_after(start: str, order: tuple[str, ...]) -> None:
    """A copy is in flight when the first step comes; others take over what each step frees."""
    num_seeds = NUM_SEEDS // 5
    num_in_flight = 0
    for rig in rigs(num_seeds):
        rig.create()
        for step in STARTS[start]:
            getattr(rig, step)()
        num_in_flight += bool(rig.backend.pending)
        for step in order:
            getattr(rig, step)()
            if step in ("evict", "free"):
                rig.take_over()
            rig.check()
        if "page" in rig.pages:
            rig.read()
    assert num_in_flight > num_seeds * 0.9, "the ordering was hardly ever met"
