"""The first pager of a machine measures it, with a pager: one that needs no profile itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.tools.profile_rig import QUICK_TINY
from tvm_pager import Pager, assembly, cli
from tvm_pager.observe.profile import cache
from tvm_pager.pager import plain_pager

if TYPE_CHECKING:
    from pathlib import Path

    from tvm_pager.planning import HardwareProfile


@pytest.fixture
def num_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """CPU tensors as the device, measured as a GPU is where no figures are assumed for it."""
    asked: list[str] = []

    def as_on_a_gpu(engine: str) -> HardwareProfile:
        asked.append(engine)
        assert len(asked) < 3, "the pager that is measured has itself measured"
        return cache.load_or_measure(plain_pager, torch_device="cpu", is_quick=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(assembly, "assumed_profile", as_on_a_gpu)
    monkeypatch.setattr(cache, "QUICK", QUICK_TINY)
    return asked


def test_the_first_pager_of_a_machine_measures_it_once(
    num_measured: list[str], tmp_path: Path
) -> None:
    with Pager(device="1MiB", host="1MiB", torch_device="cpu") as pager:
        assert pager.config.policy == "lookahead"  # one that plans, or this says nothing
        assert torch.ones(4).sum() == 4
    assert len(num_measured) == 1
    assert len(list(tmp_path.glob("tvm_pager/profile-*-quick.json"))) == 1


def test_the_command_measures_whatever_policy_the_environment_names(
    num_measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setenv("TVM_PAGER_POLICY", "lookahead")
    monkeypatch.setenv("TVM_PAGER_CHECK", "2")  # would be measured too
    assert cli.main(["profile", "--quick", "--torch-device", "cpu"]) == 0
    assert num_measured == []
    assert "launch" in capsys.readouterr().out
