"""What is measured beside a benchmark's blocks takes nothing from the pager that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.harness import open_pager, settled_bytes
from tools.machine_meter import MachineMeter

pytestmark = pytest.mark.gpu


def test_link_and_launch_are_measured_beside_a_pager(tmp_path: Path) -> None:
    before_bytes = torch.cuda.memory_allocated()
    with MachineMeter() as machine:
        assert torch.cuda.memory_allocated() - before_bytes == 512  # of what is launched
        with open_pager(tmp_path, device=settled_bytes() + (1 << 30)) as pager:
            ones = torch.ones(1024, device="cuda")
            num_pages = pager.stats().num_pages
            assert 1e9 < machine.link_bytes_per_s() < 1e12
            assert 1e-6 < machine.launch_s() < 1e-3
            assert pager.stats().num_pages == num_pages
            assert ones.sum().item() == 1024
