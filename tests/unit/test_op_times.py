"""Modelled device times: arithmetic or bytes, whichever takes longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tvm_pager.errors import ConfigError
from tvm_pager.estimate import trace
from tvm_pager.testing.machines import example_profile

PROFILE = example_profile()  # 700 TFLOP/s in bf16, 50 in fp32; copies of 2 TB/s
GB = 10**9


def times(make: Callable[[], Callable[[], object]], **options: Any) -> dict[str, int]:
    """Nanoseconds by operation; tensors have no bytes here, so they may be large."""
    found = trace(make, PROFILE, **options)
    return {op.name.removeprefix("aten::"): op.compute_ns for op in found.ops}


def product(dtype: torch.dtype) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        x = torch.empty(7000, 7000, dtype=dtype)
        return lambda: x @ x

    return make


@pytest.mark.parametrize(
    ("dtype", "flop_per_s"),
    [(torch.bfloat16, 700e12), (torch.float16, 700e12), (torch.float32, 50e12)],
)
def test_products_take_their_arithmetic_at_the_rate_of_the_dtype(
    dtype: torch.dtype, flop_per_s: float
) -> None:
    expected_ns = 2 * 7000**3 / flop_per_s * 1e9
    assert times(product(dtype))["mm.default"] == pytest.approx(expected_ns, rel=1e-3)


def test_efficiency_lengthens_everything_but_the_shortest_kernel() -> None:
    whole, half = (times(product(torch.bfloat16), efficiency=x)["mm.default"] for x in (1, 0.5))
    assert half == pytest.approx(2 * whole, rel=1e-3)
    with pytest.raises(ConfigError, match=r"efficiency=1\.5 must be above 0 and at most 1"):
        trace(product(torch.bfloat16), PROFILE, efficiency=1.5)


def test_other_operations_take_their_bytes() -> None:
    def make() -> Callable[[], object]:
        a, b = torch.empty(GB, dtype=torch.uint8), torch.empty(GB, dtype=torch.uint8)

        def step() -> None:
            a.add_(b)  # reads 2 GB and writes 1: three quarters of a copy's 2 + 2 a ms
            a.clone()
            b.copy_(a)
            a.zero_()
            a.view(-1)
            a[:10] + 1

        return step

    found = times(make)
    assert found["add_.Tensor"] == pytest.approx(0.75e6, rel=1e-3)
    assert found["clone.default"] == pytest.approx(0.5e6, rel=1e-3)
    assert found["copy_.default"] == pytest.approx(0.5e6, rel=1e-3)
    assert found["zero_.default"] == pytest.approx(0.25e6, rel=1e-3)
    assert found["view.default"] == found["slice.Tensor"] == 0
    assert found["add.Tensor"] == 2000  # the shortest kernel


def test_what_is_not_read_does_not_count() -> None:
    def make() -> Callable[[], object]:
        table, ids = torch.empty(10**6, 1000), torch.zeros(1000, dtype=torch.int64)
        row = torch.empty(1, 1000)

        def step() -> None:
            torch.nn.functional.embedding(ids, table)  # 4 MB of 4 GB
            row.expand(1000, 1000) + row  # an operand of 4 kB, not of 4 MB

        return step

    found = times(make)
    assert found["embedding.default"] == pytest.approx((4e6 + 4e6 + 8e3) / 4e12 * 1e9, rel=1e-2)
    assert found["add.Tensor"] == pytest.approx(2000)


def test_attention_counts_as_the_device_would_run_it() -> None:
    def make() -> Callable[[], object]:
        q, k, v = (
            torch.empty(4, 32, 2048, 128, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v).backward(q)

    found = {name: ns for name, ns in times(make).items() if "attention" in name}
    flop = 2 * 2 * 4 * 32 * 2048 * 2048 * 128  # two products
    forward, backward = sorted(found.values())
    assert forward == pytest.approx(flop / 700e12 * 1e9, rel=1e-2)
    assert backward == pytest.approx(2.5 * forward, rel=1e-2)  # five products
