"""Programs of the suite under policies that plan, long enough to be planned: the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.parity.cases import MODELS, TRAINING
from tests.parity.harness import same
from tvm_pager.config import PagerConfig

NUM_STEPS = 7  # the fourth is the first that can follow a plan


@pytest.mark.parametrize("policy", ["lookahead", "tests.model.tiny_planner:TinyPlanner"])
@pytest.mark.parametrize("name", ["mlp", "cnn-2d", "llama-tied", "experts", "llama-generate"])
@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_a_planned_program_matches_plain_torch(
    name: str, policy: str, nvme: bool, tmp_path: Path
) -> None:
    program = dataclasses.replace(MODELS[name], num_steps=NUM_STEPS)
    check = int(nvme and policy == "lookahead")
    stats = same(program, tmp_path=tmp_path, nvme=nvme, policy=policy, use_cache=False, check=check)
    assert "iterations followed to the end" in stats.plans


@pytest.mark.parametrize("name", [name for name in MODELS if name != "minilm"])
def test_the_default_policy_matches_plain_torch_over_three_tiers(name: str, tmp_path: Path) -> None:
    same(MODELS[name], tmp_path=tmp_path, mode="context", nvme=True, policy=PagerConfig().policy)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint-reentrant"])
def test_checkpointing_under_the_default_policy(name: str, tmp_path: Path) -> None:
    """Iterations are recorded while parts of the model run again."""
    program = dataclasses.replace(TRAINING[name], num_steps=NUM_STEPS)
    same(program, tmp_path=tmp_path, mode="context", policy=PagerConfig().policy)


@pytest.mark.parametrize("name", ["mlp", "llama-tied"])
def test_pages_that_go_to_nvme_and_come_back_by_host_memory(name: str, tmp_path: Path) -> None:
    program = dataclasses.replace(MODELS[name], num_steps=NUM_STEPS)
    policy = "tests.model.tiny_planner:TinyStager"
    stats = same(program, tmp_path=tmp_path, nvme=True, policy=policy, use_cache=False)
    assert stats.bytes_by_lane["d2n"] > 0
    assert stats.bytes_by_lane["n2h"] > 0
