"""The torch backend: failures surface in tickets, nothing stays on disk, streams are waited for."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.interpreter import start_program
from tests.unit.block_io import FailingStore
from tests.unit.small_backends import (
    MIB,
    Make,
    alias,
    bytes_of,
    copy,
    page_of,
    run,
)
from tvm_pager.errors import ConfigError, TransferError
from tvm_pager.transfer.protocol import Lane, Piece, Transfer
from tvm_pager.transfer.torch_backend import TorchBackend

if TYPE_CHECKING:
    from tvm_pager.transfer.block_store import BlockStore


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("lane", [Lane.D2N, Lane.N2D, Lane.H2N, Lane.N2H])
def test_io_failures_surface_in_the_ticket_only(make: Make, lane: Lane, code: int) -> None:
    stores: list[FailingStore] = []

    def wrap(store: BlockStore) -> FailingStore:
        stores.append(FailingStore(store))
        return stores[-1]

    backend = make(wrap_store=wrap)
    codes: list[int] = []
    stores[0].choose = lambda is_write, file_offset: codes.pop() if codes else None
    storage = page_of(backend, bytes_of(200_000))
    memory = storage if "d" in lane.value else None
    run(backend, Lane.D2H, storage, 200_000, 4096)
    run(backend, Lane.D2N, storage, 200_000, 4096)
    codes.append(code)
    ticket = backend.submit(copy(lane, memory, 200_000, 4096))
    for _ in range(2):
        with pytest.raises(TransferError) as caught:
            ticket.wait()
        assert caught.value.errno == code
    run(backend, lane, memory, 200_000, 4096)


@pytest.mark.parametrize(
    ("lane", "piece"),
    [
        (Lane.D2H, Piece(0, 0, 0, 101)),
        (Lane.D2H, Piece(0, 1, 0, 10)),
        (Lane.D2H, Piece(0, 0, 8 * MIB, 10)),
        (Lane.H2D, Piece(0, -1, 0, 10)),
        (Lane.D2N, Piece(0, 0, 512, 10)),
        (Lane.N2D, Piece(0, 8 * MIB, 0, 10)),
        (Lane.D2N, Piece(0, 0, 0, 0)),
    ],
)
def test_transfers_off_their_tiers_never_touch_memory(make: Make, lane: Lane, piece: Piece) -> None:
    backend = make()
    with pytest.raises(AssertionError):
        backend.submit(Transfer(1, lane, (piece,), page_of(backend, bytes_of(100))))


def test_a_closed_backend_fails_tickets_and_frees_everything(make: Make) -> None:
    backend = make()
    storage = page_of(backend, bytes_of(100))
    run(backend, Lane.D2H, storage, 100, 0)
    backend.close()
    backend.close()
    assert backend.host_mapped_bytes == 0
    ticket = backend.submit(copy(Lane.H2D, storage, 100, 0))
    with pytest.raises(TransferError, match="closed") as caught:
        ticket.wait()
    assert caught.value.errno == errno.EBADF


def test_unknown_engine_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="io_uring"):
        TorchBackend("cpu", MIB, tmp_path, MIB, engine="io_uring")


_CHILD = """
import sys, time, torch
from tvm_pager.transfer.protocol import Lane, Piece, Transfer
from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias
from tvm_pager.transfer.torch_backend import TorchBackend
backend = TorchBackend("cpu", 8 << 20, sys.argv[1], 64 << 20, engine="posix")
storage = torch.UntypedStorage(32 << 20)
down = Transfer(1, Lane.D2N, (Piece(0, 0, 0, 32 << 20),), storage)
print("ready", flush=True)
while True:
    backend.submit(down).wait()
"""


def test_nothing_is_left_after_sigkill_amid_writes(tmp_path: Path) -> None:
    with start_program(_CHILD, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


@pytest.mark.gpu
def test_copies_and_releases_wait_for_the_streams_they_are_told(tmp_path: Path) -> None:
    backend = TorchBackend("cuda", 64 * MIB, None, 0)
    side = torch.cuda.Stream()
    storage = torch.UntypedStorage(0, device="cuda")
    backend.allocate_device(storage, 16 * MIB)
    view = alias(storage)
    for executor in (side, side.cuda_stream):
        view.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            view.fill_(7)
        piece = Piece(0, 0, 0, 16 * MIB)
        backend.submit(Transfer(1, Lane.D2H, (piece,), storage, (executor,))).wait()
        assert bool((backend._slab.view(0, 16 * MIB)[0] == 7).all())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        view.fill_(8)
    backend.release_device(storage, (side,))
    assert not side.query(), "the host waited for a stream"
    torch.cuda.current_stream().synchronize()
    assert side.query(), "the stream that gets the memory did not wait"
    assert isinstance(backend.current_executor(), int)
    assert backend.host_locked_bytes == 64 * MIB
    backend.close()


@pytest.mark.gpu
def test_overhead_is_what_is_not_accounted() -> None:
    backend = TorchBackend("cuda", MIB, None, 0)
    before = backend.device_overhead_bytes()
    handed_out = backend.num_allocated_bytes()
    storage = torch.UntypedStorage(0, device="cuda")
    backend.allocate_device(storage, MIB)
    assert backend.device_overhead_bytes() - before == MIB
    assert backend.num_allocated_bytes() - handed_out == MIB
    backend.accounted_bytes = lambda: MIB
    assert backend.device_overhead_bytes() == before
    backend.release_device(storage)
    backend.close()
