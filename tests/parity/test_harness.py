"""The harness itself: budgets are tight, runs repeat, and a difference does not go unseen."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from tests.parity.cases import AUTOGRAD, MODELS, TRAINING
from tests.parity.footprint import measure
from tests.parity.harness import Snapshot, differences, run_plain, take
from tests.parity.programs import MLP

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

PROGRAMS = {**MODELS, **TRAINING, **AUTOGRAD}
NOT_MEASURED = {
    "minilm",  # building it copies every weight once, which the pager does not see in its mode
    "other-thread",  # dispatch modes do not follow it to its thread; it is the MLP otherwise
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_MEASURED])
def test_device_budget_is_a_third_of_the_need(name: str) -> None:
    program = PROGRAMS[name]
    footprint = measure(copy.copy(program))
    assert program.device_bytes <= 0.37 * footprint.peak_bytes
    assert program.device_bytes >= 1.15 * footprint.largest_operation_bytes, (
        footprint.largest_operation
    )


@pytest.mark.parametrize("name", ["mlp", "cnn-2d", "llama", "graph"])
def test_plain_runs_repeat(name: str) -> None:
    assert differences(run_plain(MODELS[name]), run_plain(MODELS[name])) == []


def _changed(snapshot: Snapshot, attribute: str) -> Snapshot:
    changes: dict[str, Any] = {
        "raw": bytes([snapshot.raw[0] ^ 1]) + snapshot.raw[1:],
        "version": snapshot.version + 1,
        "dtype": torch.float64,
        "stride": (1, 24),
        "grad_fn": "Other",
    }
    return dataclasses.replace(snapshot, **{attribute: changes[attribute]})


@pytest.mark.parametrize("attribute", ["raw", "version", "dtype", "stride", "grad_fn"])
@pytest.mark.parametrize("part", ["outputs", "weights", "gradients", "states"])
def test_one_difference_is_found(part: str, attribute: str) -> None:
    plain, other = run_plain(MLP(num_steps=1)), run_plain(MLP(num_steps=1))
    entries = getattr(other, part)
    name = next(name for name, entry in entries.items() if isinstance(entry, Snapshot))
    entries[name] = _changed(entries[name], attribute)
    found = differences(plain, other)
    assert len(found) == 1
    assert f"{part} {name}: {attribute}" in found[0]


def test_missing_entry_is_found() -> None:
    plain, other = run_plain(MLP(num_steps=1)), run_plain(MLP(num_steps=1))
    del other.states["0.3.exp_avg"]
    assert any("0.3.exp_avg" in line for line in differences(plain, other))


def test_not_a_number_equals_itself() -> None:
    tensor = torch.tensor([torch.nan, 1.0])
    assert take(tensor) == take(tensor.clone())
