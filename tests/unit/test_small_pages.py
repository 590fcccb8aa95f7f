"""Small pages stay in the slab while larger ones make room; see [Note: Small pages]."""

from __future__ import annotations

import pytest

from tests.model.programs import FRAME, Rig
from tvm_pager.memory import PageState
from tvm_pager.paging import host_room, view
from tvm_pager.transfer.protocol import Lane

LARGE, SMALL = 4 * FRAME, 256


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of tests are small; here those up to a kilobyte are."""
    monkeypatch.setattr(view, "_SMALL_BYTES", 1024)


def filled(num_small: int, num_large: int, host: int) -> Rig:
    """A rig whose pages, small ones first, were pushed off the device one after the other."""
    rig = Rig(device=2 * LARGE, host=host * FRAME, nvme=256 * FRAME, max_delay=0)
    names = [f"s{i}" for i in range(num_small)] + [f"l{i}" for i in range(num_large)]
    for name in names:
        nbytes = SMALL if name[0] == "s" else LARGE
        with rig.pager.lock:
            rig.pager.admit([], nbytes, "create")
        rig.create(name, nbytes)
    rig.pager.evict_all()
    return rig


def on_disk(rig: Rig, kind: str) -> int:
    """How many evicted pages of a kind have bytes on NVMe."""
    return sum(
        name[0] == kind and page.state is PageState.EVICTED and page.segments[0].nvme is not None
        for name, page in rig.pages.items()
    )


def test_larger_pages_go_to_the_disk_although_small_ones_were_used_earlier() -> None:
    rig = filled(num_small=4, num_large=30, host=4 * 16)
    assert on_disk(rig, "l") > 10
    assert on_disk(rig, "s") == 0
    rig.end()


def test_small_pages_go_where_nothing_else_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_room, "_SMALL_PART", 1)
    rig = filled(num_small=40, num_large=2, host=16)
    assert on_disk(rig, "s") > 10
    # From the slab, in the order of their use: not those that leave the device last, past it.
    assert rig.backend.bytes_by_lane[Lane.H2N] >= 10 * SMALL
    rig.end()


@pytest.mark.parametrize("limit", ["_SMALL_PART", "_MOST_SMALL"])
def test_small_pages_that_are_many_go_as_any_other(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_room, "_COUNT_EVERY", 1)
    if limit == "_MOST_SMALL":
        monkeypatch.setattr(host_room, "_SMALL_PART", 1)
        monkeypatch.setattr(host_room, limit, 5)
    rig = filled(num_small=12, num_large=30, host=4 * 16)
    assert on_disk(rig, "s") > 0
    rig.end()
