"""A slab whose size follows a budget: whole regions come and go, and every byte is counted."""

from __future__ import annotations

import threading
import weakref
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.lane_steps import until
from tests.unit.locker import PATIENCE_S, RecordingLocker, Turnstile
from tvm_pager.errors import TransferError
from tvm_pager.transfer.slab import HostSlab

PAGE = 4096
REGION_BYTES = 4 * PAGE


def make_slab(num_pages: int, locker: RecordingLocker | None = None) -> HostSlab:
    return HostSlab(
        num_pages * PAGE,
        region_bytes=REGION_BYTES,
        page_lock=True,
        locker=locker or RecordingLocker(),
    )


def mappings(slab: HostSlab) -> list[weakref.ref[object]]:
    """By offset; what is dead is unmapped (its address may be somebody else's at once)."""
    return [weakref.ref(region.mapping) for slot in slab._slots for region in slot]


def test_a_grown_slab_maps_what_is_new_when_it_is_touched() -> None:
    with closing(make_slab(4)) as slab:
        slab.view(0, 4 * PAGE)
        with pytest.raises(AssertionError, match="leaves"):
            slab.view(4 * PAGE, 1)
        slab.grow_capacity(9 * PAGE + 4095)
        assert slab.capacity_bytes == 9 * PAGE
        assert slab.mapped_bytes == 4 * PAGE
        assert [len(view) for view in slab.view(3 * PAGE, 6 * PAGE)] == [PAGE, 4 * PAGE, PAGE]
        assert slab.mapped_bytes == slab.locked_bytes == 9 * PAGE


def test_a_partial_last_region_that_is_mapped_keeps_its_bytes_and_gets_a_neighbour() -> None:
    locker = RecordingLocker()
    with closing(make_slab(5, locker)) as slab:
        (part,) = slab.view(4 * PAGE, PAGE)
        part.fill_(7)
        slab.grow_capacity(7 * PAGE)
        slab.grow(7 * PAGE)
        slab.grow_capacity(12 * PAGE)
        views = slab.view(4 * PAGE, 8 * PAGE)
        # Each part is contiguous and lies in one registration.
        assert [len(view) for view in views] == [PAGE, 2 * PAGE, PAGE, 4 * PAGE]
        assert sorted(locker.locked.values()) == [PAGE, PAGE, 2 * PAGE, 4 * PAGE, 4 * PAGE]
        assert views[0].data_ptr() == part.data_ptr()
        assert bool((views[0] == 7).all())
        assert not any(bool(view.any()) for view in views[1:])
        assert slab.locked_bytes == locker.locked_bytes == 12 * PAGE
    assert not locker.locked


def test_a_partial_last_region_that_is_not_mapped_yet_grows_to_a_whole_one() -> None:
    locker = RecordingLocker()
    with closing(make_slab(5, locker)) as slab:
        slab.grow_capacity(8 * PAGE)
        assert [len(view) for view in slab.view(4 * PAGE, 4 * PAGE)] == [4 * PAGE]
        assert list(locker.locked.values()) == [4 * PAGE]


def test_shrinking_unlocks_and_unmaps_whole_regions_at_the_end() -> None:
    locker = RecordingLocker()
    with closing(make_slab(14, locker)) as slab:
        slab.grow(14 * PAGE)
        addresses = [at for at, _ in slab.addresses(0, 14 * PAGE)]
        before = mappings(slab)
        slab.view(0, PAGE)[0].fill_(3)
        slab.shrink_capacity(8 * PAGE)
        assert [mapping() is not None for mapping in before] == [True, True, False, False]
        assert set(locker.locked) == set(addresses[:2])
        assert slab.capacity_bytes == slab.mapped_bytes == slab.locked_bytes == 8 * PAGE
        assert bool((slab.view(0, PAGE)[0] == 3).all())
        with pytest.raises(AssertionError, match="leaves"):
            slab.view(8 * PAGE, 1)
        slab.grow_capacity(14 * PAGE)
        assert len(slab.view(0, 14 * PAGE)) == 4
        assert slab.mapped_bytes == 14 * PAGE


def test_shrinking_into_a_mapped_region_keeps_it_and_says_so() -> None:
    """Scenario: a budget of ten pages becomes one of six.

    1. The region of pages 4 to 8 lies across: it cannot be unlocked in part, and stays.
    2. So the promise needs a cut at its border, and what is allowed grows back in a smaller region.
    """
    locker = RecordingLocker()
    with closing(make_slab(10, locker)) as slab:
        slab.grow(10 * PAGE)
        assert slab.border_below(6 * PAGE + 1) == 4 * PAGE
        slab.shrink_capacity(6 * PAGE)
        assert (slab.capacity_bytes, slab.mapped_bytes) == (6 * PAGE, 8 * PAGE)
        assert slab.locked_bytes == locker.locked_bytes == 8 * PAGE
        slab.shrink_capacity(slab.border_below(6 * PAGE))
        slab.grow_capacity(6 * PAGE)
        slab.grow(6 * PAGE)
        assert slab.capacity_bytes == slab.mapped_bytes == locker.locked_bytes == 6 * PAGE
        assert slab.border_below(6 * PAGE) == 6 * PAGE


