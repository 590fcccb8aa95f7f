"""A disk that goes on failing: it is not asked for ever, and it cannot stop the pager's end."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tvm_pager
from tests.leaks import left_behind
from tests.model.rig import FRAME, Rig, rigs
from tests.trials.harness import (
    WIDTH,
    assert_equal,
    assert_nothing_left,
    everything,
    frozen,
    mlp,
    push_to_nvme,
    seed_all,
    small_pager,
    spill_folder,
)
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.swap_file import SwapFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# --- while it runs ---


@pytest.mark.timeout(20)
@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.EIO], ids=["ETIMEDOUT", "EIO"])
def test_a_disk_that_refuses_at_once_is_asked_a_few_times(code: int) -> None:
    """Room in the slab was asked for again and again: for ever, or until each frame was set aside.

    The failure was found by looking, before anybody had begun to wait for the copy.
    """
    rig = Rig(0, host=8 * FRAME, nvme=400 * FRAME)
    rig.backend._max_delay = 0
    rig.broken = {Lane.H2N: code, Lane.D2N: code}

    def create_many() -> None:
        for number in range(100):
            rig.create(f"page {number}")

    with pytest.raises(tvm_pager.TransferError) as caught:
        create_many()
    assert caught.value.errno == code
    assert rig.backend.num_failed[Lane.H2N] + rig.backend.num_failed[Lane.D2N] < 30
    rig.check()
    rig.broken.clear()
    for name in rig.pages:
        rig.read(name)
    rig.end()


def test_where_a_victim_cannot_be_written_a_clean_one_goes_instead() -> None:
    for rig in rigs(20):
        rig.create("dirty")
        rig.create("clean")
        rig.write_back("clean")
        rig.settle("clean")
        for number in range(4):
            rig.create(f"newer {number}")  # the device is full
        rig.broken = {Lane.D2H: errno.ETIMEDOUT, Lane.D2N: errno.ETIMEDOUT}
        rig.create("newest")
        assert rig.pages["dirty"].is_on_device
        assert not rig.pages["clean"].is_on_device
        with pytest.raises(tvm_pager.TransferError):
            rig.create("too much")
        rig.broken.clear()


# --- at the end ---


class Disk:
    """The swap file's disk, which refuses reads while it is broken."""

    def __init__(self) -> None:
        self.is_broken = False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    call: Any = os.preadv

    def read(*args: Any) -> Any:
        if disk.is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args)

    monkeypatch.setattr(os, "preadv", read)
    yield disk
    disk.is_broken = False


def filled(pager: Any) -> torch.nn.Module:
    """A model with its first layer on the device, and the rest on NVMe."""
    model = mlp(12)
    pager.page(model)
    push_to_nvme(pager, *model.parameters())
    model[0](torch.ones(1, WIDTH))
    return model


@pytest.mark.parametrize("fails_itself", [False, True])
def test_a_block_that_ends_on_a_broken_disk_is_closed_all_the_same(
    fails_itself: bool, disk: Disk, tmp_path: Path
) -> None:
    """The error names the first page that is lost; an error of the block's own goes before it."""
    with (  # noqa: PT012
        pytest.raises(
            ZeroDivisionError if fails_itself else tvm_pager.TransferError,
            match="zero" if fails_itself else r"Page \d+ .*check the disk",
        ),
        small_pager(tmp_path) as pager,
    ):
        model = filled(pager)
        disk.is_broken = True
        if fails_itself:
            1 / 0  # noqa: B018
    assert pager.closed
    assert "lost" in pager.stats().notices[-1]
    assert_nothing_left(tmp_path)
    model[0].weight.sum()  # it was on the device
    with pytest.raises(tvm_pager.PagerClosedError, match=r"Page \d+"):
        model[-1].weight.sum()


def test_a_close_that_could_not_read_everything_back_may_be_repeated(
    disk: Disk, tmp_path: Path
) -> None:
    pager = small_pager(tmp_path)
    seed_all(0)
    model = mlp(24)
    wanted = frozen(everything(model), version=False)
    pager.page(model)
    pager.evict_all()
    assert pager.residency(model[0].weight).name == "NVME"
    disk.is_broken = True
    for _ in range(2):
        with pytest.raises(tvm_pager.TransferError, match=r"Page \d+ .*check the disk"):
            pager.close()
    assert not pager.closed
    pager.check_invariants()
    with pytest.raises(tvm_pager.TransferError):
        model[0].weight.sum()
    disk.is_broken = False
    pager.close()
    assert_equal(wanted, frozen(everything(model), version=False))
    assert_nothing_left(tmp_path)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # no pager is open any more


def test_a_swap_file_that_was_forgotten_takes_no_space(tmp_path: Path) -> None:
    """A pager that nobody closed, in a process that goes on."""
    file = SwapFile(spill_folder(tmp_path), 1 << 20, margin_bytes=0)
    assert left_behind(tmp_path / "spill")
    del file
    assert_nothing_left(tmp_path)
