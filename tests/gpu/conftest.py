"""What every CUDA test starts from: deterministic kernels, an idle device, no memory limit."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.harness import settled_bytes

if not torch.cuda.is_initialized():
    # cuBLAS reads it when it starts, and torch demands it of deterministic runs.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


@pytest.fixture(autouse=True, scope="session")
def _collector_skips_libraries() -> Iterator[None]:
    """Every measurement starts with a full collection, which walks each object of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _deterministic_and_idle() -> Iterator[None]:
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Stale bytes must stay stale: a read of memory that was never filled has to show.
    torch.utils.deterministic.fill_uninitialized_memory = False
    settled_bytes()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.use_deterministic_algorithms(was_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    settled_bytes()
