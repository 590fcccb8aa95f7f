"""Free slots of a lane against a calendar of single time units."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tvm_pager.planning.hardware.busy_lane import BusyLane

SLOTS = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 6)), max_size=12)


@given(SLOTS)
def test_slots_are_free_and_the_nearest(slots: list[tuple[bool, int, int]]) -> None:
    lane, busy = BusyLane(), set[int]()
    for is_latest, at, length in slots:
        if is_latest:
            found = lane.latest(at, length)
            wanted = next(
                t for t in range(at - length, -100, -1) if not busy & set(range(t, t + length))
            )
        else:
            found = lane.earliest(at, length)
            wanted = next(t for t in range(at, 200) if not busy & set(range(t, t + length)))
        assert found == wanted
        lane.reserve(found, length)
        busy |= set(range(wanted, wanted + length))
