"""The mutations of what survives faults: signals, forks, broken disks, several threads."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["FAULT_MUTATIONS"]

_SIGNALS = "tests/unit/test_interrupts.py::test_"
_INTERRUPTS = "tests/trials/test_interrupts.py::test_"
_PROCESSES = "tests/trials/test_processes.py::test_"
_FAULTS = "tests/trials/test_faults_survived.py::test_"
_DISK = "tests/trials/test_broken_disk.py::test_"
_THREADS = "tests/trials/test_threads.py::test_"

FAULT_MUTATIONS = (
    # --- signals ---
    Mutation(
        "a signal waits for the end of the pager's work",
        "tvm_pager/interrupts.py",
        "        if frame.f_code.co_filename.startswith(_ROOMS) or _is_swallowed(frame):\n",
        "        if _is_swallowed(frame):\n",
        _SIGNALS + "a_signal_waits_for_the_end_of_the_work",
    ),
    Mutation(
        "a blocking wait can be cut off",
        "tvm_pager/interrupts.py",
        "        if frame.f_code in _OPEN:\n",
        "        if False:\n",
        _SIGNALS + "a_wait_is_cut_off",
    ),
    Mutation(
        "no signal is delivered where its exception would be swallowed",
        "tvm_pager/interrupts.py",
        "        if _is_swallowed(frame):\n            return\n",
        "",
        _SIGNALS + "a_finaliser_does_not_swallow_it",
    ),
    Mutation(
        "our handler stands before one that was set since",
        "tvm_pager/interrupts.py",
        "    if Shield.num_up and _is_main_thread():\n        _install()\n",
        "",
        _SIGNALS + "a_handler_that_was_set_since_comes_behind_ours_when_it_is_looked_for",
    ),
    Mutation(
        "a wait for a transfer can be cut off",
        "tvm_pager/transfer/thread_lane.py",
        "            interruptible(gate.acquire)\n",
        "            gate.acquire()\n",
        _INTERRUPTS + "an_interrupt_does_not_wait_for_a_slow_disk",
    ),
    Mutation(
        "a wait for other threads can be cut off",
        "tvm_pager/paging/reservations.py",
        "            interruptible(wait)\n",
        "            wait()\n",
        _INTERRUPTS + "an_interrupt_ends_operators_in_python_and_waits_for_other_threads",
    ),
    Mutation(
        "an operator that runs without the lock can be cut off",
        "tvm_pager/runtime/execution.py",
        "            out = interruptible(partial(",
        "            out = (lambda f: f())(partial(",
        _INTERRUPTS + "an_interrupt_ends_operators_in_python_and_waits_for_other_threads",
    ),
    Mutation(
        "a close that is cut off leaves the pager as it was",
        "tvm_pager/runtime/closing.py",
        "            core.budget_bytes = budget_bytes\n",
        "            pass\n",
        _INTERRUPTS + "a_close_that_is_interrupted_loses_nothing_and_can_be_repeated",
    ),
    # --- forks ---
    Mutation(
        "a forked child's pager is closed",
        "tvm_pager/runtime/forking.py",
        "        context.is_closed = context.is_forked = True\n",
        "        context.is_forked = True\n",
        _PROCESSES + "a_forked_child_has_no_pager_and_touches_nothing_of_its_parent",
    ),
    Mutation(
        "what is on the device is plain memory in a forked child",
        "tvm_pager/runtime/forking.py",
        "                    unbind(storage)\n",
        "                    pass\n",
        _PROCESSES + "a_forked_child_has_no_pager_and_touches_nothing_of_its_parent",
    ),
    Mutation(
        "a closed pager's mode makes no pages",
        "tvm_pager/runtime/dispatch.py",
        " if isinstance(owner, PagingMode) and not owner.context.is_closed else None",
        " if isinstance(owner, PagingMode) else None",
        _PROCESSES + "a_forked_child_has_no_pager_and_touches_nothing_of_its_parent",
    ),
    Mutation(
        "a fork waits for the operations of other threads",
        "tvm_pager/runtime/forking.py",
        "        context.core.lock.acquire()\n",
        "        context.core.lock.acquire(blocking=False)\n",
        _PROCESSES + "a_fork_waits_for_other_threads_to_leave_the_books_whole",
    ),
    Mutation(
        "copies for a spawned child live until it has started",
        "tvm_pager/runtime/paged_tensor.py",
        '        vars(child).setdefault("_tvm_copies", []).append(plain)\n',
        "        pass\n",
        _PROCESSES + "data_loaders_and_pools_work_inside_a_pager[spawn]",
    ),
    # --- disks and copies that fail ---
    Mutation(
        "the error of a copy names the page",
        "tvm_pager/paging/flight.py",
        "copy_failed(page, self._table, failure)",
        "failure",
        _FAULTS
        + "a_failed_copy_in_backward_is_raised_by_name_and_the_step_can_be_repeated[h2d-once]",
    ),
    Mutation(
        "bytes that came back different are noticed",
        "tvm_pager/paging/flight.py",
        "if self.checker is None or memory is None or self.checker.is_intact(memory):",
        "if True:",
        _FAULTS + "bits_that_flip_on_the_disk_are_noticed_and_the_page_is_named",
    ),
    Mutation(
        "copying a page for a checkpoint leaves it clean",
        "tvm_pager/runtime/exports.py",
        '            context.fault_in(page, "copy")\n',
        '            context.fault_in(page, "copy")\n            context.core.written(page)\n',
        _FAULTS
        + "a_disk_that_fails_for_good_in_backward_leaves_a_state_that_can_be_saved"
        + "[three tiers-ENOSPC]",
    ),
    Mutation(
        "a disk that refuses at once is not asked for ever",
        "tvm_pager/paging/host_room.py",
        "            if self._flight.num_failed_demotions != num_failed:\n",
        "            if False:\n",
        _DISK + "a_disk_that_refuses_at_once_is_asked_a_few_times[EIO]",
    ),
    Mutation(
        "another page goes where a victim cannot be written",
        "tvm_pager/paging/evictor.py",
        "                stuck[page_id] = error.with_traceback(None)",
        "                raise error",
        _DISK + "where_a_victim_cannot_be_written_a_clean_one_goes_instead",
    ),
    Mutation(
        "a block that ends closes its pager although pages are lost",
        "tvm_pager/runtime/closing.py",
        "        if failure is None or gives_up:\n",
        "        if failure is None:\n",
        _DISK + "a_block_that_ends_on_a_broken_disk_is_closed_all_the_same[True]",
    ),
    Mutation(
        "a close that could not read everything back leaves the pager open",
        "tvm_pager/runtime/closing.py",
        "        if failure is None or gives_up:\n",
        "        if True:\n",
        _DISK + "a_close_that_could_not_read_everything_back_may_be_repeated",
    ),
    Mutation(
        "a swap file that was forgotten is closed",
        "tvm_pager/transfer/swap_file.py",
        "    def __del__(self) -> None:\n",
        "    def _unused(self) -> None:\n",
        _DISK + "a_swap_file_that_was_forgotten_takes_no_space",
    ),
    # --- threads ---
    Mutation(
        "a request that waits pins nothing of its own",
        "tvm_pager/paging/reservations.py",
        "        held = self._pin_running(own)\n",
        "        held = self._pin_running(())\n",
        _THREADS + "requests_that_each_need_most_of_the_budget_are_granted_whole_and_in_order",
    ),
    Mutation(
        "the lock is given up while a thread waits",
        "tvm_pager/paging/reservations.py",
        "            interruptible(wait)\n        finally:\n            lock._acquire_restore(",
        "            lock._acquire_restore(depth)\n            wait()\n"
        "        finally:\n            id(",
        _THREADS + "a_thread_that_waits_for_the_disk_does_not_stop_the_others[read]",
    ),
    Mutation(
        "a written operand is compared with the books before others can evict it",
        "tvm_pager/runtime/execution.py",
        "            compare_sizes(context, written)  # before another thread can evict them\n"
        "    with core.lock:\n",
        "            pass\n    with core.lock:\n        compare_sizes(context, written)\n",
        _THREADS + "an_operand_is_not_taken_for_resized_when_another_thread_evicts_it_at_once",
    ),
    Mutation(
        "what needs no room does not queue for it",
        "tvm_pager/paging/admission.py",
        "            or (new_bytes and pager.reservations.queue)\n",
        "            or pager.reservations.queue\n",
        _THREADS + "what_needs_no_room_does_not_queue_for_it",
    ),
)
