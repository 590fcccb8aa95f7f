"""Training and generation on CUDA give the same bits paged as plain, over two and three tiers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.harness import MIB, same
from tests.gpu.programs import (
    DEPTH,
    WIDTH,
    Convolutions,
    CudnnLSTM,
    Generation,
    HalfPrecision,
    Llama,
    Trained,
)
from tests.parity.programs_training import Checkpointed, Clip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

ADAM = importlib.import_module("torch.optim.adam")
IMPLEMENTATIONS = ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam")


@pytest.mark.parametrize(
    ("settings", "expected", "nvme", "mode"),
    [
        ({}, "_multi_tensor_adam", False, "context"),
        ({}, "_multi_tensor_adam", True, "adopt"),
        ({"fused": True}, "_fused_adam", True, "context"),
        ({"foreach": False}, "_single_tensor_adam", False, "adopt"),
    ],
    ids=["default", "default-adopted", "fused", "loop-adopted"],
)
def test_adamw_takes_the_same_implementation_and_gives_the_same_bits(
    settings: dict[str, bool],
    expected: str,
    nvme: bool,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []

    def spy(name: str, implementation: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            taken.append(name)
            implementation(*args, **kwargs)

        return call

    for name in IMPLEMENTATIONS:
        monkeypatch.setattr(ADAM, name, spy(name, getattr(ADAM, name)))
    program = Trained(make=functools.partial(torch.optim.AdamW, **settings))
    same(program, tmp_path, nvme=nvme, mode=mode)
    assert taken == [expected] * 6, "two steps of two plain runs and of a paged one"


def test_channels_last_convolutions_with_batch_norm(tmp_path: Path) -> None:
    same(Convolutions(), tmp_path, nvme=True)


@pytest.mark.parametrize("mode", ["context", "adopt"])
def test_cudnn_lstm_whose_weights_share_a_storage(mode: str, tmp_path: Path) -> None:
    same(CudnnLSTM(), tmp_path, nvme=mode == "context", mode=mode, segment_bytes="8MiB")


@pytest.mark.parametrize("mode", ["context", "adopt"])
def test_llama_with_bf16_parameters(mode: str, tmp_path: Path) -> None:
    same(Llama(dtype=torch.bfloat16), tmp_path, nvme=mode == "adopt", mode=mode)


def test_llama_under_bf16_autocast_with_checkpointing(tmp_path: Path) -> None:
    same(Llama(autocast=True, checkpointed=True), tmp_path, nvme=True)


@pytest.mark.parametrize("fused", [False, True], ids=["unscaled", "fused"])
def test_fp16_with_a_gradient_scaler_whose_gradients_exceed_the_budget(
    fused: bool, tmp_path: Path
) -> None:
    """`unscale_` names all gradients at once, which are 64 MiB."""
    program = HalfPrecision(fused=fused)
    stats = same(program, tmp_path, fraction=0.18, nvme=not fused)
    assert stats.device_peak_bytes < 80 * MIB


def test_clipping_of_gradients_that_exceed_the_budget(tmp_path: Path) -> None:
    program = Clip(num_steps=2, width=WIDTH, depth=DEPTH)
    stats = same(program, tmp_path, fraction=0.17, nvme=True)
    assert stats.device_peak_bytes < 64 * MIB


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_dropout_again(use_reentrant: bool, tmp_path: Path) -> None:
    program = Checkpointed(2, WIDTH, DEPTH, use_reentrant=use_reentrant)
    same(program, tmp_path, nvme=use_reentrant)


def test_generation_with_a_kv_cache(tmp_path: Path) -> None:
    same(Generation(), tmp_path, nvme=True)
