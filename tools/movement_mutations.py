"""The mutations of what moves: orders of copies, and disks that fail or refuse direct I/O."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["MOVEMENT_MUTATIONS"]

_BACKING = "tests/unit/test_backing.py::test_"
_STREAM = "tests/model/test_stream_order.py::test_"
_ORDER = "tests/model/test_write_back_order.py::test_"
_CLOSING = "tests/trials/test_nvme_closing.py::test_"
_DEGRADED = "tests/trials/test_degraded_io.py::test_"

MOVEMENT_MUTATIONS = (
    # --- a disk that fails ---
    Mutation(
        "a failed write closes its tier",
        "tvm_pager/paging/flight.py",
        "            self._table.close_tier(Tier.NVME, str(failure))\n",
        "            pass\n",
        _CLOSING + "a_failed_write_back_closes_nvme_and_sets_its_frames_aside[EIO]",
    ),
    Mutation(
        "only errors of a broken disk close its tier",
        "tvm_pager/paging/flight.py",
        "is_bad = to_nvme and failure.errno in _TIER_IS_BROKEN",
        "is_bad = to_nvme",
        _CLOSING + "a_write_that_fails_otherwise_leaves_nvme_open_and_its_frames_free",
    ),
    Mutation(
        "the commit limit falls at once when a tier closes",
        "tvm_pager/paging/flight.py",
        "            self._on_tier_closed()  # last",
        "            pass  # last",
        _CLOSING + "bad_frames_back_no_page",
    ),
    Mutation(
        "frames of a failed write-back are set aside",
        "tvm_pager/paging/flight.py",
        "self._table.fail_write_back(page, is_bad=is_bad)",
        "self._table.fail_write_back(page)",
        _CLOSING + "a_failed_write_back_closes_nvme_and_sets_its_frames_aside[ENOSPC]",
    ),
    Mutation(
        "frames of a failed demotion are set aside",
        "tvm_pager/paging/flight.py",
        "self._table.fail_demote(page, is_bad=is_bad)",
        "self._table.fail_demote(page)",
        _CLOSING + "pages_that_live_still_change_places_around_a_bad_block[EIO]",
    ),
    Mutation(
        "a closed tier backs nothing",
        "tvm_pager/paging/limits.py",
        "        if tier not in table.closed_tiers\n",
        "",
        _CLOSING + "new_pages_are_refused_with_the_reason_once_a_write_has_failed[EIO]",
    ),
    Mutation(
        "a refusal says why a tier is closed",
        "tvm_pager/paging/limits.py",
        "are taken{closed}.",
        "are taken.",
        _CLOSING + "new_pages_are_refused_with_the_reason_once_a_write_has_failed[ENOSPC]",
    ),
    Mutation(
        "pages that live may use a closed tier",
        "tvm_pager/memory/tier_books.py",
        "        return self.frames[tier].allocate(nbytes, below=below)\n",
        "        if tier not in self.closed_tiers:\n"
        "            return self.frames[tier].allocate(nbytes, below=below)\n        return None\n",
        _CLOSING + "pages_that_live_still_change_places_around_a_bad_block[EIO]",
    ),
    Mutation(
        "an eviction whose tier has closed tries the other one",
        "tvm_pager/paging/mover.py",
        "                to = None  #",
        "                pass  #",
        _CLOSING + "an_eviction_whose_tier_has_just_closed_goes_to_the_other_one",
    ),
    Mutation(
        "refused direct I/O goes through the page cache",
        "tvm_pager/transfer/posix.py",
        "                if error.errno not in _REFUSED:\n",
        "                if True:\n",
        _DEGRADED
        + "direct_io_that_is_refused_in_the_middle_of_a_run_loses_no_page[pwritev-training-EINVAL]",
    ),
    Mutation(
        "a disk that fails is no disk without direct I/O",
        "tvm_pager/transfer/posix.py",
        "                if error.errno not in _REFUSED:\n",
        "                if False:\n",
        _DEGRADED + "a_disk_that_fails_is_not_taken_for_one_without_direct_io",
    ),
    Mutation(
        "what the backend finds out on the way is told",
        "tvm_pager/api.py",
        "            self._pass_on_notices()\n            return Stats(",
        "            return Stats(",
        _DEGRADED
        + "direct_io_that_is_refused_in_the_middle_of_a_run_loses_no_page[pwritev-training-EINVAL]",
    ),
    # --- orders ---
    Mutation(
        "a fault on a page in demotion waits for it",
        "tvm_pager/paging/admission.py",
        "        if page.state is PageState.DEMOTING:\n",
        "        if False:\n",
        _ORDER + "a_fault_calls_a_demotion_off_or_waits_for_what_has_begun",
    ),
    Mutation(
        "a failed demotion leaves no copy on NVMe",
        "tvm_pager/memory/page_table.py",
        "        self._finish_arrivals(page, keep=False, is_bad=is_bad)\n"
        "        enter(page, PageState.EVICTED)",
        "        self._finish_arrivals(page, keep=True, is_bad=is_bad)\n"
        "        enter(page, PageState.EVICTED)",
        _ORDER + "a_page_whose_demotion_failed_is_still_in_dram",
    ),
    Mutation(
        "frames that fill for a dead page come back",
        "tvm_pager/memory/page_table.py",
        "                for _, tier, frame in self._arrivals.pop(page.id, ()):\n"
        "                    self.frames[tier].free(frame)\n",
        "                self._arrivals.pop(page.id, ())\n",
        _ORDER + "frames_of_a_page_that_dies_in_write_back_are_free_after_the_copy_only",
    ),
    Mutation(
        "the host's policy is told of a demotion that ends by itself",
        "tvm_pager/paging/flight.py",
        "            self._policies[Tier.HOST].removed(page)\n",
        "            pass\n",
        _ORDER + "bytes_survive_every_order_of_steps_after[evict-demote]",
    ),
    # --- stream order, and what is done ahead of need ---
    Mutation(
        "frames that a fetch still reads are not reused",
        "tvm_pager/memory/tier_books.py",
        "        if readers:\n",
        "        if False:\n",
        _STREAM + "frames_that_a_fetch_still_reads_are_not_reused_after_a_write",
    ),
    Mutation(
        "memory leaves before its copy is done only if that cannot fail",
        "tvm_pager/paging/mover.py",
        "self._flight.checker is None and all(ticket.is_certain for ticket in page.tickets)",
        "True",
        _STREAM + "a_write_to_nvme_is_waited_for_before_the_memory_leaves",
    ),
    Mutation(
        "a page that was written while it is written back does not leave with the old copy",
        "tvm_pager/memory/page_table.py",
        "            page.is_superseded = True\n        elif",
        "            pass\n        elif",
        _ORDER + "a_write_during_write_back_supersedes_the_copy",
    ),
    Mutation(
        "a prefetch leaves what the largest operation needs",
        "tvm_pager/paging/prefetcher.py",
        "pager.free_bytes - page.frame_bytes < pager.admission.largest_need_bytes\n",
        "pager.free_bytes < page.frame_bytes\n",
        _STREAM + "a_prefetch_never_takes_the_last_bytes_that_an_operation_needs",
    ),
    Mutation(
        "a victim that was used since it was chosen is passed over",
        "tvm_pager/paging/evictor.py",
        "page.last_use > chosen_at or ",
        "",
        _STREAM + "a_victim_that_was_used_since_it_was_chosen_is_passed_over",
    ),
    Mutation(
        "victims are written back ahead of need",
        "tvm_pager/paging/evictor.py",
        "            self._clean_chosen()\n",
        "            pass\n",
        _STREAM + "the_next_victims_are_clean_before_their_turn",
    ),
    # --- backing ---
    Mutation(
        "a write ends the backing by a file",
        "tvm_pager/memory/page_table.py",
        "                self.back(page, Backing.SWAP)\n",
        "                pass\n",
        _BACKING + "the_first_write_makes_a_file_backed_page_an_ordinary_one",
    ),
    Mutation(
        "file-backed pages commit nothing",
        "tvm_pager/memory/page_table.py",
        "        if page.backing is Backing.FILE:\n            return 0\n",
        "",
        _BACKING + "a_page_backed_by_a_file_moves_nothing_down_and_commits_nothing",
    ),
    Mutation(
        "a write to a file-backed page is committed before it happens",
        "tvm_pager/paging/pager.py",
        "        if page.backing is Backing.FILE:\n            self.commit(",
        "        if False:\n            self.commit(",
        _BACKING + "a_write_that_no_tier_could_back_is_refused_before_it_happens",
    ),
    Mutation(
        "a file that has changed is not read",
        "tvm_pager/transfer/source_file.py",
        "        if self._stat() != self._identity:\n",
        "        if False:\n",
        "tests/trials/test_weight_files.py::"
        "test_a_file_that_changes_under_the_model_is_an_error_not_other_weights",
    ),
)
