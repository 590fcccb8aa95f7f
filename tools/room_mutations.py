"""The mutations of finding room, on the device and below it, while others work."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["ROOM_MUTATIONS"]

_ORDER = "tests/model/test_write_back_order.py::test_"
_SMALL = "tests/unit/test_small_pages.py::test_"
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
    Mutation(
        "small pages stay in the slab while larger ones make room",
        "tvm_pager/paging/host_room.py",
        "            self._view.spares_small = True\n",
        "            pass\n",
        _SMALL + "larger_pages_go_to_the_disk_although_small_ones_were_used_earlier",
    ),
    Mutation(
        "small pages go where nothing else can",
        "tvm_pager/paging/host_room.py",
        "        if victims is None:\n",
        "        if not self._spares_small:\n",
        _SMALL + "small_pages_go_where_nothing_else_can",
    ),
    Mutation(
        "small pages that take much of the slab go as any other",
        "tvm_pager/paging/host_room.py",
        " and sum(small) * _SMALL_PART <= capacity_bytes",
        "",
        _SMALL + "small_pages_that_are_many_go_as_any_other[_SMALL_PART]",
    ),
    Mutation(
        "small pages that are many go as any other",
        "tvm_pager/paging/host_room.py",
        "len(small) <= _MOST_SMALL and ",
        "",
        _SMALL + "small_pages_that_are_many_go_as_any_other[_MOST_SMALL]",
    ),
    Mutation(
        "memory of the dead hides nothing that is no page",
        "tvm_pager/paging/pager.py",
        "        self.drain()\n        self.overhead_bytes = ",
        "        self.overhead_bytes = ",
        "tests/tensor/test_rules_lifetime.py::test_memory_of_the_dead_hides_nothing_that_is_no_page",
    ),
)
