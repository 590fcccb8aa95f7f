"""Section D of the trials, direct I/O: where it is refused, pages go through the page cache."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trials.harness import (
    KIB,
    Run,
    assert_nothing_left,
    bytes_to_nvme,
    create_until_refused,
    everything,
    mlp,
    same,
    small_pager,
    train,
)
from tests.unit.block_io import refuse_direct_open, refuse_direct_transfers
from tvm_pager.transfer.swap_file import SwapFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REFUSALS = pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.EOPNOTSUPP], ids=["EINVAL", "EOPNOTSUPP"]
)
ODD = (1, 3, 511, 513, 4095, 4097, 9001, 12289)  # bytes of a page


def odd_pages(run: Run, meanwhile: Callable[[], None]) -> Any:
    """Pages of odd sizes, written through views at odd offsets, over several trips to the disk."""
    pages = [torch.arange(size, dtype=torch.int32).to(torch.uint8) for size in ODD]
    for turn in range(4):
        run.evict()
        if turn == 2 and run.pager:
            meanwhile()
        for page in pages:
            page[1::3].bitwise_xor_(0x5A + turn)
            page[len(page) // 2 :].add_(1)
    run.evict()
    return pages, [page[1:] for page in pages]


def training(run: Run, meanwhile: Callable[[], None]) -> Any:
    model = mlp(num_layers=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(run, model, optimizer, steps=3)
    if run.pager:
        meanwhile()
    losses += train(run, model, optimizer, steps=3, first=3)
    return losses, everything(model, optimizer)


PROGRAMS = pytest.mark.parametrize(
    ("program", "options"),
    [(odd_pages, {"deep": True}), (training, {"device": 76 * KIB})],
    ids=["odd sizes", "training"],
)


def nothing() -> None:
    """Happens meanwhile."""


def assert_buffered(stats: Any, code: int) -> None:
    """It says so, once and with the reason, and every page has reached the disk."""
    assert stats.engine.startswith("posix (buffered)"), stats.engine
    said = [notice for notice in stats.notices if "buffered" in notice]
    assert len(said) == 1, stats.notices
    assert os.strerror(code) in said[0]
    assert "local disk" in said[0], "the remedy"
    assert stats.num_failures == 0
    assert bytes_to_nvme(stats) > 0


@REFUSALS
@PROGRAMS
@pytest.mark.parametrize("refuse", [refuse_direct_open, refuse_direct_transfers])
def test_a_file_system_that_refuses_direct_io_is_used_through_the_page_cache(
    refuse: Callable[..., None],
    program: Callable[..., Any],
    options: dict[str, Any],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trial 34: O_DIRECT was refused, writes failed, and the status looked healthy.

    Some file systems refuse the flag, others accept it and refuse the I/O.
    """
    refuse(monkeypatch, code)
    stats = same(lambda run: program(run, nothing), tmp_path, **options)
    assert_buffered(stats, code)


@pytest.fixture
def direct(tmp_path: Path) -> None:
    """Skips where there is no direct I/O that could be refused later."""
    file = SwapFile(tmp_path, 4096, margin_bytes=0)
    io = file.io
    file.close()
    if io != "direct":
        pytest.skip(f"no direct I/O in {tmp_path}")


@REFUSALS
@PROGRAMS
@pytest.mark.parametrize("calls", [("pwritev",), ("preadv",), ("pwritev", "preadv")], ids="+".join)
@pytest.mark.usefixtures("direct")
def test_direct_io_that_is_refused_in_the_middle_of_a_run_loses_no_page(
    calls: tuple[str, ...],
    program: Callable[..., Any],
    options: dict[str, Any],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trial 34, second half: a page that was on its way goes through the page cache instead."""

    def f(run: Run) -> Any:
        def refuse() -> None:
            assert run.pager is not None
            assert run.pager.stats().engine.startswith("posix (direct)")
            refuse_direct_transfers(monkeypatch, code, calls)

        return program(run, refuse)

    assert_buffered(same(f, tmp_path, **options), code)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.usefixtures("direct")
def test_a_disk_that_fails_is_not_taken_for_one_without_direct_io(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial 34, kind: the page cache would only hide the failure until it is too late."""
    with small_pager(tmp_path) as pager:
        kept: list[torch.Tensor] = []
        with monkeypatch.context() as patch:
            refuse_direct_transfers(patch, code, ["pwritev"])
            error = create_until_refused(kept)
        assert os.strerror(code) in str(error)
        stats = pager.stats()
        assert stats.engine.startswith("posix (direct)")
        assert not [notice for notice in stats.notices if "buffered" in notice]
        assert stats.num_failures > 0
        for index, tensor in enumerate(kept):
            assert tensor.tolist() == [float(index)] * 1024
        del kept, tensor, error
    assert_nothing_left(tmp_path)


@pytest.fixture
def memory_folder() -> Iterator[str]:
    """A private folder on a tmpfs, which has no direct I/O on older kernels."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    folder = f"/dev/shm/tvm_pager_test_{os.getpid()}"
    os.mkdir(folder, 0o700)
    yield folder
    os.rmdir(folder)  # fails if anything is left in it


@PROGRAMS
def test_a_swap_file_in_memory_is_as_right_as_one_on_a_disk(
    program: Callable[..., Any], options: dict[str, Any], memory_folder: str, tmp_path: Path
) -> None:
    """Trial 34, on the file system that it was reported for."""
    stats = same(lambda run: program(run, nothing), tmp_path, nvme=memory_folder, **options)
    is_buffered = stats.engine.startswith("posix (buffered)")
    assert is_buffered or stats.engine.startswith("posix (direct)")
    assert sum("buffered" in notice for notice in stats.notices) == is_buffered
    assert stats.num_failures == 0
    assert bytes_to_nvme(stats) > 0
