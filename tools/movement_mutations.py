"""The mutations of what moves: orders of copies, disks that fail, where host memory lies."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["MOVEMENT_MUTATIONS"]

_BACKING = "tests/unit/test_backing.py::test_"
_STREAM = "tests/model/test_stream_order.py::test_"
_ORDER = "tests/model/test_write_back_order.py::test_"
_CLOSING = "tests/trials/test_nvme_closing.py::test_"
_DEGRADED = "tests/trials/test_degraded_io.py::test_"
_WORKERS = "tests/unit/test_thread_lane_workers.py::test_"
_STAGING = "tests/unit/test_staging.py::test_"
_DISK = "tests/unit/test_routes_disk.py::test_"
_LOG = "tests/unit/test_failure_log.py::test_"
_NUMA = "tests/unit/test_numa.py::test_"
_LANE = "tests/unit/test_stream_lane.py::test_"
_EXIT = (
    "tests/unit/test_stream_lane_exit.py::"
    "test_no_thread_waits_for_the_device_when_the_interpreter_goes"
)

MOVEMENT_MUTATIONS = (
    # --- pages that turn back on their way down ---
    Mutation(
        "a fetch is ordered behind the copy down",
        "tvm_pager/paging/flight.py",
        "page.source, behind)",
        "page.source, ())",
        _STREAM + "a_page_on_its_way_down_is_fetched_behind_its_copy",
    ),
    Mutation(
        "a fetch behind a copy down is not called off",
        "tvm_pager/paging/flight.py",
        "        if page.state is PageState.FETCHING and not all("
        "ticket.done() for ticket in page.readers):\n            return False\n",
        "",
        _STREAM + "a_fetch_behind_a_copy_down_is_not_called_off",
    ),
    Mutation(
        "copies down that a fetch has overtaken do not keep the page's memory",
        "tvm_pager/paging/flight.py",
        "        for ticket in page.tickets:\n            ticket.transfer.memory = None\n",
        "",
        _STREAM + "a_page_on_its_way_down_is_fetched_behind_its_copy",
    ),
    Mutation(
        "copies down that a fetch has overtaken are remembered",
        "tvm_pager/memory/page_table.py",
        "            page.readers = (*page.readers, *page.tickets)\n            self._finish",
        "            self._finish",
        _STREAM + "frames_that_a_copy_down_still_fills_are_read_and_reused_behind_it",
    ),
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
        "tvm_pager/observe/inspection.py",
        "            self._pass_on_notices()\n            return take_stats(",
        "            return take_stats(",
        _DEGRADED
        + "direct_io_that_is_refused_in_the_middle_of_a_run_loses_no_page[pwritev-training-EINVAL]",
    ),
    Mutation(
        "the log has the first failure of each kind only",
        "tvm_pager/paging/failures.py",
        "            self._num_more[kind] += 1\n            return\n",
        "            self._num_more[kind] += 1\n",
        _LOG + "the_first_failure_of_each_kind_is_whole_and_the_others_are_one_line_at_the_end",
    ),
    Mutation(
        "failures that were only counted are told at the end",
        "tvm_pager/paging/pager.py",
        "            self.flight.failures.tell_rest()\n",
        "",
        _LOG + "the_first_failure_of_each_kind_is_whole_and_the_others_are_one_line_at_the_end",
    ),
    Mutation(
        "failures that were only counted are told when a tier closes",
        "tvm_pager/paging/flight.py",
        "                self.failures.tell_rest()\n",
        "                pass\n",
        _LOG + "what_was_counted_is_told_when_a_tier_closes",
    ),
    Mutation(
        "counted failures are told once",
        "tvm_pager/paging/failures.py",
        "        self._num_more = Counter(dict.fromkeys(self._num_more, 0))\n",
        "",
        _LOG + "what_was_counted_is_told_when_a_tier_closes",
    ),
    # --- where host memory lies, and who waits for the device ---
    Mutation(
        "host memory is placed before it is touched",
        "tvm_pager/transfer/region.py",
        "                node.prefer(self.address, self.nbytes)\n",
        "                pass\n",
        _NUMA + "a_region_prefers_the_node_before_it_is_touched",
    ),
    Mutation(
        "staging lies near the device too",
        "tvm_pager/transfer/torch_backend.py",
        "locker=locker, node=self._node)",
        "locker=locker)",
        _NUMA + "slab_and_staging_of_a_backend_lie_on_the_node_of_its_device[True]",
    ),
    Mutation(
        "a node is preferred only where there are several",
        "tvm_pager/transfer/numa.py",
        "or len(nodes) < 2 ",
        "",
        _NUMA + "the_node_is_the_gpus_where_there_is_a_choice",
    ),
    Mutation(
        "a system that refuses a node is asked once",
        "tvm_pager/transfer/numa.py",
        "        if _MBIND is None or self.notices:\n",
        "        if _MBIND is None:\n",
        _NUMA + "a_system_that_refuses_is_told_of_once_and_not_asked_again",
    ),
    Mutation(
        "threads that wait for the device end before the interpreter",
        "tvm_pager/transfer/stream_lane.py",
        "atexit.register(_stop_at_exit)\n",
        "",
        _EXIT,
    ),
    Mutation(
        "no thread that waits for the device comes at the exit",
        "tvm_pager/transfer/stream_lane.py",
        " and not self._is_stopped:",
        ":",
        _EXIT,
    ),
    # --- copies on a stream ---
    Mutation(
        "who shares a mark with a step that is interrupted has it all the same",
        "tvm_pager/transfer/stream_lane.py",
        "        finally:\n            if num_steps:\n",
        "        except OSError:\n            raise\n        else:\n            if num_steps:\n",
        _LANE + "who_shares_a_mark_with_a_step_that_fails_has_it_all_the_same",
    ),
    Mutation(
        "the mark of a chunk is that of all transfers that end in it",
        "tvm_pager/transfer/stream_lane.py",
        "        for ticket in ended:\n            ticket.event = event\n",
        "        for ticket in ended[-1:]:\n            ticket.event = event\n",
        _LANE + "small_transfers_that_go_together_share_the_mark_behind_the_last",
    ),
    Mutation(
        "a lost device fails transfers that come later, whatever is on its stream",
        "tvm_pager/transfer/stream_lane.py",
        "        except RuntimeError:  # the device is lost: each",
        "        except KeyError:  # the device is lost: each",
        _LANE + "a_device_lost_with_copies_on_its_stream_fails_tickets_that_come_later",
    ),
    Mutation(
        "the window is small again after a fault",
        "tvm_pager/transfer/stream_lane.py",
        "                self._set_most(WINDOW_BYTES)\n                self._launch(job)\n",
        "                self._launch(job)\n",
        _LANE + "the_window_grows_while_no_fault_comes_and_is_small_again_after_one",
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
        "            for _, tier, frame in self._arrivals.pop(page.id, ()):\n"
        "                self.frames[tier].free(frame)\n",
        "            self._arrivals.pop(page.id, ())\n",
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
        "        return is_certain and self._flight.checker is None\n",
        "        return True\n",
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
    # --- two workers on a disk's lane ---
    Mutation(
        "two transfers of one direction of the disk proceed at a time",
        "tvm_pager/transfer/thread_lane.py",
        "        if len(self._running) >= self._num_workers:\n",
        "        if self._running:\n",
        "tests/unit/test_thread_lane_storm.py::test_many_threads_share_two_workers",
    ),
    Mutation(
        "steps of one transfer never run at once",
        "tvm_pager/transfer/thread_lane.py",
        "self._queue.first(besides=self._running)",
        "self._queue.first()",
        _WORKERS + "one_transfer_keeps_one_worker_and_the_order_of_its_steps",
    ),
    Mutation(
        "a fault has the lane to itself",
        "tvm_pager/transfer/thread_lane.py",
        "if job is None or any(other.priority < job.priority for other in self._running):",
        "if job is None:",
        _WORKERS + "a_fault_waits_for_one_step_and_then_has_the_lane_to_itself",
    ),
    Mutation(
        "a ticket ends with the last of its strands",
        "tvm_pager/transfer/thread_lane.py",
        "        if strands is None or not strands.jobs:\n",
        "        if not job.ticket.is_over:\n",
        _WORKERS + "both_workers_carry_one_transfer_and_its_ticket_ends_with_the_last",
    ),
    Mutation(
        "a transfer is cancelled only if none of its strands has begun",
        "tvm_pager/transfer/thread_lane.py",
        "if not jobs or any(job.has_begun for job in jobs):",
        "if not jobs or all(job.has_begun for job in jobs):",
        _WORKERS + "a_transfer_with_one_strand_begun_goes_on_and_one_with_none_is_cancelled",
    ),
    Mutation(
        "a promoted transfer runs beside an urgent one",
        "tvm_pager/transfer/thread_lane.py",
        "                if self._running and self._choose() is not None:\n",
        "                if False:\n",
        _WORKERS + "promotion_lets_a_job_run_beside_an_urgent_one_at_once",
    ),
    Mutation(
        "a disk's lane has two chunks in flight at most",
        "tvm_pager/transfer/routes.py",
        "_DISK_CHUNK_BYTES = CHUNK_BYTES // 2",
        "_DISK_CHUNK_BYTES = CHUNK_BYTES",
        _DISK + "two_workers_have_two_chunks_in_flight_at_most",
    ),
    Mutation(
        "each step has a place of its own in the staging",
        "tvm_pager/transfer/staging.py",
        "direction * nbytes + place * self.place_bytes",
        "direction * nbytes",
        _STAGING + "two_transfers_are_in_the_staging_at_a_time_each_in_its_own_place",
    ),
    Mutation(
        "a step never waits for a second place in the staging",
        "tvm_pager/transfer/staging.py",
        "        place = places.get()\n",
        "        place, second = places.get(), places.get()\n        places.put(second)\n",
        _STAGING + "two_transfers_are_in_the_staging_at_a_time_each_in_its_own_place",
    ),
    Mutation(
        "a failed step gives its place in the staging back",
        "tvm_pager/transfer/staging.py",
        "            places.put(place)\n",
        "            pass\n",
        _STAGING + "a_failed_step_gives_its_place_back",
    ),
    Mutation(
        "copies of a disk's lane come behind what uses the memory",
        "tvm_pager/transfer/behind.py",
        "        self._wait()\n        self._copier.copy(",
        "        self._copier.copy(",
        _DISK + "copies_come_behind_the_work_that_uses_the_memory",
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
        "tvm_pager/memory/tier_books.py",
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
