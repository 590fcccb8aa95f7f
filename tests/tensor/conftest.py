"""The pager that tests of the torch runtime share."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from tests.trials.harness import assert_nothing_left, assert_within_budgets, small_pager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pager(tmp_path: Path) -> Iterator[Any]:
    """An entered pager with everything checked after each operation; nothing may be left of it."""
    with small_pager(tmp_path, check=2) as pager:
        yield pager
        gc.collect()
        pager.check_invariants()
        assert_within_budgets(pager.stats())
    assert_nothing_left(tmp_path)
