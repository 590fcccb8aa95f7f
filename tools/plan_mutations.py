"""The mutations of what the pager makes of traces and plans: checked, followed, carried out."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["PLAN_MUTATIONS"]

_RUNNER = "tests/unit/test_plan_runner.py::test_"
_KEPT = "tests/unit/test_plans_kept.py::test_"
_FOLLOWER = "tests/unit/test_follower.py::test_"
_RECORDER = "tests/unit/test_recorder.py::test_"
_POLICIES = "tests/unit/test_policies.py::test_"

PLAN_MUTATIONS = (
    # --- what a policy says is checked ---
    Mutation(
        "an action that names no page of the trace is left out",
        "tvm_pager/paging/plan_book.py",
        "                _is_int(subject, last)\n",
        "                True\n",
        _RUNNER + "illegal_actions_raise_if_strict_and_are_left_out_if_not[action0]",
    ),
    Mutation(
        "an action that ends before it begins is left out",
        "tvm_pager/paging/plan_book.py",
        "                and _is_int(action.earliest, action.deadline)\n",
        "",
        _RUNNER + "illegal_actions_raise_if_strict_and_are_left_out_if_not[action2]",
    ),
    Mutation(
        "an action that sends a page where it cannot go is left out",
        "tvm_pager/paging/plan_book.py",
        "                and (kind not in _TARGETS or action.to in _TARGETS[kind])\n",
        "",
        _RUNNER + "illegal_actions_raise_if_strict_and_are_left_out_if_not[action4]",
    ),
    Mutation(
        "a strict pager raises what a policy does wrong in a plan",
        "tvm_pager/paging/planner.py",
        "        if self._strict:\n            if isinstance(error, PolicyError):",
        "        if False:\n            if isinstance(error, PolicyError):",
        _RUNNER + "illegal_actions_raise_if_strict_and_are_left_out_if_not[action0]",
    ),
    Mutation(
        "a policy that raises in plan costs the plan and nothing else",
        "tvm_pager/paging/planner.py",
        '            self._blame(f"raised {error!r} in plan", error)\n',
        "            raise\n",
        _RUNNER + "what_is_no_plan_is_refused[a plan]",
    ),
    Mutation(
        "a policy that raises in feedback costs its answer and nothing else",
        "tvm_pager/paging/planner.py",
        '            self._blame(f"raised {error!r} in feedback", error)\n',
        "            raise\n",
        _KEPT + "a_policy_that_raises_in_feedback_keeps_its_plan",
    ),
    Mutation(
        "a plan is made anew where the device budget changes",
        "tvm_pager/paging/planner.py",
        "        and planned.device_bytes * _LESS <= limits.device_bytes"
        " <= planned.device_bytes * _MORE\n",
        "",
        _RUNNER + "a_plan_is_made_anew_when_the_budget_changes",
    ),
    Mutation(
        "a plan stays where the device budget changes by little",
        "tvm_pager/paging/planner.py",
        "_LESS, _MORE = 0.99, 1.05",
        "_LESS, _MORE = 1, 1",
        _KEPT + "a_plan_stays_where_the_budget_changes_by_little",
    ),
    Mutation(
        "a plan is made anew where NVMe is closed",
        "tvm_pager/paging/planner.py",
        "        and planned.nvme_bytes == limits.nvme_bytes\n",
        "",
        _KEPT + "a_plan_is_made_anew_when_nvme_is_closed",
    ),
    Mutation(
        "a victim that is held or not there is refused",
        "tvm_pager/paging/tier_policy.py",
        " or page_id not in self._known or not view.evictable(page_id)",
        "",
        _POLICIES + "an_illegal_choice_is_refused_by_name[held]",
    ),
    Mutation(
        "a victim that is named twice counts once",
        "tvm_pager/paging/tier_policy.py",
        "            if page_id in seen or",
        "            if",
        _POLICIES + "an_illegal_choice_is_refused_by_name[twice]",
    ),
    Mutation(
        "victims that free too little are refused",
        "tvm_pager/paging/tier_policy.py",
        "        return None if freed >= need_bytes else f",
        "        return None if freed else f",
        _POLICIES + "an_illegal_choice_is_refused_by_name[too little]",
    ),
    Mutation(
        "a victim goes to a tier below",
        "tvm_pager/paging/tier_policy.py",
        "            if to is not None and to <= self.tier:\n",
        "            if False:\n",
        _POLICIES + "an_illegal_choice_is_refused_by_name[upwards]",
    ),
    Mutation(
        "a policy that misbehaves is replaced, and not asked again",
        "tvm_pager/paging/tier_policy.py",
        "        self.policy = self._make_fallback()\n        for page_id in self._known:\n",
        "        for page_id in ():\n",
        _POLICIES + "a_policy_that_misbehaves_is_replaced_once_and_the_numbers_are_right[Hostile]",
    ),
    # --- traces are recognised, followed and left ---
    Mutation(
        "a followed trace says what a new page holds",
        "tvm_pager/paging/view.py",
        "    return page.kind if number is None else follower.known.trace.pages[number].kind\n",
        "    return page.kind\n",
        "tests/model/test_simulator_equals_runtime.py::"
        + "test_a_policy_for_some_kinds_decides_about_the_same_pages_as_in_the_runtime",
    ),
    Mutation(
        "the next operation of a trace names the pages of the trace",
        "tvm_pager/paging/follower.py",
        "                    if number_of(page.id) != expected[place]:\n",
        "                    if False:\n",
        _FOLLOWER + "skipped_layers_are_passed_over",
    ),
    Mutation(
        "skipped operations are passed over",
        "tvm_pager/paging/follower.py",
        "        found = self._search(name, distinct)\n",
        "        found = None\n",
        _FOLLOWER + "skipped_layers_are_passed_over",
    ),
    Mutation(
        "where the trace is left for good, demand decides",
        "tvm_pager/paging/iterations.py",
        "        if follower.num_lost > WINDOW:\n",
        "        if False:\n",
        _RUNNER + "a_fetch_that_has_not_begun_is_called_off_when_the_trace_is_left",
    ),
    Mutation(
        "a gradient is known as the one that the next iteration frees",
        "tvm_pager/paging/known_trace.py",
        "                    pages[number] = page._replace(becomes=target)\n",
        "                    pass\n",
        _RECORDER + "what_lives_on_becomes_itself_and_a_gradient_becomes_the_one_that_is_freed",
    ),
    Mutation(
        "another model of the same structure has other pages",
        "tvm_pager/paging/known_trace.py",
        "                recording.numbers.get(page_id, number) == number\n",
        "                True\n",
        _FOLLOWER + "another_model_of_the_same_structure_is_not_followed_as_this_one",
    ),
    Mutation(
        "a trace is recorded anew once its program has grown",
        "tvm_pager/paging/iterations.py",
        "                follower.known.is_confirmed = False",
        "                pass",
        _FOLLOWER + "a_trace_is_recorded_anew_once_the_program_has_grown",
    ),
    # --- plans are carried out ---
    Mutation(
        "what was fetched for nothing is released",
        "tvm_pager/paging/plan_runner.py",
        "        self.unused.clear()\n        self.release_unwanted()\n",
        "        self.unused.clear()\n",
        _RUNNER + "what_was_fetched_for_nothing_is_released",
    ),
    Mutation(
        "a fetch takes no room that an operation before its deadline wants",
        "tvm_pager/paging/plan_runner.py",
        "        if busiest_bytes <= room:\n",
        "        if True:\n",
        _RUNNER + "a_fetch_never_takes_what_an_operation_before_its_deadline_creates",
    ),
    Mutation(
        "an eviction is over at its deadline",
        "tvm_pager/paging/plan_runner.py",
        "            is_due = moment >= action.deadline\n",
        "            is_due = False\n",
        _RUNNER + "an_eviction_writes_back_from_its_moment_and_is_over_at_its_deadline[False]",
    ),
    Mutation(
        "what the plan keeps leaves last",
        "tvm_pager/paging/victims.py",
        "            return 4\n",
        "            pass\n",
        _RUNNER + "what_is_kept_leaves_last",
    ),
    Mutation(
        "what is about to die is not written back for the room of others",
        "tvm_pager/paging/victims.py",
        "        return 3\n",
        "        return 2\n",
        _KEPT + "what_is_about_to_die_leaves_after_what_must_only_come_back",
    ),
    Mutation(
        "prefetches that have arrived are not kept for ever",
        "tvm_pager/paging/prefetcher.py",
        "        if len(self._pages) > self._most:\n",
        "        if False:\n",
        _KEPT + "pages_that_a_plan_has_fetched_are_not_kept_for_ever",
    ),
)
