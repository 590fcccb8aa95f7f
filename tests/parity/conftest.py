"""Keeps the leak checks of two hundred runs cheap."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _collector_skips_libraries() -> Iterator[None]:
    """A full collection walks every object of every library: 0.2 s with transformers.

    Each run ends with two of them, so what exists before the first run is set aside.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
