"""Budgets change while threads train: bitwise right, and no operation fails for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.trials.changing_budgets import CPU, in_threads, in_threads_under_changes
from tests.trials.harness import assert_nothing_left

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("has_nvme", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lookahead", "teraio"])
@pytest.mark.parametrize("seed", range(2))
def test_threads_train_on_while_another_one_changes_the_budgets(
    seed: int, policy: str, has_nvme: bool, tmp_path: Path
) -> None:
    nvme = tmp_path if has_nvme else None
    assert in_threads_under_changes(CPU, policy, seed, nvme) == in_threads(CPU)
    assert_nothing_left(tmp_path)
