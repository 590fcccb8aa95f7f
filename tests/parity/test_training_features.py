"""Training loops and autograd features, paged and plain to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import AUTOGRAD, TRAINING
from tests.parity.harness import same

# torch itself scripts its decompositions for forward mode when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.mark.parametrize("name", TRAINING)
def test_training_feature_matches_plain_torch(name: str, tmp_path: Path) -> None:
    same(TRAINING[name], tmp_path=tmp_path)


@pytest.mark.parametrize("name", AUTOGRAD)
def test_autograd_feature_matches_plain_torch(name: str, tmp_path: Path) -> None:
    same(AUTOGRAD[name], tmp_path=tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "clip", "scaler", "accumulation", "checkpoint", "checkpoint-reentrant", "autocast", "tied",
        "unfrozen-by-add-param-group", "deepcopy", "resume-file", "alternating", "lbfgs-closure",
    ],
)  # fmt: skip
def test_training_feature_in_an_unmodified_script_over_three_tiers(
    name: str, tmp_path: Path
) -> None:
    same(TRAINING[name], tmp_path=tmp_path, mode="context", nvme=True)


@pytest.mark.parametrize("name", ["double-backward", "views", "functions", "hooks", "func-vmap"])
def test_autograd_feature_in_an_unmodified_script_over_three_tiers(
    name: str, tmp_path: Path
) -> None:
    same(AUTOGRAD[name], tmp_path=tmp_path, mode="context", nvme=True)


@pytest.mark.parametrize("name", ["tied", "scaler", "resume-assign", "schedule-one-cycle"])
def test_training_feature_under_the_clock_policy(name: str, tmp_path: Path) -> None:
    same(TRAINING[name], tmp_path=tmp_path, mode="adopt_model", nvme=True, policy="clock")


def test_clipping_calls_the_same_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """clip_grad_norm_ looks at exact types before it takes the list kernels."""
    program = TRAINING["clip"]
    called: list[int] = []
    norm = torch._foreach_norm

    def spy(tensors: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        called.append(len(tensors))
        return norm(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_norm", spy)
    same(program, tmp_path=tmp_path, use_cache=False)
    assert called, "plain torch no longer uses the list kernel here: this test shows nothing"
    half = len(called) // 2
    assert called[:half] == called[half:], f"norms of lists in the plain and paged run: {called}"
