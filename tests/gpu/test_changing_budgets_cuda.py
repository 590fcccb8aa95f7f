"""Budgets change while threads train on the GPU; the trial of tests/trials, with larger pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.harness import settled_bytes
from tests.trials.changing_budgets import CUDA, in_threads, in_threads_under_changes
from tvm_pager.runtime.device import prepare_cuda

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("has_nvme", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lookahead"])
def test_threads_train_on_while_another_one_changes_the_budgets(
    policy: str, has_nvme: bool, tmp_path: Path
) -> None:
    prepare_cuda(torch.device("cuda", torch.cuda.current_device()))  # as the pager will, here
    expected = in_threads(CUDA)  # every thread has had its cuBLAS workspace then
    nvme = tmp_path if has_nvme else None
    assert in_threads_under_changes(CUDA, policy, 0, nvme, settled_bytes()) == expected
