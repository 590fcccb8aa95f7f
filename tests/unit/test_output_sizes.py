"""Signatures of operations: what may change from call to call without making a new one."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tvm_pager
from tvm_pager.runtime import dispatch, execution
from tvm_pager.runtime.outputs import OutputSizes

aten = torch.ops.aten
ONES = torch.ones(4, 4)


def key(func: Any, *args: Any, **kwargs: Any) -> Any:
    return OutputSizes("cpu", None).key(func, args, kwargs)


@pytest.mark.parametrize(
    ("func", "calls"),
    [
        (aten.addcdiv_.default, [((ONES, ONES, ONES), {"value": v}) for v in (-0.1, -0.2)]),
        (aten.lerp_.Scalar, [((ONES, ONES, weight), {}) for weight in (0.1, 0.2)]),
        (aten.mul.Tensor, [((ONES, factor), {}) for factor in (1j, 2j)]),
        (aten._foreach_addcdiv_.ScalarList, [(([ONES],) * 3 + ([v],), {}) for v in (0.1, 0.2)]),
        (
            aten._fused_adamw_.default,
            [(([ONES],) * 5 + ([ONES],), {"lr": lr, "beta1": 0.9}) for lr in (0.1, 0.01)],
        ),
    ],
)
def test_a_number_that_scales_values_makes_no_new_signature(func: Any, calls: Any) -> None:
    first, second = (key(func, *args, **kwargs) for args, kwargs in calls)
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("func", "calls"),
    [
        (aten.arange.default, [((2.5,), {}), ((3.5,), {})]),
        (
            aten.upsample_nearest1d.vec,
            [((ONES[None], None, [scale]), {}) for scale in (2.0, 3.0)],
        ),
        (aten.mul.Tensor, [((ONES, 2), {}), ((ONES, 2.0), {})]),
        (aten.mul.Tensor, [((ONES, 2.0), {}), ((ONES, 2j), {})]),
        (aten.repeat.default, [((ONES, [2, 1]), {}), ((ONES, [3, 1]), {})]),
        (aten.mean.dim, [((ONES, [0]), {}), ((ONES, [1]), {})]),
    ],
)
def test_what_may_change_sizes_does(func: Any, calls: Any) -> None:
    first, second = (key(func, *args, **kwargs) for args, kwargs in calls)
    assert first != second


def test_the_fast_path_finds_what_the_general_one_has_measured() -> None:
    with tvm_pager.Pager(device="1MiB", host="1MiB", torch_device="cpu") as pager:
        sizes = pager._context.sizes
        for func, args, kwargs in [
            (aten.add.Tensor, (ONES, 0.5), {"alpha": 2.0}),
            (aten.mean.dim, (ONES, [0], True), {"dtype": torch.float64}),
            (aten.native_layer_norm.default, (ONES, [4], None, None, 1e-5), {}),
        ]:
            sizes.observe(sizes.key(func, args, kwargs), 12345, None)
            assert dispatch._known_bytes(pager._context, id(func), args, kwargs) == 12345


def test_a_generator_is_no_part_of_a_signature_and_is_let_go() -> None:
    """It sizes nothing; a program that makes one for each batch had each kept for ever."""
    with tvm_pager.Pager(device="1MiB", host="1MiB", torch_device="cpu") as pager:
        sizes = pager._context.sizes
        x = torch.ones(8)
        num_signatures = []
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            torch.randint(100, (4, 5), generator=generator)
            x.normal_(generator=generator)
            num_signatures.append(len(sizes.by_key))
            args, kwargs = (x, 0.0, 1.0), {"generator": generator}
            sizes.observe(sizes.key(aten.normal_.default, args, kwargs), 777, None)
            func_id = id(aten.normal_.default)
            assert dispatch._known_bytes(pager._context, func_id, args, kwargs) == 777
        last = weakref.ref(generator)
        del generator, kwargs
        assert last() is None
    assert num_signatures[0] < num_signatures[1] == num_signatures[3]


def measured_after(
    warmup: int, *, device: int | None = None, foreach: bool = False
) -> Counter[str]:
    """First operations of a signature in three steps of AdamW, under the conditions of CUDA."""
    measured: Counter[str] = Counter()
    run = execution._run_measured

    def count(call: Any, *rest: Any) -> Any:
        measured[call.plan.name] += 1
        return run(call, *rest)

    with tvm_pager.Pager(device=device, host="1MiB", torch_device="cpu") as pager:
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        context = pager._context
        context.is_cpu = context.is_simple = False
        context.current_executor = lambda: context.owner_executor
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, foreach=foreach)
        for step in range(warmup + 3):
            with patch.object(execution, "_run_measured", count if step >= warmup else run):
                layers(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return measured


@pytest.mark.parametrize("foreach", [False, True])
def test_a_steady_training_step_measures_nothing(foreach: bool) -> None:
    assert measured_after(0, device=1 << 20)
    assert not measured_after(3, device=1 << 20, foreach=foreach)


def test_without_a_budget_nothing_is_measured() -> None:
    assert not measured_after(0)
