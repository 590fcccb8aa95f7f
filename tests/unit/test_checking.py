"""Check levels: a flipped bit is detected at level 1, wrong books at level 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tvm_pager
from tests.trials.harness import small_pager


def flip_a_bit_of_the_slab(pager: tvm_pager.Pager) -> None:
    pager._backend._slab.view(0, 4096)[0][100] ^= 1


@pytest.mark.parametrize("check", [0, 1, 2])
def test_a_flipped_bit_is_detected_from_level_one_on(tmp_path: Path, check: int) -> None:
    with small_pager(tmp_path, nvme=False, check=check) as pager:
        kept = torch.arange(1024.0)
        expected = kept.tolist()
        assert pager.evict_all()
        with torch._C._DisableTorchDispatch():
            flip_a_bit_of_the_slab(pager)
        if check == 0:
            assert kept.tolist() != expected
            return
        with pytest.raises(tvm_pager.TransferError, match="checksum"):
            kept.sum()
        with torch._C._DisableTorchDispatch():
            flip_a_bit_of_the_slab(pager)
        assert kept.tolist() == expected, "a failed fetch is tried again"


def test_released_memory_is_poisoned(tmp_path: Path) -> None:
    with small_pager(tmp_path, nvme=False, check=1) as pager:
        kept = torch.zeros(1024)
        seen: list[int] = []
        release = pager._backend.release_device

        def look(memory: Any, *others: Any) -> None:
            seen.extend(memory.tolist()[:4])
            release(memory, *others)

        pager._backend.release_device = look  # type: ignore[method-assign]
        pager.evict_all()
        assert seen == [0xDB] * 4
        assert kept.sum().item() == 0.0


def test_level_two_checks_the_books_after_each_operation(tmp_path: Path) -> None:
    with small_pager(tmp_path, nvme=False, check=2) as pager:
        kept = torch.ones(16)
        pager._core.table.committed_bytes += 1
        with pytest.raises(AssertionError, match="committed"):
            kept + 1
        pager._core.table.committed_bytes -= 1
        assert (kept + 1).sum().item() == 32.0
