"""Small runs of every operator that torch's own tests know, for sweeps that watch operators.

OpInfos run forward, in place, with `out=`, backward and double backward, in grad mode and in
inference mode, where composite operators are dispatched whole; then the module and optimizer tests'
inputs, a few operators that none of them reaches, and the collectives.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.fsdp  # registers the operators of namespace fsdp
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.utils import _pytree as pytree

# Importing torch's test modules freezes torch.backends.*.enabled for the whole process, which is
# not ours to impose on it.
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal import common_methods_invocations as opinfos
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

__all__ = [
    "Case",
    "Options",
    "all_cases",
    "all_opinfos",
    "collective_cases",
    "further_cases",
    "module_cases",
    "operator_cases",
    "opinfo_samples",
    "optimizer_cases",
    "other_cases",
    "sample_label",
]

_FALLBACK_DTYPES = (torch.int64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)


class Case(NamedTuple):
    """One small run."""

    name: str  # of the OpInfo, module, optimizer
    source: str  # which sample, run how
    run: Callable[[], object]


@dataclass(frozen=True)
class Options:
    """Which cases there are."""

    limit: int = 3  # samples per operator, dtype and way of running it
    filter: str = ""  # names that contain it
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # of an operator's; if none, a fallback
    is_thorough: bool = True  # double backward and non-contiguous inputs too


def all_cases(options: Options) -> Iterator[Case]:
    """Every case of this process; collectives need several."""
    yield from operator_cases(options)
    yield from other_cases(options)


def other_cases(options: Options) -> Iterator[Case]:
    """All but the OpInfos."""
    yield from module_cases(options)
    yield from optimizer_cases(options)
    yield from further_cases(options)


def all_opinfos() -> list[Any]:
    """Every OpInfo of torch's operator tests, foreach ones included."""
    return [
        *opinfos.op_db,
        *opinfos.foreach_unary_op_db,
        *opinfos.foreach_binary_op_db,
        *opinfos.foreach_pointwise_op_db,
        *opinfos.foreach_reduce_op_db,
        *opinfos.foreach_other_op_db,
    ]


def sample_label(op: Any, dtype: torch.dtype) -> str:
    """`name.variant.dtype`."""
    parts = (op.name, op.variant_test_name, str(dtype).removeprefix("torch."))
    return ".".join(part for part in parts if part)


def opinfo_samples(
    op: Any, device: str, dtype: torch.dtype, limit: int, requires_grad: bool = False
) -> Iterator[Any]:
    """The first `limit` samples, always the same ones: seeds torch, numpy and `random` for each."""
    # Not `op.sample_inputs`: it inspects the whole call stack each time, which under pytest takes
    # twenty times longer than everything else here together.
    samples = iter(op.sample_inputs_func(op, device, dtype, requires_grad))
    for _ in range(limit):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        try:
            yield next(samples)
        except StopIteration:
            return


def operator_cases(options: Options, names: Collection[str] | None = None) -> Iterator[Case]:
    """The OpInfos, or those of these names only."""
    for op in all_opinfos():
        if options.filter in op.name and (names is None or op.name in names):
            supported = op.supported_dtypes(options.device)
            dtypes = [dtype for dtype in options.dtypes if dtype in supported]
            dtypes = dtypes or [dtype for dtype in _FALLBACK_DTYPES if dtype in supported][:1]
            for dtype in dtypes:
                yield from _opinfo_cases(op, dtype, options)


def _opinfo_cases(op: Any, dtype: torch.dtype, options: Options) -> Iterator[Case]:
    def cases(
        way: str, run: Callable[[Any], object], requires_grad: bool = False
    ) -> Iterator[Case]:
        samples = opinfo_samples(op, options.device, dtype, options.limit, requires_grad)
        for index, sample in enumerate(samples):
            source = f"{sample_label(op, dtype)}[{index}] {way}"
            yield Case(op.name, source, partial(run, sample))

    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    twice = options.is_thorough and op.supports_gradgrad
    yield from cases("grad", lambda s: _forward_backward(op.op, s, twice), differentiable)
    yield from cases("inference", lambda s: _inference(op.op, s))
    if options.is_thorough:
        yield from cases("noncontiguous", lambda s: _inference(op.op, s.noncontiguous()))
    if op.inplace_variant is not None:
        yield from cases("inplace", lambda s: _inplace(op.inplace_variant, s))
    if op.supports_out and not op.name.startswith("_foreach"):  # those have no `out=` in Python
        yield from cases("out", lambda s: _out(op.op, s))


def _forward_backward(call: Callable[..., object], sample: Any, twice: bool) -> None:
    result = call(sample.input, *sample.args, **sample.kwargs)
    inputs = _differentiable((sample.input, sample.args, sample.kwargs))
    outputs = [out for out in _differentiable(result) if out.grad_fn is not None]
    if not inputs or not outputs:
        return
    weights = [torch.ones_like(out, requires_grad=twice) for out in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights, create_graph=twice, allow_unused=True)
    again = [grad for grad in grads if grad is not None and grad.requires_grad]
    if again:
        weights = [torch.ones_like(grad) for grad in again]
        torch.autograd.grad(again, inputs, weights, allow_unused=True)


