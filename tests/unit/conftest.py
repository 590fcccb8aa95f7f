"""The swap files, block stores and torch backends that several tests of the transfer room share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.small_backends import DEVICES, MIB, Make, small_backends
from tvm_pager.transfer.posix import PosixStore
from tvm_pager.transfer.swap_file import SwapFile


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(device: str, tmp_path: Path) -> Iterator[Make]:
    with small_backends(device, tmp_path) as build:
        yield build


@pytest.fixture(params=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SwapFile]:
    file = SwapFile(tmp_path, 16 * MIB, direct=request.param == "direct")
    if file.io != request.param:
        file.close()
        pytest.skip(f"no {request.param} I/O in {tmp_path}")
    yield file
    file.close()


@pytest.fixture
def store(file: SwapFile) -> Iterator[PosixStore]:
    store = PosixStore(file)
    yield store
    store.close()
