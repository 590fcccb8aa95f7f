"""The pager's rules, each with the snippet that takes it out and the test that must notice.

`tools/mutate_rules.py` runs them. Each snippet is in its file exactly once, and as short as that
allows: the more it holds, the more edits make it stale.
"""

from __future__ import annotations

from tools.fault_mutations import FAULT_MUTATIONS
from tools.movement_mutations import MOVEMENT_MUTATIONS
from tools.mutation import Mutation
from tools.outside_mutations import OUTSIDE_MUTATIONS
from tools.plan_mutations import PLAN_MUTATIONS
from tools.planning_mutations import PLANNING_MUTATIONS
from tools.room_mutations import ROOM_MUTATIONS
from tools.trace_mutations import TRACE_MUTATIONS

__all__ = ["MUTATIONS", "Mutation"]

_MACHINE = (
    "tests/model/test_pager_machine.py::"
    "test_the_pager_gives_back_the_last_bytes_written_whatever_the_backend_does"
)
_RULES = "tests/tensor/test_rules.py::test_"
_OPERATIONS = "tests/tensor/test_rules_operations.py::test_"
_LIFETIME = "tests/tensor/test_rules_lifetime.py::test_"
_NEIGHBOURS = "tests/tensor/test_rules_neighbours.py::test_"
_ESCAPES = "tests/tensor/test_escapes.py::test_"
_TRIALS = "tests/trials/"
_UNIT = "tests/unit/"