def _differentiable(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _inference(call: Callable[..., object], sample: Any) -> None:
    with torch.inference_mode():
        call(sample.input, *sample.args, **sample.kwargs)


def _inplace(variant: Callable[..., object], sample: Any) -> None:
    if getattr(sample, "broadcasts_input", False):
        return
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            target = pytree.tree_map_only(torch.Tensor, torch.clone, sample.input)
            variant(target, *sample.args, **sample.kwargs)


def _out(call: Callable[..., Any], sample: Any) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = call(sample.input, *sample.args, **sample.kwargs)
            out = pytree.tree_map_only(torch.Tensor, torch.empty_like, result)
            out = tuple(out) if isinstance(out, (tuple, list)) else out
            call(sample.input, *sample.args, **sample.kwargs, out=out)


def module_cases(options: Options) -> Iterator[Case]:
    """Modules in training, twice, the second time in inference mode; and in evaluation."""
    for info in module_db:
        if options.filter not in info.name or torch.float32 not in info.dtypes:
            continue
        for training in (True, False):
            inputs = info.module_inputs_func(
                info, options.device, torch.float32, requires_grad=True, training=training
            )
            for index, given in enumerate(itertools.islice(inputs, options.limit)):
                way = "training" if training else "inference"
                yield Case(
                    info.name,
                    f"{info.name}[{index}] {way}",
                    partial(_module, info.module_cls, given, training, options.device),
                )


def _module(module_cls: Any, given: Any, training: bool, device: str) -> None:
    made, forward = given.constructor_input, given.forward_input
    module = module_cls(*made.args, **made.kwargs).to(device, torch.float32).train(training)
    if forward is None:
        return
    with torch.inference_mode(not training):
        result = module(*forward.args, **forward.kwargs)
    outputs = [out for out in _differentiable(result) if out.grad_fn is not None]
    torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    with torch.inference_mode():
        module(*forward.args, **forward.kwargs)


def optimizer_cases(options: Options) -> Iterator[Case]:
    """Two steps of each optimizer: one tensor at a time, foreach, fused."""
    for info in list[Any](optim_db):
        name = info.optim_cls.__name__
        if options.filter not in name:
            continue
        ways: list[dict[str, bool]] = [{}]
        ways += [{way: True} for way in ("foreach", "fused") if way in info.supported_impls]
        if options.device not in info.supports_fused_on:
            ways = [way for way in ways if "fused" not in way]
        inputs = list(itertools.islice(info.optim_inputs_func(options.device), options.limit))
        for given, way in itertools.product(inputs, ways):
            yield Case(
                name,
                f"{name}[{given.desc}] {' '.join(way)}",
                partial(_optimizer, info, {**given.kwargs, **way}, options.device),
            )


def _optimizer(info: Any, kwargs: dict[str, Any], device: str) -> None:
    weights = [torch.rand(3, 4, device=device, requires_grad=True) for _ in range(2)]
    optimizer = info.optim_cls(weights, **kwargs)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack(weights).sin().square().sum()
        torch.autograd.backward(loss)
        if info.only_supports_sparse_grads:
            for weight in weights:
                assert weight.grad is not None
                weight.grad = weight.grad.to_sparse()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def further_cases(options: Options) -> Iterator[Case]:
    """Operators that no OpInfo, module or optimizer test reaches."""
    for name, run in _further(options.device):
        if options.filter in name:
            yield Case(name, name, run)


def _further(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    aten = torch.ops.aten
    data, counts = torch.rand(4, 3, 5, 5, device=device), torch.full((2,), 50.0, device=device)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    means, deviations = torch.rand(2, 2, 3, device=device).unbind()

    @torch.inference_mode()
    def whole_batch_norm() -> None:
        aten._batch_norm_impl_index(data, None, None, mean, var, True, 0.1, 1e-5, True)

    yield "_batch_norm_impl_index", whole_batch_norm
    yield "batch_norm_update_stats", lambda: aten.batch_norm_update_stats(data, mean, var, 0.1)
    if device != "cpu":  # SyncBatchNorm's
        gathered = (data, means, deviations, mean, var, 0.1, 1e-5)
        yield "batch_norm_gather_stats", lambda: aten.batch_norm_gather_stats(*gathered, 50)
        yield (
            "batch_norm_gather_stats_with_counts",
            lambda: aten.batch_norm_gather_stats_with_counts(*gathered, counts),
        )
    observer = FusedMovingAvgObsFakeQuantize().to(device)
    yield "FusedMovingAvgObsFakeQuantize", lambda: observer(data)
    yield "GradScaler", lambda: _scaled_step(device)
    parts = [torch.rand(size, device=device) for size in (3, 5)]
    whole = torch.rand(16, device=device)
    copy_in = torch.ops.fsdp.all_gather_copy_in
    yield "fsdp.all_gather_copy_in", lambda: copy_in(parts, whole, [3, 5], 8, 1)
    for recurrent in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        for bias, layers in itertools.product((True, False), (1, 2)):
            net = recurrent(
                4, 5, layers, bias=bias, dropout=0.5 * (layers - 1), bidirectional=True
            ).to(device)
            name = f"{recurrent.__name__}(num_layers={layers}, bias={bias})"
            yield name, partial(_recurrent, net, device)


def _scaled_step(device: str) -> None:
    weight = torch.nn.Parameter(torch.rand(3, 4, device=device))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler(device)
    torch.autograd.backward(scaler.scale(weight.square().sum()))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    scaler.update()


def _recurrent(net: Any, device: str) -> None:
    for is_fused in (True, False):
        with torch.backends.cudnn.flags(is_fused), torch.backends.mkldnn.flags(is_fused):
            sequence = torch.rand(6, 2, 4, device=device, requires_grad=True)
            result, _ = net(sequence)
            torch.autograd.grad(result.sum(), [sequence, *net.parameters()])


def collective_cases(rank: int) -> Iterator[Case]:
    """Collectives of a default process group of two; both ranks run them in this order."""
    for name, run in _collectives(rank):
        yield Case(name, f"{name} on rank {rank}", run)
    for name, start in _functional_collectives():
        yield Case(name, name, partial(_start_and_wait, start))


def _start_and_wait(start: Callable[[], object]) -> object:
    return pytree.tree_map(functional.wait_tensor, start())


def _collectives(rank: int) -> Iterator[tuple[str, Callable[[], object]]]:
    def full(num_elements: int = 4) -> torch.Tensor:
        return torch.rand(num_elements) + rank

    def pair() -> list[torch.Tensor]:
        return [full(), full()]

    def pair_on_first() -> list[torch.Tensor] | None:
        return pair() if rank == 0 else None

    def coalesced(start: Callable[[], object]) -> None:
        # Private, and the only way to the coalesced operators.
        with dist.distributed_c10d._coalescing_manager():
            start()
            start()

    def there_and_back() -> None:
        other = 1 - rank
        if rank == 0:
            dist.send(full(), other)
            receive(full(), other)
            dist.send(full(), other)
        else:
            receive(full(), other)
            dist.send(full(), other)
            receive(full())  # from anyone, which is another operator

    receive: Callable[..., object] = dist.recv
    yield "all_reduce", lambda: dist.all_reduce(full())
    yield "all_reduce_coalesced", lambda: dist.all_reduce_coalesced(pair())
    yield "broadcast", lambda: dist.broadcast(full(), 0)
    yield "reduce", lambda: dist.reduce(full(), 0)
    yield "all_gather", lambda: dist.all_gather(pair(), full())
    yield "all_gather_coalesced", lambda: dist.all_gather_coalesced([[full()], [full()]], [full()])
    yield "all_gather_into_tensor", lambda: dist.all_gather_into_tensor(full(8), full())
    yield "gather", lambda: dist.gather(full(), pair_on_first(), 0)
    yield "scatter", lambda: dist.scatter(full(), pair_on_first(), 0)
    yield "reduce_scatter", lambda: dist.reduce_scatter(full(), pair())
    yield "reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(full(), full(8))
    yield "all_to_all", lambda: dist.all_to_all(pair(), pair())
    yield "all_to_all_single", lambda: dist.all_to_all_single(full(), full())
    yield "send and recv", there_and_back
    yield "barrier", dist.barrier
    yield "monitored_barrier", dist.monitored_barrier
    yield "coalesced all_reduce", lambda: coalesced(lambda: dist.all_reduce(full()))
    yield (
        "coalesced all_gather",
        lambda: coalesced(lambda: dist.all_gather_into_tensor(full(8), full())),
    )
    yield (
        "coalesced reduce_scatter",
        lambda: coalesced(lambda: dist.reduce_scatter_tensor(full(), full(8))),
    )


def _functional_collectives() -> Iterator[tuple[str, Callable[[], object]]]:
    f, ranks, two = functional, [0, 1], [2, 2]

    def full() -> torch.Tensor:
        return torch.rand(4) + dist.get_rank()

    def pair() -> list[torch.Tensor]:
        return [full(), full()]

    yield "functional all_reduce", lambda: f.all_reduce(full(), "sum", ranks)
    yield "functional all_gather", lambda: f.all_gather_tensor(full(), 0, ranks)
    yield "functional reduce_scatter", lambda: f.reduce_scatter_tensor(full(), "sum", 0, ranks)
    yield "functional all_to_all", lambda: f.all_to_all_single(full(), two, two, ranks)
    yield "functional broadcast", lambda: f.broadcast(full(), 0, ranks)
    yield "functional all_reduces", lambda: f.all_reduce_coalesced(pair(), "sum", ranks)
    yield "functional all_gathers", lambda: f.all_gather_into_tensor_coalesced(pair(), ranks)
    yield (
        "functional reduce_scatters",
        lambda: f.reduce_scatter_tensor_coalesced(pair(), "sum", [0, 0], ranks),
    )
