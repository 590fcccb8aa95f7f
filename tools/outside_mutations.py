"""The mutations of what works on pages outside dispatch: collectives, pointers, other classes."""

from __future__ import annotations

from tools.mutation import Mutation

__all__ = ["OUTSIDE_MUTATIONS"]

_COLLECTIVES = "tests/tensor/test_collectives.py::test_"
_CLASSES = "tests/trials/test_own_classes.py::test_"
_FIRST = "tests/tools/test_profile_first_pager.py::test_"
_INFERENCE = "tests/tensor/test_inference_mode.py::test_"
_READS = "tests/tensor/test_composite_reads.py::test_what_is_read_by_pointer_is_in_place"

OUTSIDE_MUTATIONS = (
    # --- collectives ---
    Mutation(
        "pages stay while a collective works on them",
        "tvm_pager/runtime/execution.py",
        "                hold_until_done(call, out, distinct)\n",
        "                pass\n",
        _COLLECTIVES + "pages_stay_until_the_collective_is_done[all_reduce]",
    ),
    Mutation(
        "gradients of data-parallel training stay while they are summed",
        "tvm_pager/runtime/execution.py",
        "                hold_until_done(call, out, distinct)\n",
        "                pass\n",
        _COLLECTIVES + "data_parallel_training_over_pages_gives_the_same_bits",
    ),
    Mutation(
        "the end of a collective ends its hold",
        "tvm_pager/runtime/collectives.py",
        "        return self.work is not None and (\n",
        "        return False and (\n",
        _COLLECTIVES + "pages_stay_until_the_collective_is_done[all_reduce]",
    ),
    Mutation(
        "an iteration boundary does not end the hold of a collective",
        "tvm_pager/paging/holds.py",
        "work.ends_at_boundary or work.done()",
        "True",
        _COLLECTIVES + "pages_stay_until_the_collective_is_done[broadcast]",
    ),
    Mutation(
        "an iteration boundary ends a hold whose end nobody tells",
        "tvm_pager/paging/holds.py",
        "work.ends_at_boundary or work.done()",
        "work.done()",
        _COLLECTIVES + "an_unfinished_exchange_is_held_until_the_next_boundary[False]",
    ),
    Mutation(
        "the Work of a coalesced operation is not believed",
        "tvm_pager/runtime/collectives.py",
        "    is_coalescing = _is_coalescing()\n",
        "    is_coalescing = False\n",
        _COLLECTIVES + "an_unfinished_exchange_is_held_until_the_next_boundary[True]",
    ),
    Mutation(
        "a functional collective is run as its parts",
        "tvm_pager/runtime/execution.py",
        "    if is_functional(plan):\n        return",
        "    if False:\n        return",
        _COLLECTIVES + "pages_of_a_functional_collective_stay_until_it_is_done[all_gather]",
    ),
    Mutation(
        "results of a functional collective that a mode hid are held",
        "tvm_pager/runtime/execution.py",
        "            hold_until_boundary(context, wrapped)\n",
        "            pass\n",
        _COLLECTIVES + "results_over_plain_inputs_are_held_too[True]",
    ),
    Mutation(
        "a request that lacks room waits for collectives",
        "tvm_pager/paging/holds.py",
        "        return any(work.is_awaitable for work in self.works)\n",
        "        return False\n",
        _COLLECTIVES + "a_request_that_lacks_room_waits_for_a_collective",
    ),
    Mutation(
        "a request does not wait for what two ranks exchange",
        "tvm_pager/paging/holds.py",
        "        return any(work.is_awaitable for work in self.works)\n",
        "        return bool(self.works)\n",
        _COLLECTIVES + "a_request_does_not_wait_for_what_it_may_have_to_answer",
    ),
    Mutation(
        "works that are done are let go of without a lack of room",
        "tvm_pager/paging/holds.py",
        "            self.poll()\n",
        "            pass\n",
        _COLLECTIVES + "finished_collectives_keep_nothing_alive",
    ),
    # --- reads by pointer ---
    Mutation(
        "what composite code reads by pointer is in place",
        "tvm_pager/runtime/composites.py",
        "        context.fault_in(page, operator.name())\n        core.hold(page)\n",
        "        core.hold(page)\n",
        _READS + "[tensor_split-before]",
    ),
    Mutation(
        "what composite code reads by pointer stays in place",
        "tvm_pager/runtime/composites.py",
        "        core.hold(page)\n    try:\n",
        "        page.pins -= 1\n        core.hold(page)\n    try:\n",
        _READS + "[LSTM-each]",
    ),
    Mutation(
        "lengths that composite code writes by pointer are on no page",
        "tvm_pager/runtime/composites.py",
        "        if func is not torch.ops.aten.empty.memory_format:\n",
        "        if func is not None:\n",
        _READS + "[pad_packed_sequence-each]",
    ),
    Mutation(
        "composites that work by pointer throughout are dispatched whole",
        "tvm_pager/runtime/composites.py",
        '    "_sobol_engine_draw",\n',
        "",
        _READS + "[Sobol sequence-each]",
    ),
    Mutation(
        "what a result keeps in C++ never leaves the device",
        "tvm_pager/runtime/execution.py",
        "        context.hold_for_good(call.argument(position))\n",
        "        pass\n",
        _READS + "[quantization per channel-each]",
    ),
    Mutation(
        "C++ objects in a storage are not paged",
        "tvm_pager/runtime/results.py",
        '        "aten::fbgemm_pack_quantized_matrix.default",\n',
        "",
        _READS + "[int8 linear-before]",
    ),
    Mutation(
        "scalars are read where dispatch is off",
        "tvm_pager/runtime/paged_tensor.py",
        "read(self, _Base.item) if _is_excluded(_python) else _Base.item(self)",
        "_Base.item(self)",
        _READS + "[tensor of floats-before]",
    ),
    # --- classes of the user's own ---
    Mutation(
        "what a class of its own lies on never leaves the device",
        "tvm_pager/runtime/own_classes.py",
        "            context.hold_for_good(data)\n",
        "",
        _CLASSES + "it_stays_on_the_device_which_is_said_once[Subclassed]",
    ),
    Mutation(
        "what a class of its own lies on has no copies below",
        "tvm_pager/runtime/own_classes.py",
        "            context.core.written(page)  # perhaps, and nobody would see it\n",
        "",
        _CLASSES + "it_stays_on_the_device_which_is_said_once[Subclassed]",
    ),
    Mutation(
        "Parameter's own maker keeps the class that it is asked for",
        "tvm_pager/runtime/own_classes.py",
        "            return _make_subclass_over(cls, data, requires_grad)\n",
        "            pass\n",
        _CLASSES + "a_parameter_of_its_own_class_can_be_made_in_a_pager[Inherited]",
    ),
    Mutation(
        "as_subclass gives the class that it is asked for",
        "tvm_pager/runtime/paged_tensor.py",
        "        if issubclass(PagedTensor, cls):\n",
        "        if cls is not None:\n",
        _CLASSES + "a_parameter_of_its_own_class_can_be_made_in_a_pager[Viewed]",
    ),
    Mutation(
        "lazy modules are no class of their own",
        "tvm_pager/runtime/own_classes.py",
        "    if page is not None and page.nbytes:",
        "    if page is not None:",
        _CLASSES + "lazy_modules_can_be_made_in_a_pager",
    ),
    Mutation(
        "unpage takes the pages of other classes too",
        "tvm_pager/runtime/adoption.py",
        "            if page is not None and (context is None or page.pager is context):\n"
        "                owner",
        "            if page is not None and isinstance(tensor, PagedTensor):\n"
        "                owner",
        _CLASSES + "unpage_takes_their_bytes_out_of_the_books",
    ),
    # --- composites in inference mode ---
    Mutation(
        "composites in inference mode have views and versions",
        "tvm_pager/runtime/inference.py",
        "    return _BelowWithViews() if plan.is_whole and _is_inference() else _guard()\n",
        "    return _guard()\n",
        _INFERENCE + "composite_operators_act_as_in_plain_torch",
    ),
    Mutation(
        "composites on the fast path have them too",
        "tvm_pager/runtime/inference.py",
        "        if not _is_inference():\n            return call(*args, **kwargs)\n",
        "        return call(*args, **kwargs)\n",
        _INFERENCE + "the_fast_path_does_too",
    ),
    # --- the hardware profile ---
    Mutation(
        "the pager that a hardware profile measures needs no profile",
        "tvm_pager/observe/profile/dispatch.py",
        '_POLICY = "lru"',
        '_POLICY = "lookahead"',
        _FIRST + "the_first_pager_of_a_machine_measures_it_once",
    ),
    Mutation(
        "the environment has no say in what a hardware profile measures",
        "tvm_pager/pager.py",
        "Pager(config=PagerConfig(torch_device=torch_device, host=host, policy=policy))",
        "Pager(torch_device=torch_device, host=host)",
        _FIRST + "the_command_measures_whatever_policy_the_environment_names",
    ),
    Mutation(
        "of several processes one measures the machine",
        "tvm_pager/observe/profile/cache.py",
        "                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "                pass\n",
        _FIRST + "of_two_processes_one_measures_and_the_other_waits_for_it",
    ),
    Mutation(
        "who has waited for a measurement takes it",
        "tvm_pager/observe/profile/cache.py",
        "_kept(places, identity.key, say) if has_waited else None",
        "None",
        _FIRST + "of_two_processes_one_measures_and_the_other_waits_for_it",
    ),
)
