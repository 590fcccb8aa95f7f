"""The mutations of planning and simulation: how plans are made, judged, bounded and tried."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["PLANNING_MUTATIONS"]

_PLANNER = "tests/unit/test_planner.py::test_"
_COST = "tests/unit/test_cost_model.py::test_"
_INDEX = "tests/unit/test_trace_index.py::test_"
_FILE = "tests/unit/test_trace_file.py::test_"
_LOOKAHEAD = "tests/unit/test_lookahead.py::test_"
_PLACEMENT = "tests/unit/test_placement.py::test_"
_BOUNDS = "tests/unit/test_bounds.py::test_"
_SIMULATION = "tests/unit/test_simulation.py::test_"
_VIRTUAL = "tests/unit/test_virtual_backend.py::test_"
_BELADY = "tests/unit/test_belady.py::test_"

PLANNING_MUTATIONS = (
    # --- traces ---
    Mutation(
        "a page is used next where the next iteration uses it",
        "tvm_pager/planning/traces/trace_index.py",
        "            following[ends[used] - 1] = self.next_from_end[used]\n",
        "            following[ends[used] - 1] = NEVER\n",
        _INDEX + "uses_and_their_neighbours_are_those_of_a_walk",
    ),
    Mutation(
        "dead pages take no room",
        "tvm_pager/planning/traces/trace_index.py",
        "        np.add.at(changes, np.maximum(self.died, self.born + 1), -self.frame_bytes)\n",
        "",
        _INDEX + "occupancy_counts_what_is_alive_when_each_operation_runs",
    ),
    Mutation(
        "results and workspaces take room",
        "tvm_pager/planning/traces/trace_index.py",
        "        return self.alive_bytes[:-1] + self.created_bytes + self.workspace_bytes\n",
        "        return self.alive_bytes[:-1]\n",
        _INDEX + "occupancy_counts_what_is_alive_when_each_operation_runs",
    ),
    Mutation(
        "trace files of other versions are refused",
        "tvm_pager/planning/traces/trace_file.py",
        "    if version != TRACE_VERSION or isinstance(version, bool):\n",
        "    if False:\n",
        _FILE + "other_versions_are_refused_by_number",
    ),
    Mutation(
        "a trace that reads what is not alive is refused",
        "tvm_pager/planning/traces/trace.py",
        "            if (born is not None and born >= index)"
        " or (died is not None and died <= index):\n",
        "            if False:\n",
        _FILE + "what_is_wrong_in_a_file_is_named",
    ),
    # --- plans are made ---
    Mutation(
        "what nothing writes is not written back",
        "tvm_pager/planning/search/gaps.py",
        "    out_bytes[:num_pages][clean & (index.comes_from >= 0)] = 0\n",
        "",
        _PLANNER + "a_loop_over_weights_moves_what_is_missing_and_not_all_of_it",
    ),
    Mutation(
        "what dies before its next use is not written back while less can be fetched",
        "tvm_pager/planning/search/planner.py",
        "            gaps.out_bytes * self._out_weight[self._leave],\n",
        "            gaps.out_bytes * 0.0,\n",
        _PLANNER + "what_dies_unused_is_not_written_though_there_is_time_for_it",
    ),
    Mutation(
        "a version is written back once",
        "tvm_pager/planning/search/movement.py",
        "and version not in self._written:\n",
        "and True:\n",
        _PLANNER + "a_gradient_that_was_brought_back_is_not_written_twice",
    ),
    Mutation(
        "a plan begins as it ends",
        "tvm_pager/planning/search/movement.py",
        "            self.absent.add(self._page(gap, 1))\n",
        "            pass\n",
        _PLANNER + "a_loop_over_weights_moves_what_is_missing_and_not_all_of_it",
    ),
    Mutation(
        "fetches come after the last peak before their need",
        "tvm_pager/planning/search/schedule.py",
        "        return int(ahead.max()) <= most\n",
        "        return True\n",
        _PLANNER + "fetches_wait_for_the_last_peak_before_their_need",
    ),
    Mutation(
        "what the host cannot hold goes to NVMe",
        "tvm_pager/planning/search/spill.py",
        "    if int(used.max()) <= room:\n",
        "    if True:\n",
        _PLANNER + "longest_absences_go_to_nvme_where_the_host_is_short",
    ),
    Mutation(
        "what NVMe cannot hold gets no plan",
        "tvm_pager/planning/search/spill.py",
        "    if int(stays.covered(choice.chosen).max()) > limits.nvme_bytes:\n",
        "    if False:\n",
        _PLANNER + "budgets_that_nothing_can_keep_get_no_plan",
    ),
    Mutation(
        "two of the largest pages are left free in host memory",
        "tvm_pager/planning/search/spill.py",
        "limits.host_bytes - 2 * int(stays.nbytes.max())",
        "limits.host_bytes",
        _PLANNER + "two_of_the_largest_pages_are_left_free_in_host_memory",
    ),
    Mutation(
        "what is not needed after all is given back",
        "tvm_pager/planning/search/choice.py",
        "                    chosen[gap] = False\n",
        "                    pass\n",
        _PLANNER + "what_turns_out_not_to_be_needed_is_given_back",
    ),
    Mutation(
        "what is used last leaves first",
        "policies/belady.py",
        "    return -distance if",
        "    return distance if",
        _BELADY + "the_loop_that_defeats_lru",
    ),
    Mutation(
        "of what is not used again clean pages leave first",
        "policies/belady.py",
        ", not page.is_clean\n",
        ", False\n",
        _BELADY + "of_pages_that_are_not_used_again_clean_ones_go_first",
    ),
    Mutation(
        "small pages move where nothing fits without them",
        "tvm_pager/planning/search/planner.py",
        "        if int(self._large.grid.least_bytes.max()) <= limits.device_bytes:\n",
        "        if True:\n",
        _PLANNER + "small_pages_move_where_nothing_fits_without_them",
    ),
    Mutation(
        "what comes from outside may leave before its first use",
        "tvm_pager/planning/search/gaps.py",
        "np.flatnonzero((index.born < 0) & (index.comes_from < 0))",
        "np.flatnonzero(index.born < -1)",
        _PLANNER + "what_comes_from_outside_may_leave_before_its_first_use",
    ),
    Mutation(
        "memory that nobody wants is given up late",
        "tvm_pager/planning/search/movement.py",
        "_with_grace(grid, _fitted(grid, timetable, budget), budget)",
        "_fitted(grid, timetable, budget)",
        _PLANNER + "memory_that_nobody_wants_is_given_up_late",
    ),
    Mutation(
        "a plan that is late is made again for slower lanes",
        "policies/lookahead.py",
        "planner.plan(report.limits, self._slowness)",
        "planner.plan(report.limits)",
        _LOOKAHEAD + "plans_are_made_again_for_slow_lanes_and_the_fastest_one_stays",
    ),
    Mutation(
        "a report about another trace or budget changes nothing",
        "policies/lookahead.py",
        "        if report.limits != self._limits or report.trace is not planner.trace:\n",
        "        if False:\n",
        _LOOKAHEAD + "reports_about_something_else_are_passed_over",
    ),
    Mutation(
        "a placed page that was not written since moves nothing out",
        "tvm_pager/planning/rules/placement.py",
        "                    result[place] = index.is_dirty(page, since, after + 1)\n",
        "                    result[place] = True\n",
        _PLACEMENT + "what_was_not_written_since_moves_nothing_out",
    ),
    Mutation(
        "a placed eviction ends where its room is wanted",
        "tvm_pager/planning/rules/placement.py",
        "(pending[0][0] <= now or self.pressure.at(op) + held > budget)",
        "pending[0][0] <= now",
        _PLACEMENT + "memory_is_given_up_where_the_next_operation_wants_it",
    ),
    Mutation(
        "a placed fetch waits for room up to its need",
        "tvm_pager/planning/rules/placement.py",
        "            begin = pressure.room_from(begin, absence.until, nbytes)\n",
        "",
        _PLACEMENT + "fetches_wait_for_room_up_to_their_need",
    ),
    Mutation(
        "an absence is no longer than an iteration",
        "tvm_pager/planning/rules/absences.py",
        "    apart &= index.next_use - index.use_op <= index.num_ops",
        "    apart &= index.next_use < NEVER",
        _PLACEMENT + "absences_lie_between_uses_at_most_an_iteration_apart",
    ),
    Mutation(
        "what was changed since cannot be computed again",
        "tvm_pager/planning/rules/replays.py",
        "                elif self._is_written_between(operand, born, moment):\n",
        "                elif False:\n",
        "tests/unit/test_replays.py::test_bytes_that_were_changed_cannot_be_had_again",
    ),
    # --- plans are judged ---
    Mutation(
        "a plan that does not end as it begins is found out",
        "tvm_pager/planning/validate.py",
        "        different = sorted(set(away) ^ self._plan.absent)\n",
        "        different = sorted(set(away) & set())\n",
        _COST + "problems_are_found[actions13-absent13-absent at the end and there at the start]",
    ),
    Mutation(
        "a plan's check counts a page from its fetch on",
        "tvm_pager/planning/validate.py",
        "            self._here.add(page)\n            self._taken[Tier.DEVICE] += ",
        "            self._here.add(page)\n            self._taken[Tier.DEVICE] += 0 * ",
        _COST + "budgets_are_checked_at_every_moment",
    ),
    Mutation(
        "a plan's check counts results and workspaces",
        "tvm_pager/planning/validate.py",
        "        total = self._taken[Tier.DEVICE] + born + op.workspace_bytes\n",
        "        total = self._taken[Tier.DEVICE]\n",
        _COST + "results_and_workspaces_are_checked_too",
    ),
    Mutation(
        "a plan's check counts what lies in host memory",
        "tvm_pager/planning/validate.py",
        "            self._check_below(tier, moment)\n            if action.deadline",
        "            if action.deadline",
        _COST + "budgets_are_checked_at_every_moment",
    ),
    Mutation(
        "the model's fetches wait for room",
        "tvm_pager/planning/cost/model_run.py",
        "        if self.books.used + self._bytes[page.number] <= self._limits.device_bytes:\n",
        "        if True:\n",
        _COST + "a_fetch_without_room_waits_for_it",
    ),
    Mutation(
        "the model waits for the copy of what leaves at its deadline",
        "tvm_pager/planning/cost/model_run.py",
        "            if page.deadline is not None and page.deadline <= moment:\n",
        "            if False:\n",
        _COST + "memory_that_is_given_up_at_a_deadline_is_waited_for",
    ),
    Mutation(
        "in the model a write makes the copy below stale",
        "tvm_pager/planning/cost/model_run.py",
        "                self.books.spoil(written)\n",
        "                pass\n",
        _COST + "what_was_written_is_written_back_again",
    ),
    Mutation(
        "the model's host memory is finite",
        "tvm_pager/planning/cost/model_run.py",
        "        return self.books.below[Tier.HOST] + nbytes <= self._limits.host_bytes\n",
        "        return True\n",
        _COST + "copies_of_pages_on_the_device_make_room_on_the_host_and_then_there_is_nvme",
    ),
    Mutation(
        "in the model what is needed last leaves first",
        "tvm_pager/planning/cost/model_run.py",
        "key=lambda page: -self._next_use(page.number, op)",
        "key=lambda page: self._next_use(page.number, op)",
        _COST + "what_does_not_fit_pushes_out_what_is_needed_last",
    ),
    Mutation(
        "a plan's check knows that a write makes the copy below stale",
        "tvm_pager/planning/validate.py",
        "            self._copies.pop(number, None)\n",
        "            pass\n",
        _COST + "a_page_that_was_written_may_go_to_another_tier",
    ),
    # --- bounds ---
    Mutation(
        "a bound pays for the way out once for each version",
        "tvm_pager/planning/search/relaxation.py",
        "        value = out_cost + np.bincount(",
        "        value = 2 * out_cost + np.bincount(",
        _BOUNDS + "two_pages_in_the_room_of_one_come_and_go",
    ),
    Mutation(
        "a bound takes away what is worth its cost",
        "tvm_pager/planning/search/relaxation.py",
        "np.minimum(self.in_cost - self.relief(prices), 0.0)",
        "np.minimum(2 * self.in_cost - self.relief(prices), 0.0)",
        _BOUNDS + "two_pages_in_the_room_of_one_come_and_go",
    ),
    Mutation(
        "a gap of several iterations lies as often over each moment",
        "tvm_pager/planning/search/gaps.py",
        "laps.sum(axis=0)",
        "laps[:2].sum(axis=0)",
        _BOUNDS + "a_gap_of_more_than_one_iteration_lies_over_each_moment_as_often",
    ),
    Mutation(
        "the bound knows gaps of several iterations",
        "tvm_pager/simulation/bounds.py",
        "    gaps = all_gaps(index)\n",
        "    gaps = all_gaps(index)\n    gaps = gaps.take(gaps.length <= gaps.num_moments)\n",
        _BOUNDS + "a_gap_of_more_than_one_iteration_lies_over_each_moment_as_often",
    ),
    Mutation(
        "only what host memory cannot hold must go through the disk",
        "tvm_pager/simulation/bounds.py",
        "excess_bytes(index, device_bytes + limits.host_bytes)",
        "excess_bytes(index, device_bytes)",
        _BOUNDS + "the_roofline_names_what_limits",
    ),
    Mutation(
        "both directions at once are as fast as was measured",
        "tvm_pager/planning/search/least_step.py",
        "    return r_in, r_out, max(r_both, r_in, r_out)\n",
        "    return r_in, r_out, r_in\n",
        _PLANNER + "a_step_that_movement_makes_long_is_near_the_least_there_is",
    ),
    # --- simulation ---
    Mutation(
        "in the simulator what is queued on the device runs before a copy",
        "tvm_pager/transfer/virtual_backend.py",
        "        after = self.stream.mark() if has_device or transfer.behind else None\n",
        "        after = None\n",
        _VIRTUAL + "a_copy_begins_behind_what_is_queued_on_the_device",
    ),
    Mutation(
        "in the simulator a workspace is room that no page has",
        "tvm_pager/simulation/program.py",
        "                    least_bytes + op.workspace_bytes,\n",
        "                    least_bytes,\n",
        _SIMULATION + "workspace_is_room_that_no_page_may_have",
    ),
    Mutation(
        "in the simulator an operation waits for its operands",
        "tvm_pager/transfer/virtual_backend.py",
        "            self.stream.wait_for(ticket)\n",
        "            pass\n",
        _VIRTUAL + "an_operation_waits_for_its_fetch_and_the_host_does_not",
    ),
    Mutation(
        "in the simulator a write makes the copy below stale",
        "tvm_pager/simulation/feeder.py",
        "            pager.written(written)\n",
        "            pass\n",
        _SIMULATION + "a_dirty_page_leaves_before_the_other_comes",
    ),
)
