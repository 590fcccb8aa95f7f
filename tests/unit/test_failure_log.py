"""Copies that fail by the thousand: the log names the first of each kind, and counts the others."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import pytest

import tvm_pager
from tests.model.rig import Rig
from tests.trials.harness import KIB, numbered, small_pager
from tests.unit.block_io import FailingStore
from tvm_pager import assembly
from tvm_pager.memory import Tier
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.torch_backend import TorchBackend, TorchBackendOptions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def rig() -> Rig:
    rig = Rig(0)
    rig.create()
    return rig


def fail(rig: Rig, num: int, code: int) -> None:
    rig.broken = {Lane.D2N: code}
    for _ in range(num):
        rig.write_back(to=Tier.NVME)
        with pytest.raises(tvm_pager.TransferError):
            rig.settle()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_first_failure_of_each_kind_is_whole_and_the_others_are_one_line_at_the_end(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    fail(rig, 1212, errno.ETIMEDOUT)
    fail(rig, 1, errno.EINVAL)
    fail(rig, 2, errno.ETIMEDOUT)
    first, other = warnings(caplog)
    assert first.startswith(f"page {rig.pages['page'].id}: ")
    assert "Connection timed out" in first
    assert "Invalid argument" in other
    caplog.clear()
    rig.pager.close()
    assert warnings(caplog) == ["copies that failed: d2n, ETIMEDOUT: ... and 1,213 more like it"]
    caplog.clear()
    rig.pager.close()
    assert warnings(caplog) == []


def test_what_was_counted_is_told_when_a_tier_closes(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    fail(rig, 3, errno.ETIMEDOUT)
    caplog.clear()
    fail(rig, 4, errno.EIO)
    whole, rest = warnings(caplog)
    assert whole.startswith("page ")
    assert rest == "copies that failed: d2n, ETIMEDOUT: ... and 2 more like it"
    caplog.clear()
    fail(rig, 1, errno.ETIMEDOUT)
    assert warnings(caplog) == [], "that kind was told of"
    rig.pager.close()
    (rest,) = warnings(caplog)
    assert rest == (
        "copies that failed: d2n, ETIMEDOUT: ... and 1 more like it; "
        "d2n, EIO: ... and 3 more like it"
    )


def test_copies_that_were_called_off_are_no_failures(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.write_back()
    assert rig.pager.flight.cancel(rig.pages["page"])
    rig.settle()
    rig.pager.close()
    assert warnings(caplog) == []


def test_a_disk_that_refuses_every_write_fills_the_events_and_not_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stores: list[FailingStore] = []

    def make(*args: object, **options: object) -> TorchBackend:
        def wrap(store: object) -> FailingStore:
            stores.append(FailingStore(store))  # type: ignore[arg-type]
            return stores[-1]

        return TorchBackend(*args, options=TorchBackendOptions(wrap_store=wrap), **options)  # type: ignore[arg-type, misc]

    monkeypatch.setattr(assembly, "TorchBackend", make)
    with small_pager(tmp_path) as pager:
        kept = numbered(64 * KIB // (4 * KIB) + 40)
        stores[0].choose = lambda is_write, file_offset: errno.ETIMEDOUT if is_write else None
        for _ in range(20):
            try:
                for tensor in kept:
                    tensor.add_(0.0)
            except tvm_pager.TransferError:
                continue
        stores[0].choose = lambda is_write, file_offset: None
        num_failures = pager.stats().num_failures
    kinds = [text for text in warnings(caplog) if text.startswith("page ")]
    assert num_failures > 20
    assert 1 <= len(kinds) <= 2, "to NVMe from the device, and from DRAM"
    rest = warnings(caplog)[-1].replace(",", "").split()
    num_more = sum(int(word) for word in rest if word.isdecimal())
    assert num_more + len(kinds) == num_failures