def test_a_border_is_only_where_something_is_mapped() -> None:
    with closing(make_slab(10)) as slab:
        assert slab.border_below(6 * PAGE) == 6 * PAGE
        assert slab.border_below(99 * PAGE) == 10 * PAGE
        assert slab.border_below(0) == 0


def test_views_of_a_region_that_was_cut_off_stay_readable() -> None:
    with closing(make_slab(8)) as slab:
        (view,) = slab.view(4 * PAGE, 16)
        view.fill_(5)
        (mapping,) = mappings(slab)
        slab.shrink_capacity(PAGE)
        assert view.tolist() == [5] * 16
        assert mapping() is not None
        del view
        assert mapping() is None


def test_shrinking_waits_for_a_region_that_is_being_mapped_beyond_the_cut() -> None:
    gate = Turnstile(2)
    locker = RecordingLocker(before=gate)
    with closing(make_slab(16, locker)) as slab:
        calls: list[tuple[int, int]] = []
        slab.build_in_background(16 * PAGE, lambda *numbers: calls.append(numbers))
        assert gate.arrived.wait(PATIENCE_S)
        shrinker = threading.Thread(target=slab.shrink_capacity, args=(8 * PAGE,))
        shrinker.start()
        until(lambda: slab.capacity_bytes == 8 * PAGE)
        shrinker.join(0.05)
        assert shrinker.is_alive()
        gate.opened.set()
        shrinker.join(PATIENCE_S)
        for thread in threading.enumerate():
            if thread.name == "tvm_pager-slab":
                thread.join(PATIENCE_S)
        assert slab.error is None
        assert locker.num_calls == 3, "what was cut off is not built any more"
        assert slab.mapped_bytes == slab.locked_bytes == locker.locked_bytes == 8 * PAGE
        assert calls[-1] == (8 * PAGE, 8 * PAGE)


def test_a_region_that_cannot_be_unlocked_is_an_error_and_the_others_are_unlocked() -> None:
    locker = RecordingLocker()
    slab = make_slab(12, locker)
    slab.grow(12 * PAGE)
    (bad, _), (good, _) = slab.addresses(4 * PAGE, 8 * PAGE)
    unlock = locker.unlock

    def refuse(address: int, nbytes: int) -> None:
        if address == bad:
            raise TransferError("stuck")
        unlock(address, nbytes)

    locker.unlock = refuse  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="stuck"):
        slab.shrink_capacity(4 * PAGE)
    assert good not in locker.locked
    assert slab.mapped_bytes == slab.capacity_bytes == 4 * PAGE
    slab.close()


@pytest.mark.parametrize("closes", [True, False])
def test_sizes_in_the_wrong_direction_and_closed_slabs_are_refused(closes: bool) -> None:
    slab = make_slab(4)
    if closes:
        slab.close()
    expected = TransferError if closes else ValueError
    for change, nbytes in (
        (slab.grow_capacity, 3 * PAGE),
        (slab.shrink_capacity, 5 * PAGE),
        (slab.shrink_capacity, -1),
    ):
        with pytest.raises(expected):
            change(nbytes)
    slab.close()


changes = st.lists(
    st.tuples(
        st.sampled_from(["grow", "shrink", "to the border", "touch", "build"]), st.integers(0, 15)
    ),
    max_size=25,
)


@given(changes)
@example([("touch", 4), ("grow", 6), ("touch", 5), ("grow", 8), ("touch", 7), ("shrink", 6)])
def test_bytes_survive_every_change_and_counts_are_exact(steps: list[tuple[str, int]]) -> None:
    """The model: a pattern per page, for as long as the page lies inside the capacity."""
    locker = RecordingLocker()
    slab, model, num_pages = make_slab(5, locker), dict[int, int](), 5
    for number, (step, page) in enumerate(steps):
        if step == "touch" and page < num_pages:
            slab.view(page * PAGE, PAGE)[0].fill_(number + 1)
            model[page] = number + 1
        elif step == "build":
            slab.grow(page * PAGE)
        elif step == "grow" and page >= num_pages:
            slab.grow_capacity(page * PAGE)
            num_pages = page
        elif step in ("shrink", "to the border") and page <= num_pages:
            if step == "to the border":
                border = slab.border_below(page * PAGE)
                assert border <= page * PAGE
                page = border // PAGE
            slab.shrink_capacity(page * PAGE)
            if step == "to the border":
                assert slab.mapped_bytes <= slab.capacity_bytes
            num_pages = page
        model = {page: pattern for page, pattern in model.items() if page < num_pages}
        assert slab.capacity_bytes == num_pages * PAGE
        assert slab.mapped_bytes == slab.locked_bytes == locker.locked_bytes
        assert slab.mapped_bytes < slab.capacity_bytes + REGION_BYTES
        for page, pattern in model.items():
            assert bool((slab.view(page * PAGE, PAGE)[0] == pattern).all())
    parts = slab.addresses(0, slab.capacity_bytes)
    assert sum(size for _, size in parts) == slab.capacity_bytes
    assert slab.ready_bytes(slab.capacity_bytes) == slab.capacity_bytes
    assert all(at + size <= after for (at, size), (after, _) in pairwise(sorted(parts)))
    slab.close()
    assert not locker.locked
    assert slab.mapped_bytes == 0
