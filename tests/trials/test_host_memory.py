"""Section E of the trials: what page-locked memory costs, and when it is taken.

A page-locker that locks nothing stands in for the CUDA driver.
"""

from __future__ import annotations

import functools
import gc
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trials.harness import (
    KIB,
    Run,
    assert_equal,
    assert_nothing_left,
    batch,
    create_until_refused,
    everything,
    frozen,
    mlp,
    numbered,
    seed_all,
    small_pager,
    train,
)
from tests.unit.locker import RecordingLocker
from tvm_pager import assembly
from tvm_pager.errors import TransferError
from tvm_pager.transfer.region import Region
from tvm_pager.transfer.torch_backend import TorchBackend, TorchBackendOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REGION = 64 * KIB


class RoundingLocker(RecordingLocker):
    """Charges what torch's page-locked allocator would take: the next power of two."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        super().__init__()
        self.charge_limit_bytes = limit_bytes
        self.peak_bytes = self.charged_bytes = 0

    def lock(self, address: int, nbytes: int) -> None:
        rounded = 1 << (nbytes - 1).bit_length()
        if self.charged_bytes + rounded > self.charge_limit_bytes:
            raise TransferError(f"the driver refuses {nbytes} bytes")
        super().lock(address, nbytes)
        self.charged_bytes += rounded
        self.peak_bytes = max(self.peak_bytes, self.locked_bytes)

    def unlock(self, address: int, nbytes: int) -> None:
        super().unlock(address, nbytes)
        self.charged_bytes -= 1 << (nbytes - 1).bit_length()


@pytest.fixture
def locking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes pagers page-lock their slab with this locker, in regions of this size."""

    def use(locker: RecordingLocker | None, region_bytes: int = REGION) -> None:
        options = TorchBackendOptions(
            page_lock=locker is not None, locker=locker, region_bytes=region_bytes
        )
        monkeypatch.setattr(
            assembly, "TorchBackend", functools.partial(TorchBackend, options=options)
        )

    return use


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("torch's page-locked allocator was used, which rounds up")


# --- how much ---


@pytest.mark.parametrize("region", [REGION, 1 << 30], ids=["many regions", "one region"])
@pytest.mark.parametrize("power", [18, 19, 20])
def test_page_locked_memory_is_what_was_asked_for_to_the_page(
    power: int,
    region: int,
    locking: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trial 39: allocations rounded up to powers of two took almost twice the budget."""
    locker = RoundingLocker()
    locking(locker, region)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    host = int(1.2 * 2**power)
    with small_pager(tmp_path, host=host) as pager:
        backend = pager._backend
        pages = [torch.full((KIB,), float(i)) for i in range(2 * host // (4 * KIB))]
        pager.evict_all()
        assert locker.locked_bytes == backend.host_locked_bytes == backend.host_mapped_bytes
        assert host - 8 * KIB < locker.locked_bytes <= host, "all of it, and nothing beyond"
        assert [float(page[-1]) for page in pages] == list(range(len(pages)))
        assert pager.stats().host_peak_bytes == locker.peak_bytes <= host
        del pages
    assert locker.locked == {}, "freed after close"
    assert backend.host_locked_bytes == 0


def test_a_driver_that_refuses_by_its_own_count_loses_no_page(
    locking: Callable[..., None], tmp_path: Path
) -> None:
    """It charges 256 KiB for regions of 132 KiB: a half of the slab cannot be had."""
    locker = RoundingLocker(limit_bytes=600 * KIB)
    locking(locker, 132 * KIB)
    with small_pager(tmp_path, host=528 * KIB, nvme=False) as pager:
        pages: list[torch.Tensor] = []
        error = create_until_refused(pages)
        assert isinstance(error, TransferError)
        assert "the driver refuses 135168 bytes" in str(error)
        assert locker.charged_bytes <= 600 * KIB
        pager.check_invariants()
        assert len(pages) > 64, "the half that can be had was used"
        locker.charge_limit_bytes = 1 << 40  # others have given memory back
        assert [float(page[-1]) for page in pages] == list(range(len(pages)))
        pages += numbered(20, first=len(pages))
        assert [float(page[-1]) for page in pages] == list(range(len(pages)))
        del pages, error
    assert locker.locked == {}
    assert_nothing_left(tmp_path)


# --- when ---


def test_nothing_is_mapped_or_locked_in_a_steady_loop(
    locking: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial 41: page-locking on the way stops every stream of the device."""
    locker = RecordingLocker()
    locking(locker, 16 * KIB)
    num_maps, real = [0], Region.map

    def count(self: Region, *args: Any, **options: Any) -> None:
        num_maps[0] += 1
        real(self, *args, **options)

    monkeypatch.setattr(Region, "map", count)
    with small_pager(tmp_path, device=76 * KIB, host=512 * KIB) as pager:
        model = mlp(num_layers=5)
        optimizer = torch.optim.Adam(model.parameters())
        calls, evictions = [], []
        for step in range(10):
            train(Run(None), model, optimizer, steps=1, first=step)
            calls.append((num_maps[0], locker.num_calls))
            evictions.append(pager.stats().num_evictions)
        assert calls[1][0] > 8, "nothing went to the slab"
        assert calls[2:] == [calls[2]] * 8
        assert all(later - sooner > 20 for sooner, later in itertools.pairwise(evictions))
        del model, optimizer
    assert locker.locked == {}


# --- a budget that changes ---


def test_a_smaller_host_budget_gives_memory_back_and_a_larger_one_takes_it_again(
    locking: Callable[..., None], tmp_path: Path
) -> None:
    locker = RecordingLocker()
    locking(locker, 32 * KIB)

    def f(run: Run) -> Any:
        model = mlp(num_layers=5)
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for host in (512, 288, 640, 320):
            if run.pager is not None:
                run.pager.set_budgets(host=host * KIB)
                assert locker.locked_bytes <= host * KIB
            losses += train(run, model, optimizer, steps=2, first=host)
            if run.pager is not None:
                assert locker.locked_bytes == run.pager._backend.host_locked_bytes <= host * KIB
                run.pager.check_invariants()
        return losses, everything(model, optimizer)

    seed_all(0)
    expected = frozen(f(Run(None)))
    seed_all(0)
    with small_pager(tmp_path, device=76 * KIB, host=512 * KIB) as pager:
        got = frozen(f(Run(pager)))
        gc.collect()
    assert_equal(expected, got)
    assert locker.locked == {}
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("dies", ["in the slab", "while the slab shrinks"])
def test_a_page_that_dies_does_not_stop_the_slab_from_shrinking(
    dies: str, locking: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last reference may be a copy's in flight, which ends whenever it ends."""
    locking(None, 32 * KIB)
    with small_pager(tmp_path, device=512 * KIB, host=512 * KIB, nvme=False) as pager:
        pages = [batch(i, rows=64) for i in range(24)]  # 16 KiB each
        pager.evict_all()
        flight = pager._core.flight
        settle = flight.settle_any

        def kill(pages: list[torch.Tensor] = pages) -> bool:
            del pages[4:]
            return settle()

        if dies == "in the slab":
            kill()
        else:
            monkeypatch.setattr(flight, "settle_any", kill)
        pager.set_budgets(host=128 * KIB)
        assert pager._backend.host_mapped_bytes <= 128 * KIB
        for index, page in enumerate(pages):
            assert torch.equal(page, batch(index, rows=64))
        pager.check_invariants()
        pages.clear()
        del page
