"""The mutations of what is learned of programs that change: boundaries, traces, expectations."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["TRACE_MUTATIONS"]

_BOUNDARIES = "tvm_pager/runtime/boundaries.py"
_FOLLOWER = "tvm_pager/paging/follower.py"
_KNOWN = "tvm_pager/paging/known_trace.py"
_FEEDER = "tvm_pager/simulation/feeder.py"
_HELD = "tests/unit/test_simulation.py::test_a_copy_down_keeps_a_dead_page_until_it_has_ended"
_TURNS = "tests/tensor/test_alternating_iterations.py::test_"
_TRACES = "tests/unit/test_changing_traces.py::test_"

TRACE_MUTATIONS = (
    # --- where an iteration begins ---
    Mutation(
        "the next model begins an iteration, not what comes before it",
        _BOUNDARIES,
        "        self._has_models = True\n",
        "        pass\n",
        _TURNS + "what_comes_between_an_update_and_the_next_model_belongs_to_the_update",
    ),
    Mutation(
        "a program that enters models no more has iterations",
        _BOUNDARIES,
        "if self._pages_at_end is not None and created >",
        "if False and created >",
        _TURNS + "a_program_that_enters_models_no_more_has_iterations_again",
    ),
    Mutation(
        "what two optimizers create one after the other is no iteration",
        _BOUNDARIES,
        "created > self._pages_at_end + _MANY",
        "created >= self._pages_at_end",
        _TURNS + "two_optimizers_one_after_the_other_wait_for_one_model",
    ),
    Mutation(
        "blocks that are called one by one make one iteration",
        _BOUNDARIES,
        "is_quiet and id(model) in self._quiet",
        "is_quiet and bool(self._quiet)",
        _TURNS + "blocks_that_a_program_calls_one_by_one_make_one_iteration",
    ),
    Mutation(
        "blocks that are checkpointed make one iteration",
        _BOUNDARIES,
        "is_quiet and id(model) in self._quiet",
        "is_quiet and bool(self._quiet)",
        _TURNS + "blocks_that_are_checkpointed_make_one_iteration[True]",
    ),
    Mutation(
        "a step of training after evaluation begins an iteration",
        _BOUNDARIES,
        " or is_again or was_quiet:",
        " or is_again:",
        _TURNS + "each_of_three_kinds_has_one_trace_in_the_end",
    ),
    Mutation(
        "a module at whose entry recording ends is let go",
        "tvm_pager/runtime/call_record.py",
        "        if self._handles:  # else",
        "        if True:  # else",
        _TURNS + "a_model_at_whose_entry_recording_ends_is_let_go",
    ),
    # --- which page is which ---
    Mutation(
        "an input that the program keeps does not stand for the next one",
        _FOLLOWER,
        " and not self.known.is_input(number):",
        ":",
        _TRACES + "inputs_that_the_program_keeps_do_not_stand_for_the_next_ones",
    ),
    Mutation(
        "an input that is replaced has no number any more",
        _FOLLOWER,
        "                    del self._numbers[replaced.id]\n",
        "                    pass\n",
        _TRACES + "an_input_that_is_replaced_has_no_number_any_more",
    ),
    Mutation(
        "what is learned replaces what was known",
        _FOLLOWER,
        " and ((page := self.pages[number]) is None or page.id == page_id)\n",
        "\n",
        _TRACES + "an_input_that_is_replaced_has_no_number_any_more",
    ),
    # --- what comes next ---
    Mutation(
        "one other iteration after many equal ones is not expected after each",
        _KNOWN,
        "_FADING = 0.75",
        "_FADING = 0.0",
        _TRACES + "one_other_iteration_after_many_equal_ones_is_not_expected_after_each",
    ),
    Mutation(
        "a program that has changed is expected to stay so",
        _KNOWN,
        "_FADING = 0.75",
        "_FADING = 1.0",
        _TRACES + "one_other_iteration_after_many_equal_ones_is_not_expected_after_each",
    ),
    # --- when something is recorded again ---
    Mutation(
        "a recording of what is known keeps its plan",
        _KNOWN,
        "        if self.is_confirmed and self.created_bytes",
        "        if False and self.created_bytes",
        _TRACES + "a_recording_of_what_is_known_keeps_trace_and_plan",
    ),
    Mutation(
        "a recording of another size brings another plan",
        _KNOWN,
        "        if self.is_confirmed and self.created_bytes == _created_bytes(recording.trace):",
        "        if self.is_confirmed:",
        _TRACES + "a_recording_of_another_size_brings_another_plan",
    ),
    Mutation(
        "an iteration that ends a little early was followed to its end",
        _FOLLOWER,
        "min(_MAX_TAIL, num_ops // _TAIL_PART)",
        "0",
        _TRACES + "an_iteration_that_ends_a_little_early_was_followed_to_its_end",
    ),
    Mutation(
        "an iteration that ends much earlier was not",
        _FOLLOWER,
        "min(_MAX_TAIL, num_ops // _TAIL_PART)",
        "_MAX_TAIL",
        _TRACES + "an_iteration_that_ends_much_earlier_was_not",
    ),
    Mutation(
        "what leaves a trace in the same way again and again has one of its own",
        _KNOWN,
        "[1] >= _NUM_ALIKE\n",
        "[1] >= 1000\n",
        _TRACES + "what_leaves_a_trace_in_the_same_way_again_and_again_has_one_of_its_own[AAXX]",
    ),
    Mutation(
        "what leaves a trace in another way each time has none",
        _KNOWN,
        "num + 1 if before == deviation else 1",
        "num + 1",
        _TRACES + "what_leaves_a_trace_in_another_way_each_time_has_none",
    ),
    Mutation(
        "what comes behind the end of a trace makes no other one",
        _FOLLOWER,
        "        if not self.is_nearly_over:\n            self.deviation",
        "        if True:\n            self.deviation",
        _TRACES + "what_comes_behind_the_end_of_a_trace_makes_no_other_one",
    ),
    Mutation(
        "what is away since an earlier iteration need not leave",
        "tvm_pager/paging/plan_runner.py",
        "            if moment == 0 and isinstance(action, Evict):\n",
        "            if False:\n",
        "tests/unit/test_plan_runner.py::test_"
        "what_is_away_since_an_earlier_iteration_is_no_action_that_lapsed",
    ),
    Mutation(
        "what has died while it was copied down has died in its iteration",
        "tvm_pager/paging/iterations.py",
        "            self._pager.flight.await_copies_down()",
        "            pass",
        "tests/tensor/test_recorded_iterations.py::test_"
        "what_dies_on_its_way_down_dies_in_its_own_iteration",
    ),
    Mutation(
        "what is dead before the next iteration begins is no part of it",
        _KNOWN,
        " and pages[target].died != 0\n",
        "\n",
        "tests/unit/test_simulation.py::test_"
        "what_dies_after_its_iteration_is_not_recorded_to_die_in_it",
    ),
    Mutation(
        "policies plan for the launches of the trace that is simulated",
        _FEEDER,
        "pager.iterations.launch_ns = program.trace.launch_ns or launch_ns",
        "pass",
        "tests/unit/test_simulation.py::test_a_policy_plans_for_the_trace_that_is_simulated",
    ),
    Mutation(
        "a simulated copy down keeps a dead page",
        _FEEDER,
        "        if self._is_held(page):\n",
        "        if False:\n",
        _HELD + "[False]",
    ),
    Mutation(
        "a simulated iteration is recorded with the deaths of its trace",
        _FEEDER,
        "            and self._pager.recorder is None\n",
        "",
        _HELD + "[True]",
    ),
    Mutation(
        "what has died before an iteration ends has died in it",
        "tvm_pager/paging/iterations.py",
        "        self._pager.drain()  # what has died since",
        "        # what has died since",
        "tests/tensor/test_recorded_iterations.py::test_"
        "what_dies_before_the_next_model_dies_in_its_own_iteration",
    ),
    Mutation(
        "a launch takes not what recording takes",
        "tvm_pager/paging/recorder.py",
        "        entry.excess_ns = self._clock() - begun_ns\n",
        "        self._clock()\n",
        "tests/unit/test_recorder.py::test_"
        "a_launch_takes_neither_the_recording_nor_what_runs_meanwhile",
    ),
    Mutation(
        "a follower keeps no dead pages",
        "tvm_pager/paging/pager.py",
        "                follower.died(page)\n",
        "                pass\n",
        "tests/unit/test_follower.py::test_a_dead_page_is_not_kept_until_the_iteration_ends",
    ),
)
