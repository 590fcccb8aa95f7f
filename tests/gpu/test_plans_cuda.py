"""Iterations on CUDA are recorded with device times, planned and followed, to the same bits."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import pytest
import torch

from tests.gpu.harness import open_pager, same, settled_bytes
from tests.gpu.programs import Generation, Llama, Trained
from tvm_pager.observe.profile.assumed import assumed_profile
from tvm_pager.planning import Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

ADAMW = functools.partial(torch.optim.AdamW, foreach=False)
NUM_STEPS = 7  # the fourth is the first that can follow a plan


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """No machine is measured for these tests."""
    path = tmp_path / "profile.json"
    assumed_profile("posix").save(path)
    return str(path)


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
@pytest.mark.parametrize("policy", ["lookahead", "tests.model.tiny_planner:TinyPlanner"])
def test_a_planned_training_gives_the_same_bits(
    policy: str, nvme: bool, profile: str, tmp_path: Path
) -> None:
    program = Trained(make=ADAMW, num_steps=NUM_STEPS)
    stats = same(program, tmp_path, nvme=nvme, policy=policy, profile=profile)
    assert "plans: 3 of" in stats.plans or "plans: 4 of" in stats.plans, stats.plans


def test_a_planned_llama_gives_the_same_bits(profile: str, tmp_path: Path) -> None:
    stats = same(Llama(num_steps=NUM_STEPS), tmp_path, policy="lookahead", profile=profile)
    assert "iterations followed to the end" in stats.plans


def test_generation_is_followed_token_by_token(profile: str, tmp_path: Path) -> None:
    program = Generation(num_steps=3)
    stats = same(program, tmp_path, policy="lookahead", profile=profile, fraction=0.5)
    assert "iterations followed to the end" in stats.plans


def test_device_times_and_workspaces_are_recorded(tmp_path: Path) -> None:
    program = Trained(make=ADAMW, num_steps=1)
    with open_pager(tmp_path, device=settled_bytes() + (2 << 30)) as pager:
        with torch.device("cuda"):
            model, optimizer = program.build()
            pager.record()
            for index in range(4):
                program.step(model, optimizer, index)
            torch.zeros(1)  # the first operation of the next iteration
        trace = pager.trace()
        del model, optimizer
    assert trace is not None
    products = [op for op in trace.ops if op.name == "aten::mm.default"]
    # 2 x 32 x 1024 x 1024 operations take microseconds, and no millisecond.
    assert all(1_000 < op.compute_ns < 1_000_000 for op in products)
    # As much as a few MB take, though an idle device has to wait for each launch: that takes 30 us.
    roots = [op.compute_ns for op in trace.ops if op.name == "aten::sqrt.default"]
    assert statistics.median(roots) < 15_000, roots
    assert all(op.compute_ns == 0 for op in trace.ops if op.name == "aten::t.default")
    assert {op.phase for op in trace.ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}
    assert 1_000 < trace.launch_ns < 1_000_000
    assert any(op.module >= 0 for op in trace.ops if op.phase is Phase.BACKWARD)
