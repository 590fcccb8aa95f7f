"""`Pager.set_policy` on a model that trains: the same bits, budgets kept, nothing left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trials.harness import KIB, Run, assert_within_budgets, batch, mlp, same, small_pager
from tvm_pager import ConfigError, PagerClosedError, PagerError, PolicyError
from tvm_pager.observe.profile.assumed import assumed_profile
from tvm_pager.planning import available_policies
from tvm_pager.runtime import device as runtime_device

TIGHT = 112 * KIB  # of about 300 that a step of `mlp(5)` takes
PLANNING = ("lookahead", "teraio", "flashneuron", "capuchin", "zero_infinity")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    optimizer.zero_grad()
    loss = model(batch(index)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_switching_among_all_policies_gives_the_same_bits(nvme: bool, tmp_path: Path) -> None:
    policies = [name for name in available_policies() for _ in range(2)]

    def program(run: Run) -> list[float]:
        model = mlp(5)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        losses = [step(model, optimizer, index) for index in range(4)]
        for index, name in enumerate(policies * 2):
            if run.pager is not None and not index % 2:
                run.pager.set_policy(name)
                run.pager.check_invariants()
            losses.append(step(model, optimizer, 4 + index))
        return losses

    host = 256 * KIB if nvme else 2048 * KIB
    stats = same(program, tmp_path, device=TIGHT, host=host, nvme=nvme, policy="lookahead")
    assert stats.plans.split(", ")[-1].startswith(("2 recordings", "3 recordings")), stats.plans


@pytest.mark.parametrize("name", PLANNING)
def test_a_policy_that_plans_takes_over_from_lru(name: str, tmp_path: Path) -> None:
    with small_pager(tmp_path, device=TIGHT, host=2048 * KIB, nvme=False) as pager:
        model = mlp(5)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for index in range(3):
            step(model, optimizer, index)
        assert pager.trace() is None
        pager.set_policy(name)
        assert pager.config.policy == name
        for index in range(5):
            step(model, optimizer, index)
        pager.check_invariants()
        iterations = pager._core.iterations
        assert iterations.is_planned
        assert iterations.outcomes.counts["complete"] > 0
        pager.set_policy("lru")
        for index in range(2):
            step(model, optimizer, index)
        assert not iterations.is_planned
        assert iterations.follower is iterations.recorder is pager._core.watch is None
        assert_within_budgets(pager.stats())
        del model, optimizer


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    with small_pager(tmp_path, device=TIGHT, host=2048 * KIB, nvme=False, policy="clock") as pager:
        model = mlp(3)
        before = pager._core.device_policy.policy, pager.config
        with pytest.raises(PolicyError, match="no policy is called 'lur'"):
            pager.set_policy("lur")
        with pytest.raises(ConfigError, match="policy=None"):
            pager.set_policy(None)
        assert (pager._core.device_policy.policy, pager.config) == before
        model(batch(0))
        del model


def test_a_profile_that_does_not_exist_changes_nothing(tmp_path: Path) -> None:
    """It is needed for the first policy that plans, and only then looked at."""
    missing = str(tmp_path / "none.json")
    with small_pager(tmp_path, profile=missing, nvme=False, host=2048 * KIB) as pager:
        before = pager._core.device_policy.policy
        with pytest.raises(ConfigError, match=r"none\.json"):
            pager.set_policy("lookahead")
        assert pager._core.device_policy.policy is before
        assert pager.config.policy == "lru"
        assumed_profile("posix").save(missing)
        pager.set_policy("lookahead")


def test_no_machine_is_measured_while_pages_are_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with small_pager(tmp_path, nvme=False, host=2048 * KIB) as pager:
        parts = pager._parts
        monkeypatch.setattr(parts, "device", runtime_device.torch.device("meta"))
        monkeypatch.setattr("tvm_pager.runtime.device.resolve_device", torch.device)
        with pytest.raises(ConfigError, match="tvm-pager profile"):
            pager.set_policy("lookahead")
        assert pager.config.policy == "lru"


def test_it_is_refused_inside_an_operation(tmp_path: Path) -> None:
    answers: list[str] = []
    library = torch.library.Library("set_policy_test", "DEF")
    library.define("ask(Tensor x) -> Tensor")

    def ask(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(PagerError) as caught:
            pager.set_policy("clock")
        answers.append(str(caught.value))
        return torch.empty(1)

    library.impl("ask", ask, "CompositeExplicitAutograd")
    with small_pager(tmp_path, nvme=False, host=2048 * KIB) as pager:
        x = torch.ones(64)
        torch.ops.set_policy_test.ask(x)
        assert answers
        assert "set_policy" in answers[0]
        assert "between operations" in answers[0]
        pager.set_policy("clock")
        del x
    library._destroy()


def test_it_is_refused_when_the_pager_is_closed(tmp_path: Path) -> None:
    pager = small_pager(tmp_path, nvme=False, host=2048 * KIB)
    pager.close()
    with pytest.raises(PagerClosedError, match="set_policy"):
        pager.set_policy("clock")


def test_a_hook_may_switch_in_the_middle_of_an_iteration(tmp_path: Path) -> None:
    def program(run: Run) -> list[float]:
        model = mlp(5)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        names = ["lru", "lookahead", "belady", "teraio"] * 3
        losses = [step(model, optimizer, index) for index in range(5)]

        def switch(*_: Any) -> None:
            if run.pager is not None and names:
                run.pager.set_policy(names.pop())
                run.pager.check_invariants()

        model[4].register_full_backward_hook(switch)
        return losses + [step(model, optimizer, 5 + index) for index in range(14)]

    same(program, tmp_path, device=TIGHT, host=2048 * KIB, nvme=False, policy="lookahead")