MUTATIONS = (
    # --- moving bytes ---
    Mutation(
        "a write during write-back supersedes the copy",
        "tvm_pager/memory/page_table.py",
        "            page.is_superseded = True\n",
        "            pass\n",
        "tests/model/test_write_back_order.py::test_a_write_during_write_back_supersedes_the_copy",
    ),
    Mutation(
        "a storage that others refer to is not adopted",
        "tvm_pager/runtime/adoption.py",
        "    if counted > expected:\n",
        "    if counted > expected + 99:\n",
        f"{_RULES}an_alias_made_before_is_safe_outside_every_context",
    ),
    Mutation(
        "settle waits for the copies before memory is released",
        "tvm_pager/paging/flight.py",
        "for ticket in tickets:\n            try:\n                if unlocked",
        "for ticket in ():\n            try:\n                if unlocked",
        _MACHINE,
    ),
    Mutation(
        "settle waits for every ticket of a page, not for the first alone",
        "tvm_pager/paging/flight.py",
        "for ticket in tickets:\n            try:\n                if unlocked",
        "for ticket in tickets[:1]:\n            try:\n                if unlocked",
        "tests/model/test_stream_order.py::test_every_lane_of_a_page_is_waited_for",
    ),
    Mutation(
        "frames of a dead page wait for its copies",
        "tvm_pager/memory/page_table.py",
        "        if page.tickets:\n            self._zombies[page.id] = page\n        elif",
        "        if",
        "tests/model/test_write_back_order.py::"
        "test_frames_of_a_page_that_dies_while_it_is_fetched_are_free_after_the_copy_only",
    ),
    Mutation(
        "a write makes the copies below void",
        "tvm_pager/memory/page_table.py",
        '            raise AssertionError(f"write to {page!r}")\n        if page.has_copies:',
        '            raise AssertionError(f"write to {page!r}")\n        if False:',
        _MACHINE,
    ),
    Mutation(
        "a failed fetch leaves the copies below",
        "tvm_pager/memory/page_table.py",
        "        self._end_fetch(page, PageState.FAILED)",
        "        self._free_copies(page)\n        self._end_fetch(page, PageState.FAILED)",
        _UNIT + "test_swap_directory.py::test_a_failed_read_can_be_tried_again[EIO]",
    ),
    Mutation(
        "a failed write-back leaves the page dirty",
        "tvm_pager/memory/page_table.py",
        "        self._finish_arrivals(page, keep=False, is_bad=is_bad)\n"
        "        enter(page, PageState.RESIDENT)",
        "        self._finish_arrivals(page, keep=True)\n        enter(page, PageState.RESIDENT)",
        _UNIT + "test_swap_directory.py::test_a_disk_that_fails_while_running_loses_nothing[EIO]",
    ),
    Mutation(
        "the swap file has no name",
        "tvm_pager/transfer/swap_file.py",
        '                os.unlink("swap", dir_fd=own)\n',
        "                pass\n",
        _UNIT
        + "test_swap_file.py::"
        + "test_without_nameless_files_name_and_folder_are_unlinked_at_once",
    ),
    # --- what may leave, and what must fit ---
    Mutation(
        "pins forbid eviction",
        "tvm_pager/paging/view.py",
        "                and not page.pins\n",
        "",
        _UNIT + "test_policies.py::test_an_illegal_choice_is_refused_by_name[held]",
    ),
    Mutation(
        "operands of a running operation are not evicted",
        "tvm_pager/paging/view.py",
        "                and page_id not in self.in_use\n",
        "",
        _UNIT + "test_policies.py::test_an_illegal_choice_is_refused_by_name[in use]",
    ),
    Mutation(
        "room for the outputs is made before the operation",
        "tvm_pager/runtime/execution.py",
        "        core.admit(pages, new_bytes, plan.name)\n",
        "        core.admit(pages, 0, plan.name)\n",
        _TRIALS + "test_optimizer_and_loop.py::test_gradients_accumulate_into_pages_that_are_out",
    ),
    Mutation(
        "a new signature's outputs are estimated",
        "tvm_pager/runtime/execution.py",
        "    reserved = max(least, min(wanted, call.available_bytes()))\n",
        "    reserved = 0\n",
        _OPERATIONS + "an_operation_larger_than_the_budget_is_refused_by_name",
    ),
    Mutation(
        "a known signature's outputs are remembered",
        "tvm_pager/runtime/outputs.py",
        "        return self.by_key.get(key)\n",
        "        return 0 if key in self.by_key else None\n",
        _TRIALS + "test_optimizer_and_loop.py::test_gradients_accumulate_into_pages_that_are_out",
    ),
    Mutation(
        "policies see when a page was used last",
        "tvm_pager/paging/tier_policy.py",
        "                page.last_use = index\n",
        "                pass\n",
        _UNIT + "test_last_use.py::test_sorting_by_last_use_is_lru",
    ),
    Mutation(
        "a number that scales values makes no new signature",
        "tvm_pager/runtime/outputs.py",
        "            parts.append(kind if kind in _FRACTIONS else value)\n\n",
        "            parts.append(value)\n\n",
        _UNIT + "test_output_sizes.py::test_a_number_that_scales_values_makes_no_new_signature",
    ),
    Mutation(
        "the fast path leaves outputs that may not fit to the general path",
        "tvm_pager/runtime/dispatch.py",
        "    return bound <= free and table",
        "    return table",
        _TRIALS + "test_optimizer_and_loop.py::test_gradients_accumulate_into_pages_that_are_out",
    ),
    Mutation(
        "lists larger than the budget are split",
        "tvm_pager/runtime/execution.py",
        "if plan.list_positions and new_bytes > call.available_bytes():",
        "if False:",
        _OPERATIONS + "lists_larger_than_the_budget_are_split[fused]",
    ),
    Mutation(
        "what no tier can back is refused at creation",
        "tvm_pager/paging/pager.py",
        "        if self.table.committed_bytes + new_bytes > self.commit_limit_bytes:\n",
        "        if False:\n",
        _OPERATIONS + "what_no_tier_can_back_is_refused_at_creation",
    ),
    Mutation(
        "resized storages are followed",
        "tvm_pager/runtime/results.py",
        "if page is not None and storage.nbytes() != page.nbytes:",
        "if False:",
        _RULES + "growth_of_an_out_argument_is_followed",
    ),
    Mutation(
        "death takes a page out of the books",
        "tvm_pager/paging/pager.py",
        "        while dead:\n",
        "        while False:\n",
        _TRIALS + "test_aliases.py::test_tying_after_paging_frees_the_second_page",
    ),
    # --- what an operation writes ---
    Mutation(
        "written operands are dirty",
        "tvm_pager/runtime/execution.py",
        "                core.written(written_page)\n",
        "                pass\n",
        _TRIALS + "test_aliases.py::test_in_place_operations_on_views_reach_the_base",
    ),
    Mutation(
        "a write on the fast path makes the copy below stale",
        "tvm_pager/runtime/dispatch.py",
        "        core.written(page)\n",
        "        pass\n",
        _OPERATIONS + "a_write_on_the_fast_path_makes_the_copy_below_stale",
    ),
    Mutation(
        "operands are dirty before the operation runs",
        "tvm_pager/runtime/execution.py",
        "                core.written(page_written)\n        core.pin(distinct)\n",
        "                pass\n        run = call.func\n\n"
        "        def late(*args: Any, **kwargs: Any) -> Any:\n"
        "            out = run(*args, **kwargs)\n"
        "            for tensor in written:\n"
        "                core.written(page_of(tensor))\n"
        "            return out\n\n        call.func = late\n        core.pin(distinct)\n",
        _OPERATIONS + "an_operation_that_writes_and_raises_keeps_its_write[failing]",
    ),
    Mutation(
        "batch normalisation writes its statistics",
        "tvm_pager/runtime/schema.py",
        '    "aten::native_batch_norm": _STATISTICS,\n',
        "",
        _OPERATIONS + "running_statistics_survive_eviction[batch]",
    ),
    Mutation(
        "undeclared operators of others count as writing",
        "tvm_pager/runtime/schema.py",
        "        written.update(tensors, lists)\n",
        "",
        _OPERATIONS + "undeclared_writes_of_custom_operations_are_kept",
    ),
    Mutation(
        "foreach operations count versions",
        "tvm_pager/runtime/execution.py",
        "    if plan.is_foreach and written:\n",
        "    if False:\n",
        _OPERATIONS + "foreach_functions_split_what_does_not_fit",
    ),
    # --- what becomes a page ---
    Mutation(
        "an unpaged argument stays unpaged",
        "tvm_pager/runtime/results.py",
        "            if _shares(tensor, storage):\n",
        "            if False:\n",
        _RULES + "an_unpaged_argument_stays_unpaged_and_so_do_its_views",
    ),
    Mutation(
        "storages that cannot be resized stay put",
        "tvm_pager/runtime/adoption.py",
        "    if not storage.resizable() and not copy:\n",
        "    if False:\n",
        _RULES + "memory_that_cannot_be_resized_stays_put[from_numpy]",
    ),
    Mutation(
        "adoption is refused while a graph is alive",
        "tvm_pager/runtime/adoption.py",
        "            refuse_live_graph(named)\n",
        "            pass\n",
        _LIFETIME + "adoption_is_refused_while_a_graph_holds_the_parameter",
    ),
    Mutation(
        "adoption keeps hooks on gradients",
        "tvm_pager/runtime/adoption.py",
        "        tensor._backward_hooks = hooks\n",
        "        pass\n",
        _LIFETIME + "adoption_keeps_the_object",
    ),
    Mutation(
        "adoption keeps hooks after accumulation",
        "tvm_pager/runtime/adoption.py",
        "        tensor._post_accumulate_grad_hooks = accumulate_hooks\n",
        "        pass\n",
        _LIFETIME + "adoption_keeps_the_object",
    ),
    Mutation(
        "adoption keeps version counters",
        "tvm_pager/runtime/adoption.py",
        "torch._C._autograd._unsafe_set_version_counter((replacement,), (tensor._version,))",
        "pass",
        _LIFETIME + "adoption_keeps_the_object",
    ),
    # --- raw access and neighbours ---
    Mutation(
        "components of sparse tensors stay on the device",
        "tvm_pager/runtime/context.py",
        "                self.hold_for_good(component)\n",
        "                pass\n",
        _NEIGHBOURS + "sparse_tensors_pass_through",
    ),
    Mutation(
        "a raw alias holds its page while it lives",
        "tvm_pager/runtime/exports.py",
        "        context.core.hold(page)\n",
        "",
        _ESCAPES + "a_page_stays_while_an_alias_lives[numpy]",
    ),
    Mutation(
        "the hold of a raw alias ends with it",
        "tvm_pager/runtime/exports.py",
        "            self._context.core.dead_exports.append(self._page)\n",
        "            pass\n",
        _ESCAPES + "a_page_stays_while_an_alias_lives[numpy]",
    ),
    Mutation(
        "an escaped address pins its page",
        "tvm_pager/runtime/context.py",
        "            self.core.hold(page)\n        page.exposed_at = self.core.iteration",
        "            page.pins += 0\n        page.exposed_at = self.core.iteration",
        _ESCAPES + "an_address_holds_until_an_event_after_it",
    ),
    Mutation(
        "an iteration boundary ends the pins of escaped addresses",
        "tvm_pager/runtime/context.py",
        "                self.release(page)\n",
        "                pass\n",
        _ESCAPES + "an_address_holds_until_an_event_after_it",
    ),
    Mutation(
        "modes below the pager see operations",
        "tvm_pager/runtime/dispatch.py",
        "    if active is not None and _num_modes():\n",
        "    if False:\n",
        _NEIGHBOURS + "other_dispatch_modes_see_each_operation_once[below]",
    ),
    Mutation(
        "operands of two pagers are refused",
        "tvm_pager/runtime/execution.py",
        "            raise two_pagers(plan, page)\n",
        "            pass\n",
        _NEIGHBOURS + "operands_of_two_pagers_are_refused_by_name[a list]",
    ),
    Mutation(
        "results that cannot be resized stay unpaged",
        "tvm_pager/runtime/context.py",
        "        if not storage.resizable():\n",
        "        if False:\n",
        _NEIGHBOURS + "results_in_memory_that_torch_cannot_resize_stay_unpaged[nested]",
    ),
    Mutation(
        "a copied Parameter has no gradient and no attributes",
        "tvm_pager/runtime/paged_tensor.py",
        '        if getattr(self, "_is_param", False):\n            copied.',
        "        if False:\n            copied.",
        _TRIALS
        + "test_touches.py::test_a_copied_parameter_is_a_fresh_one_as_in_plain_torch[adopted]",
    ),
    *MOVEMENT_MUTATIONS,
    *OUTSIDE_MUTATIONS,
    *PLAN_MUTATIONS,
    *PLANNING_MUTATIONS,
    *ROOM_MUTATIONS,
    *TRACE_MUTATIONS,
    *FAULT_MUTATIONS,
)
