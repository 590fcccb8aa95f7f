"""A disk that fails while the pager runs: what is there stays right, and nothing new counts on it.

Section 3 of docs/states.md as tests: first on the delayed backend, where each copy can be made to
fail on its own, then with torch tensors over a block store that refuses writes.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tvm_pager
from tests.model.rig import ROOMY, rigs
from tests.trials.harness import (
    KIB,
    assert_nothing_left,
    assert_within_budgets,
    create_until_refused,
    numbered,
    small_pager,
)
from tests.unit.block_io import FailingStore, nothing_fails
from tvm_pager import assembly
from tvm_pager.memory import PageState, Tier
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.torch_backend import TorchBackend, TorchBackendOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tvm_pager.transfer.block_store import BlockStore

BROKEN = pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=["EIO", "ENOSPC", "EDQUOT"]
)


# --- on the delayed backend ---


@BROKEN
def test_a_failed_write_back_closes_nvme_and_sets_its_frames_aside(code: int) -> None:
    """The page stays on the device as dirty as it was, and leaves by another frame."""
    for rig in rigs():
        page = rig.create()
        rig.backend.fail_next(lane=Lane.D2N, code=code)
        rig.write_back(to=Tier.NVME)
        bad = rig.arriving()
        with pytest.raises(tvm_pager.TransferError):
            rig.settle()
        assert page.state is PageState.RESIDENT
        assert not page.has_copies
        assert list(rig.pager.table.closed_tiers) == [Tier.NVME]
        assert os.strerror(code) in rig.pager.table.closed_tiers[Tier.NVME]
        assert rig.bad == bad
        rig.check()
        rig.read()
        rig.write_back(to=Tier.NVME)  # of a page that lives: allowed
        assert not bad & rig.arriving()
        rig.evict()
        rig.read()


@BROKEN
def test_a_failed_demotion_closes_nvme_and_leaves_the_page_in_dram(code: int) -> None:
    for rig in rigs():
        page = rig.create()
        rig.evict()
        rig.backend.fail_next(lane=Lane.H2N, code=code)
        rig.demote()
        bad = rig.arriving()
        with pytest.raises(tvm_pager.TransferError):
            rig.settle()
        assert page.state is PageState.EVICTED
        assert rig.pager.table.tier_of(page) is Tier.HOST
        assert list(rig.pager.table.closed_tiers) == [Tier.NVME]
        assert rig.bad == bad
        rig.check()
        rig.take_over()
        rig.read()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ETIMEDOUT, errno.EINVAL])
def test_a_write_that_fails_otherwise_leaves_nvme_open_and_its_frames_free(code: int) -> None:
    """Only EIO, ENOSPC and EDQUOT say that the next write there will not do better."""
    for rig in rigs():
        page = rig.create()
        rig.backend.fail_next(lane=Lane.D2N, code=code)
        rig.write_back(to=Tier.NVME)
        with pytest.raises(tvm_pager.TransferError):
            rig.settle()
        assert not rig.pager.table.closed_tiers
        assert not rig.bad
        rig.evict(to=Tier.NVME)
        assert rig.pager.table.tier_of(page) is Tier.NVME
        rig.read()


def test_an_eviction_whose_tier_has_just_closed_goes_to_the_other_one() -> None:
    """The policy said NVMe; nothing in the middle of a step may fail while DRAM has room."""
    for rig in rigs():
        page = rig.create()
        rig.broken = {Lane.D2N: errno.EIO}
        rig.evict(to=Tier.NVME)
        assert not page.is_on_device
        assert rig.pager.table.tier_of(page) is Tier.HOST
        assert list(rig.pager.table.closed_tiers) == [Tier.NVME]
        rig.check()
        rig.read()


def test_a_page_that_can_go_nowhere_stays_on_the_device() -> None:
    for rig in rigs(host=0):
        page = rig.create()
        rig.broken = {Lane.D2N: errno.EIO}
        with pytest.raises(tvm_pager.TransferError) as caught:
            rig.evict()
        assert caught.value.errno == errno.EIO
        assert page.state is PageState.RESIDENT
        assert not page.has_copies
        rig.check()
        rig.read()
        rig.broken.clear()


def test_bad_frames_back_no_page() -> None:
    """Each failure sets frames aside: counted as used, they would let in a page each."""
    for rig in rigs():
        rig.create()
        limit_bytes = rig.pager.commit_limit_bytes - ROOMY  # what device and DRAM can back
        rig.broken = {Lane.D2N: errno.EIO}
        for _ in range(3):
            rig.write_back(to=Tier.NVME)
            with pytest.raises(tvm_pager.TransferError):
                rig.settle()
            assert rig.pager.commit_limit_bytes == limit_bytes
        assert len(rig.bad) == 6


# --- with torch ---

PAGE_BYTES = 4 * KIB
NUM_FITTING = (64 + 128) * KIB // PAGE_BYTES  # on the device and in DRAM together
NUM_LIVE = NUM_FITTING + 12  # so many that some are on NVMe


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, FailingStore]]:
    """An entered pager and its block store, which fails when told to."""
    stores: list[FailingStore] = []

    def wrap(store: BlockStore) -> FailingStore:
        stores.append(FailingStore(store))
        return stores[-1]

    options = TorchBackendOptions(wrap_store=wrap)
    monkeypatch.setattr(assembly, "TorchBackend", functools.partial(TorchBackend, options=options))
    with small_pager(tmp_path) as pager:
        yield pager, stores[0]
        stores[0].choose = nothing_fails
        gc.collect()
        pager.check_invariants()
        assert_within_budgets(pager.stats())
    assert_nothing_left(tmp_path)


def values(tensor: torch.Tensor) -> set[float]:
    return set(tensor.tolist())  # makes no page


@BROKEN
def test_new_pages_are_refused_with_the_reason_once_a_write_has_failed(
    code: int, disk: tuple[Any, FailingStore]
) -> None:
    pager, store = disk
    kept = numbered(NUM_LIVE)
    limit_bytes = pager._core.commit_limit_bytes
    store.choose = lambda is_write, file_offset: code if is_write else None
    first = create_until_refused(kept)
    assert isinstance(first, tvm_pager.TransferError)
    assert first.errno == code
    second = create_until_refused(kept)
    assert isinstance(second, tvm_pager.CommitError)
    assert f"NVME is closed: {os.strerror(code)}" in str(second)
    assert "budget" in str(second)
    below_bytes = (NUM_LIVE - NUM_FITTING) * PAGE_BYTES
    assert pager._core.commit_limit_bytes <= (64 + 128) * KIB + below_bytes < limit_bytes
    num_written = len(store.written)
    third = create_until_refused(kept)
    assert isinstance(third, tvm_pager.CommitError)
    assert len(store.written) == num_written, "refused before anything was tried"
    resident = [i for i, t in enumerate(kept) if pager.residency(t) is Tier.DEVICE]
    assert len(resident) * PAGE_BYTES > 56 * KIB
    for index in resident:
        assert values(kept[index].add_(0.5)) == {index + 0.5}
    store.choose = nothing_fails
    for index, tensor in enumerate(kept):
        assert values(tensor) == {index + (0.5 if index in resident else 0.0)}


@BROKEN
def test_pages_that_live_still_change_places_around_a_bad_block(
    code: int, disk: tuple[Any, FailingStore]
) -> None:
    """One block of the disk refuses writes for good: nobody writes there a second time."""
    pager, store = disk
    kept = numbered(NUM_LIVE)
    bad: list[int] = []

    def first_block_written(is_write: bool, file_offset: int) -> int | None:
        if is_write and not bad:
            bad.append(file_offset)
        return code if is_write and file_offset in bad else None

    store.choose = first_block_written
    store.written.clear()
    for _ in range(3):
        for tensor in kept:
            tensor.add_(1000.0)
    assert store.written.count(bad[0]) == 1
    assert pager.stats().num_failures == 1
    assert pager._core.table.closed_tiers[Tier.NVME] == os.strerror(code)
    assert len(store.written) > 3 * (NUM_LIVE - NUM_FITTING), "the others moved all the time"
    for index, tensor in enumerate(kept):
        assert values(tensor) == {index + 3000.0}


def test_new_pages_are_welcome_again_where_others_have_died(
    disk: tuple[Any, FailingStore],
) -> None:
    pager, store = disk
    kept = numbered(NUM_LIVE)
    store.choose = lambda is_write, file_offset: errno.EIO if is_write else None
    create_until_refused(kept)
    assert isinstance(create_until_refused(kept), tvm_pager.CommitError)
    del kept[::2]
    num_old = len(kept)
    # What is on NVMe counts too: it may have to leave, and could not return. The rest is reserve.
    num_new = NUM_FITTING - 8 - num_old
    assert num_new > 0
    kept += numbered(num_new, first=1)
    for index, tensor in enumerate(kept[:num_old]):
        assert values(tensor) == {2.0 * index + 1}
    for index, tensor in enumerate(kept[num_old:]):
        assert values(tensor) == {index + 1.0}
    assert Tier.NVME in pager._core.table.closed_tiers


def test_pages_with_copies_go_on_being_read_from_a_disk_that_refuses_writes(
    disk: tuple[Any, FailingStore],
) -> None:
    """Inference over frozen weights needs no write-back, so it does not notice."""
    pager, store = disk

    def infer(layers: list[torch.Tensor]) -> list[float]:
        x = torch.full((8, 32), 0.5)
        for layer in layers:
            x = torch.tanh(x @ layer)
        return x.flatten().tolist()

    layers = [torch.full((32, 32), 0.01 * (i % 7 - 3)) for i in range(NUM_LIVE)]
    for layer in layers:
        layer.diagonal().fill_(0.9)
    expected = infer(layers)
    pager.evict_all()
    assert any(pager.residency(layer) is Tier.NVME for layer in layers)
    store.choose = lambda is_write, file_offset: errno.EIO if is_write else None
    num_written = len(store.written)
    for _ in range(3):
        assert infer(layers) == expected
    assert len(store.written) == num_written
    assert pager.stats().num_failures == 0
