"""What an operator reads, writes and returns, worked out once per operator from its schema.

The dirty bit of a page is set before an operation runs, so the answer must never miss a write. It
has three sources:

1. the schema: `Tensor(a!)` is a declared write;
2. `UNDECLARED_WRITES`: operators that write without saying so, found by
   `tools/sweep_undeclared_writes.py`, which compares argument bytes around each operator call of
   torch's own operator tests, on a CPU and on a GPU;
3. operators of other namespaces: their schema is believed if it declares at least one write, or if
   it came through `torch.library.custom_op`, whose `mutates_args` is mandatory. Otherwise each
   tensor argument counts as written: who calls `Library.define("f(Tensor x) -> Tensor")` seldom
   thinks of the annotation.

A plan is per `OpOverload` and immutable; `plan_of` is one dict look-up after the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tvm_pager.errors import UnpageableError
from tvm_pager.runtime.bindings import binding_of
from tvm_pager.runtime.inference import with_views

__all__ = [
    "KEPT_BY_RESULT",
    "UNDECLARED_WRITES",
    "OperatorPlan",
    "plan_of",
    "tensor_arguments",
    "written_arguments",
    "written_tensors",
]

_STATISTICS: Final = ("running_mean", "running_var")

# Operator ("namespace::name" for all overloads, "namespace::name.overload" for one) -> every
# argument that it writes beyond its schema. An entry is complete: for an operator of another
# namespace an empty tuple says that it writes nothing, so its arguments stay clean.
UNDECLARED_WRITES: Final[dict[str, tuple[str, ...]]] = {
    # Batch normalisation in training updates the running statistics. In evaluation it does not, and
    # is marked all the same: they are small, and the flag is an argument like any other.
    "aten::native_batch_norm": _STATISTICS,
    "aten::cudnn_batch_norm": _STATISTICS,  # CUDA, seen on a GPU
    "aten::miopen_batch_norm": _STATISTICS,  # ROCm, by analogy with cudnn
    "aten::batch_norm_update_stats": _STATISTICS,
    # SyncBatchNorm: each rank folds the gathered statistics into its own.
    "aten::batch_norm_gather_stats": _STATISTICS,
    "aten::batch_norm_gather_stats_with_counts": _STATISTICS,
    # Composites of the above, dispatched whole in inference mode.
    "aten::batch_norm": _STATISTICS,
    "aten::instance_norm": _STATISTICS,
    "aten::_batch_norm_impl_index": _STATISTICS,
    # Recurrent backward kernels use the forward's reserve as scratch; it is a saved tensor, read
    # again if the graph is retained.
    "aten::_cudnn_rnn_backward": ("reserve",),  # CUDA, seen on a GPU
    "aten::miopen_rnn_backward": ("reserve",),  # ROCm, by analogy
    "aten::mkldnn_rnn_layer_backward": ("workspace",),
    # Dropout between layers advances the random state, a tensor that torch caches per device.
    "aten::_cudnn_rnn": ("dropout_state",),  # CUDA, seen on a GPU
    "aten::miopen_rnn": ("dropout_state",),  # ROCm, by analogy
    # A composite that clips the weight where it lies; dispatched whole (composites.py).
    "aten::_saturate_weight_to_fp16": ("weight",),
    # Collectives write their outputs, perhaps after the call has returned: dirty bits are not
    # enough, the pages stay pinned until the `Work` is done. Inputs are read only.
    "c10d::allreduce_": ("tensors",),
    "c10d::allreduce_coalesced_": ("tensors",),
    "c10d::broadcast_": ("tensors",),
    "c10d::reduce_": ("tensors",),
    "c10d::allgather_": ("output_tensors",),
    "c10d::_allgather_base_": ("output_tensor",),
    "c10d::allgather_coalesced_": ("output_lists",),
    "c10d::allgather_into_tensor_coalesced_": ("outputs",),
    "c10d::reduce_scatter_": ("output_tensors",),
    "c10d::_reduce_scatter_base_": ("output_tensor",),
    "c10d::reduce_scatter_tensor_coalesced_": ("outputs",),
    "c10d::gather_": ("output_tensors",),
    "c10d::scatter_": ("output_tensors",),
    "c10d::alltoall_": ("output_tensors",),
    "c10d::alltoall_base_": ("output",),
    "c10d::recv_": ("tensors",),
    "c10d::recv_any_source_": ("tensors",),
    "c10d::send": (),
    "c10d::barrier": (),
    "c10d::monitored_barrier_": (),
    # Functional collectives copy first and write the copy. These two take and return that copy,
    # and its bytes arrive by the time the first of them returns.
    "_c10d_functional::wait_tensor": ("tensor",),
    "_c10d_functional::_wrap_tensor_autograd": ("input",),
    "_c10d_functional::all_reduce": (),
    "_c10d_functional::all_reduce_coalesced": (),
    "_c10d_functional::all_gather_into_tensor": (),
    "_c10d_functional::all_gather_into_tensor_coalesced": (),
    "_c10d_functional::reduce_scatter_tensor": (),
    "_c10d_functional::reduce_scatter_tensor_coalesced": (),
    "_c10d_functional::all_to_all_single": (),
    "_c10d_functional::broadcast": (),
    # FSDP copies the shards into its all-gather buffer and returns views of it.
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}

# Operators whose result keeps these operands in C++ and reads them by pointer later: from then on
# they never leave the device.
KEPT_BY_RESULT: Final[dict[str, tuple[str, ...]]] = {
    "aten::quantize_per_channel": ("scales", "zero_points"),
    "aten::_make_per_channel_quantized_tensor": ("scale", "zero_point"),
    "aten::_empty_per_channel_affine_quantized": ("scales", "zero_points"),
    "aten::_nested_view_from_buffer": ("nested_size", "nested_strides", "offsets"),
}

_TRUSTED_NAMESPACES: Final = frozenset({"aten", "prim", "prims"})


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """Where an operator's tensors are, and what it does to them.

    Positions count the schema's arguments from 0, keyword-only ones included, and ascend.
    """

    name: str  # "aten::add.Tensor", "aten::mm.default"
    argument_names: tuple[str, ...]
    num_positional: int  # arguments from here on come by keyword only
    tensor_positions: tuple[int, ...]  # Tensor, Tensor?
    list_positions: tuple[int, ...]  # Tensor[], Tensor?[], Tensor[][] and Any, which may hold some
    tensor_names: Mapping[str, int]
    list_names: Mapping[str, int]
    written: tuple[int | str, ...]  # positions, and names of keyword-only arguments
    written_names: frozenset[str]
    writes: bool
    returns_alias: bool  # the schema says that a result may share an argument's storage
    creates: bool  # may allocate: a result that is no alias, an `out=` or a resize that may grow
    is_view: bool  # returns an alias and writes nothing
    is_pointwise: bool
    is_seeded: bool  # draws random numbers
    is_foreign: bool  # of another namespace, undeclared: counts as writing all tensor arguments
    is_foreach: bool
    is_whole: bool  # inference mode dispatches it whole, its views and versions not yet noted
    is_native: bool  # an aten operator: runs under the pager's lock, since it waits for nobody
    has_storage_args: bool  # takes a bare Storage, which no tensor argument names
    kept: tuple[int, ...]  # the arguments that its result keeps; see KEPT_BY_RESULT
    num_returns: int
    # Tensor operands by position only, none of them resized: the fast path of dispatch.py takes it.
    is_flat: bool
    operator: Any  # keeps the OpOverload alive
    call: Callable[..., Any]  # it, the quick way; see bindings.py


# For look-ups on the hot path; `plan_of` is the only writer. By `id`, because an OpOverload's hash
# is a Python call (0.2 us); each plan keeps its operator alive, so no id is used twice.
known_plans: dict[int, OperatorPlan] = {}


def plan_of(func: torch._ops.OpOverload) -> OperatorPlan:
    """The plan of `func`, built at its first call and kept for the life of the process.

    Two threads may both build it; the plans are equal and either one stays.

    Raises:
        UnpageableError: if `func` is no `OpOverload`; higher-order operators have no schema.
    """
    plan = known_plans.get(id(func))
    if plan is None:
        plan = known_plans[id(func)] = _build(func)
    return plan


def tensor_arguments(
    plan: OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[torch.Tensor]:
    """All tensors among the arguments, those in lists included; one named twice comes twice."""
    found: list[torch.Tensor] = []
    num_args = len(args)
    for position in plan.tensor_positions:
        if position >= num_args:
            break
        value = args[position]
        if value is not None:
            found.append(value)
    for position in plan.list_positions:
        if position >= num_args:
            break
        _flatten(args[position], found)
    if kwargs:
        for name, value in kwargs.items():
            if name in plan.tensor_names or name in plan.list_names:
                _flatten(value, found)
    return found


def written_arguments(
    plan: OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Iterator[Any]:
    """The arguments that the operator may write, as passed: tensors and lists of them, no None."""
    if not plan.writes:
        return
    num_args = len(args)
    for place in plan.written:
        if type(place) is int and place < num_args and args[place] is not None:
            yield args[place]
    if kwargs:
        for name, value in kwargs.items():
            if name in plan.written_names and value is not None:
                yield value


def written_tensors(
    plan: OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[torch.Tensor]:
    """`written_arguments` with the lists taken apart."""
    found: list[torch.Tensor] = []
    for value in written_arguments(plan, args, kwargs):
        _flatten(value, found)
    return found


def _flatten(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif item is not None:
                _flatten(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _flatten(item, found)


def _build(func: torch._ops.OpOverload) -> OperatorPlan:
    # `_schema` is private in name only: torch's own subclass and mode examples read it, and nothing
    # else tells which argument an operator writes.
    schema = getattr(func, "_schema", None)
    if schema is None:
        raise UnpageableError(
            f"{func} is a {type(func).__name__}, not an OpOverload, so what it reads and writes is "
            "unknown. Run it on plain tensors (tvm_pager.unpage), or the operators it stands for."
        )
    arguments = schema.arguments
    kinds = [_kind(argument.type) for argument in arguments]
    tensors = tuple(i for i, kind in enumerate(kinds) if kind == "tensor")
    lists = tuple(i for i, kind in enumerate(kinds) if kind == "list")
    names = tuple(argument.name for argument in arguments)
    name = f"{schema.name}.{schema.overload_name or 'default'}"

    written = {i for i, arg in enumerate(arguments) if arg.alias_info and arg.alias_info.is_write}
    is_foreign = False
    if (known := UNDECLARED_WRITES.get(name, UNDECLARED_WRITES.get(schema.name))) is not None:
        written.update(names.index(argument) for argument in known if argument in names)
    elif not written and not _is_declared(schema.name):
        is_foreign = bool(tensors or lists)
        written.update(tensors, lists)
    is_composite = _has_kernel(name, "CompositeImplicitAutograd")
    is_whole = is_composite and not _has_kernel(name, "ADInplaceOrView")  # as `chunk` has
    returns_alias = any(result.alias_info is not None for result in schema.returns)
    tags = func.tags
    return OperatorPlan(
        name=name,
        argument_names=names,
        num_positional=sum(not argument.kwarg_only for argument in arguments),
        tensor_positions=tensors,
        list_positions=lists,
        tensor_names={names[i]: i for i in tensors},
        list_names={names[i]: i for i in lists},
        written=tuple(names[i] if arguments[i].kwarg_only else i for i in sorted(written)),
        written_names=frozenset(names[i] for i in written),
        writes=bool(written),
        returns_alias=returns_alias,
        creates=(
            any(
                result.alias_info is None and "Tensor" in str(result.type)
                for result in schema.returns
            )
            or any(arguments[i].kwarg_only for i in written)
            or "resize" in schema.name
            # `contiguous`, `reshape`, `to` say alias and mean perhaps; inference mode dispatches
            # them whole
            or (not written and is_composite)
        ),
        is_view=returns_alias and not written,
        is_pointwise=torch.Tag.pointwise in tags,
        is_seeded=torch.Tag.nondeterministic_seeded in tags,
        is_foreign=is_foreign,
        is_foreach=name.startswith("aten::_foreach_"),
        is_whole=is_whole,
        is_native=name.startswith("aten::"),
        has_storage_args="storage" in kinds,
        kept=tuple(names.index(argument) for argument in KEPT_BY_RESULT.get(schema.name, ())),
        num_returns=len(schema.returns),
        is_flat=(
            not lists
            and "storage" not in kinds
            and name.startswith("aten::")
            and bool(tensors)
            and not any(arguments[position].kwarg_only for position in (*written, *tensors))
            and not any(word in schema.name for word in ("resize", "set_", "lift_fresh"))
            and not (returns_alias and not written and is_composite)
            and schema.name not in KEPT_BY_RESULT
        ),
        operator=func,
        call=with_views(binding_of(func)) if is_whole else binding_of(func),
    )


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name.removesuffix(".default"), key)


def _kind(type_: object) -> str:
    """Says "tensor", "list" (of whatever may hold tensors), "storage" or ""."""
    # The printed form, because the type objects' classes are private.
    text = str(type_)
    if text in {"Tensor", "Optional[Tensor]"}:
        return "tensor"
    if "Tensor" in text or text in {"Any", "List[Any]"}:
        return "list"
    return "storage" if "Storage" in text else ""


def _is_declared(qualified_name: str) -> bool:
    """Whether a schema without a declared write can be believed to write nothing."""
    if qualified_name.partition("::")[0] in _TRUSTED_NAMESPACES:
        return True
    # Private, for want of a public query: what torch.library.custom_op and triton_op have defined.
    # Where it is missing an operator counts as undeclared: that costs write-backs, never a write.
    definitions = getattr(getattr(torch, "_library", None), "custom_ops", None)
    return qualified_name in getattr(definitions, "OPDEFS", {})
