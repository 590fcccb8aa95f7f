"""The mutations of finding room, on the device and below it, while others work."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["ROOM_MUTATIONS"]

_ORDER = "tests/model/test_write_back_order.py::test_"
_HOLDS = "tests/unit/test_holds.py::test_"

ROOM_MUTATIONS = (
    Mutation(
        "a request looks again where holds have ended meanwhile",
        "tvm_pager/paging/reservations.py",
        "(self.num_waits, pager.num_drops) != before or pager.dead_exports or pager.dead",
        "self.num_waits != before[0]",
        _HOLDS + "a_work_that_ends_while_room_is_made_makes_room",
    ),
    Mutation(
        "a request looks again where an alias has died meanwhile",
        "tvm_pager/paging/reservations.py",
        " or pager.dead_exports or pager.dead:",
        ":",
        _HOLDS + "an_alias_that_dies_while_room_is_made_makes_room",
    ),
    Mutation(
        "what is free beyond the end of a shrinking slab is of no use",
        "tvm_pager/memory/tier_books.py",
        "        return host.free_bytes if below is None else host.free_bytes_below(below)\n",
        "        return host.free_bytes\n",
        _ORDER + "an_eviction_finds_room_in_a_slab_that_is_shrinking",
    ),
    Mutation(
        "a limit that is only tried refuses nobody",
        "tvm_pager/paging/mover.py",
        "        frame = self._table.allocate_beyond(segment.nbytes)\n",
        "        frame = None\n",
        _ORDER + "an_eviction_goes_beyond_a_limit_that_is_only_tried",
    ),
    Mutation(
        "an eviction waits for frames that a fetch is about to free",
        "tvm_pager/paging/mover.py",
        "                if not self._flight.settle_any():\n                    raise\n",
        "                raise\n",
        _ORDER + "an_eviction_waits_for_frames_that_a_fetch_is_about_to_free",
    ),
)
