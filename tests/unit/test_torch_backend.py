"""The torch backend: every lane and size gives the bytes back, inside the host budget."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from tests.unit.small_backends import (
    MIB,
    Make,
    alias,
    bytes_of,
    copy,
    page_of,
    run,
    wipe,
)
from tvm_pager.errors import ConfigError, TransferError
from tvm_pager.transfer.protocol import Backend, Lane, Piece, Ticket, Transfer
from tvm_pager.transfer.torch_backend import TorchBackend

SIZES = [1, 511, 512, 513, 4095, 4097, MIB + 3]


def test_it_is_a_backend_with_tickets(make: Make) -> None:
    backend = make()
    as_protocol: Backend = backend
    storage = page_of(backend, bytes_of(100))
    assert isinstance(as_protocol.submit(copy(Lane.D2H, storage, 100, 0)), Ticket)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_page_survives_every_lane(make: Make, nbytes: int, direct: bool) -> None:
    backend = make(direct=direct)
    data = bytes_of(nbytes)
    storage = page_of(backend, data)
    for down, sideways, up in (
        ((Lane.D2H,), (), (Lane.H2D,)),
        ((Lane.D2N,), (), (Lane.N2D,)),
        ((Lane.D2H,), (Lane.H2N, Lane.N2H), (Lane.H2D,)),
        ((Lane.D2N,), (Lane.N2H,), (Lane.H2D,)),
        ((Lane.D2H,), (Lane.H2N,), (Lane.N2D,)),
    ):
        for lane in down:
            run(backend, lane, storage, nbytes, 4096)
        wipe(backend, storage, nbytes)
        for lane in sideways:
            run(backend, lane, None, nbytes, 4096)
        for lane in up:
            run(backend, lane, storage, nbytes, 4096)
        assert torch.equal(alias(storage).cpu(), data), (down, sideways, up)


@pytest.mark.parametrize("offset", [512, (256 << 10) - 512, (256 << 10) + 512])
def test_host_frames_may_cross_regions_at_any_aligned_offset(make: Make, offset: int) -> None:
    backend = make()
    data = bytes_of(700_001)
    storage = page_of(backend, data)
    run(backend, Lane.D2H, storage, len(data), offset)
    backend.submit(Transfer(1, Lane.H2N, (Piece(0, offset, 8192, len(data)),), None)).wait()
    wipe(backend, storage, len(data))
    run(backend, Lane.H2D, storage, len(data), offset)
    assert torch.equal(alias(storage).cpu(), data)
    wipe(backend, storage, len(data))
    run(backend, Lane.N2D, storage, len(data), 8192)
    assert torch.equal(alias(storage).cpu(), data)


def test_frames_of_several_extents_gather_where_they_continue(make: Make) -> None:
    backend = make()
    data = bytes_of(20_000)
    storage = page_of(backend, data)
    host = (  # page offset, host offset, length; ends at multiples of 512 only
        (0, 8192, 512),
        (512, 1024, 5120),
        (5632, 300 * 1024, 14_368),
    )
    down = tuple(Piece(page, page, at, nbytes) for page, at, nbytes in host)
    backend.submit(Transfer(1, Lane.D2H, down, storage)).wait()
    nvme = (  # two extents in the file, cut where either side ends
        Piece(0, 8192, 40960, 512),
        Piece(512, 1024, 41472, 5120),
        Piece(5632, 300 * 1024, 46592, 2560),
        Piece(8192, 300 * 1024 + 2560, 4096, 11_808),
    )
    backend.submit(Transfer(1, Lane.H2N, nvme, None)).wait()
    wipe(backend, storage, len(data))
    up = (Piece(0, 40960, 0, 8192), Piece(8192, 4096, 8192, 11_808))
    backend.submit(Transfer(1, Lane.N2D, up, storage)).wait()
    assert torch.equal(alias(storage).cpu(), data)
    wipe(backend, storage, len(data))
    back = tuple(Piece(p.page_offset, p.dst_offset, p.src_offset, p.nbytes) for p in nvme)
    backend.submit(Transfer(1, Lane.N2H, back, None)).wait()
    up = tuple(Piece(page, at, page, nbytes) for page, at, nbytes in host)
    backend.submit(Transfer(1, Lane.H2D, up, storage)).wait()
    assert torch.equal(alias(storage).cpu(), data)


def test_parts_of_a_page_move_alone(make: Make) -> None:
    backend = make()
    data = bytes_of(300_000)
    storage = page_of(backend, data)
    piece = Piece(8192, 8192, 0, 100_000)
    backend.submit(Transfer(1, Lane.D2N, (piece,), storage)).wait()
    alias(storage).fill_(0)
    back = Piece(8192, 0, 8192, 100_000)
    backend.submit(Transfer(1, Lane.N2D, (back,), storage)).wait()
    expected = torch.zeros_like(data)
    expected[8192:108_192] = data[8192:108_192]
    assert torch.equal(alias(storage).cpu(), expected)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex128]
)
def test_any_dtype_is_bytes(make: Make, dtype: torch.dtype) -> None:
    backend = make()
    tensor = torch.randn(33, 7, device=backend.device).to(dtype)
    before, storage = tensor.clone(), tensor.untyped_storage()
    nbytes = storage.nbytes()
    run(backend, Lane.D2N, storage, nbytes, 0)
    wipe(backend, storage, nbytes)
    run(backend, Lane.N2D, storage, nbytes, 0)
    assert torch.equal(tensor, before)


def test_neighbours_in_slab_and_file_are_left_alone(make: Make) -> None:
    backend = make()
    pages = [page_of(backend, bytes_of(513, seed)) for seed in range(6)]
    for index, page in enumerate(pages):
        run(backend, Lane.D2H, page, 513, index * 1024)
        run(backend, Lane.D2N, page, 513, index * 4096)
    for lane, step in ((Lane.H2D, 1024), (Lane.N2D, 4096)):
        for index, page in enumerate(pages):
            wipe(backend, page, 513)
            run(backend, lane, page, 513, index * step)
            assert torch.equal(alias(page).cpu(), bytes_of(513, index))


# --- device memory --------------------------------------------------------------------------------


def test_memory_that_the_device_lacks_is_a_memory_error_and_changes_nothing(make: Make) -> None:
    backend = make(0, None)
    storage = torch.UntypedStorage(0, device=backend.device)
    with pytest.raises(MemoryError) as caught:
        backend.allocate_device(storage, 1 << 60)
    assert caught.value.__cause__ is not None
    assert storage.nbytes() == 0
    backend.allocate_device(storage, 100)
    backend.release_device(storage)
    assert storage.nbytes() == 0


def test_a_cpu_has_no_overhead_to_report(tmp_path: Path) -> None:
    backend = TorchBackend("cpu", 0, None, 0)
    backend.accounted_bytes = lambda: 10
    assert backend.device_overhead_bytes() == backend.allocated_bytes() == 0
    assert backend.num_allocated_bytes() == 0
    assert backend.current_executor() is None
    backend.close()


# --- budgets --------------------------------------------------------------------------------------


def test_no_lower_tiers_at_all(make: Make) -> None:
    backend = make(0, None)
    assert (backend.host_capacity_bytes, backend.nvme_capacity_bytes) == (0, 0)
    assert backend.engine_text == ""
    with pytest.raises(AssertionError, match="leaves"):
        backend.submit(copy(Lane.D2H, page_of(backend, bytes_of(10)), 10, 0))


@pytest.mark.parametrize(
    ("host_bytes", "page_space"),
    [
        (128 << 10, 0),
        (256 << 10, 128 << 10),
        (8 * MIB, 7 * MIB),
        ((8 * MIB) + 4095, 7 * MIB),
        (1 << 40, (1 << 40) - 64 * MIB),
    ],
)
def test_staging_comes_out_of_the_host_budget(
    make: Make, device: str, host_bytes: int, page_space: int
) -> None:
    if device == "cuda" and host_bytes > MIB * 100:
        pytest.skip("that much would be page-locked")
    backend = make(host_bytes, staging_bytes=None)
    assert backend.host_capacity_bytes == page_space
    if page_space < 100 * MIB:
        backend.grow_host(page_space)
    assert backend.host_mapped_bytes <= host_bytes


def test_a_host_budget_below_the_staging_is_refused_with_numbers(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"127\.00 KiB.*128\.00 KiB"):
        make(127 << 10, staging_bytes=None)


def test_without_nvme_all_host_memory_is_page_space(make: Make) -> None:
    assert make(MIB, None).host_capacity_bytes == MIB


def test_page_locked_bytes_are_the_budget_and_all_are_unlocked(make: Make, device: str) -> None:
    if device == "cuda":
        pytest.skip("the recording locker stands in for CUDA")
    locked: dict[int, int] = {}

    class Locker:
        def lock(self, address: int, nbytes: int) -> None:
            locked[address] = nbytes

        def unlock(self, address: int, nbytes: int) -> None:
            assert locked.pop(address) == nbytes

    backend = make(2 * MIB, page_lock=True, locker=Locker())
    backend.grow_host(2 * MIB)
    assert sum(locked.values()) == backend.host_locked_bytes == 2 * MIB
    backend.close()
    assert locked == {}


def test_a_refused_page_lock_fails_the_ticket(make: Make, device: str) -> None:
    if device == "cuda":
        pytest.skip("the refusing locker stands in for CUDA")

    class Locker:
        def lock(self, address: int, nbytes: int) -> None:
            raise TransferError("no", errno.ENOMEM)

        def unlock(self, address: int, nbytes: int) -> None:
            raise AssertionError

    backend = make(MIB, None, page_lock=True, locker=Locker())
    ticket = backend.submit(copy(Lane.D2H, page_of(backend, bytes_of(10)), 10, 0))
    assert ticket.error is not None
    assert ticket.error.errno == errno.ENOMEM


# --- the rest -------------------------------------------------------------------------------------


def test_it_says_which_engine_and_path_and_how_fast(make: Make) -> None:
    backend = make(measure=True)
    assert backend.engine_text.startswith(("posix (direct), write", "posix (buffered), write"))
    assert "GB/s" in backend.engine_text


def test_buffered_io_is_one_notice(make: Make) -> None:
    backend = make()
    assert backend._file is not None
    backend._file.degrade("Invalid argument")
    assert backend.engine_text.startswith("posix (buffered)")
    assert len(backend.notices) == 1  # of now, or of the start where there is no direct I/O
    assert "buffered" in backend.notices[0]


def test_a_page_can_be_read_into_ordinary_memory(make: Make) -> None:
    backend = make()
    data = bytes_of(900_001)
    storage = page_of(backend, data)
    down = (Piece(0, 0, 0, 500_000),)
    backend.submit(Transfer(1, Lane.D2H, down, storage)).wait()
    down = (Piece(500_000, 500_000, 4096, 400_001),)
    backend.submit(Transfer(1, Lane.D2N, down, storage)).wait()
    pieces = {
        Lane.H2D: [Piece(0, 0, 0, 500_000)],
        Lane.N2D: [Piece(500_000, 4096, 500_000, 400_001)],
    }
    with torch.inference_mode():
        kept = backend.read_to_host(len(data), pieces)
    assert torch.equal(kept, data)
    backend.close()
    kept.add_(1)  # an ordinary tensor, and its own memory
    assert not kept.is_inference()


def test_threads_share_a_backend(make: Make) -> None:
    backend = make()
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            data = bytes_of(150_001, index)
            storage = page_of(backend, data)
            for _ in range(5):
                run(backend, Lane.D2N, storage, len(data), index * MIB)
                run(backend, Lane.N2H, None, len(data), index * MIB)
                wipe(backend, storage, len(data))
                run(backend, random.choice([Lane.H2D, Lane.N2D]), storage, len(data), index * MIB)
                assert torch.equal(alias(storage).cpu(), data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_backends_in_one_directory_do_not_meet(make: Make, tmp_path: Path) -> None:
    one, two = make(), make()
    pages = [
        (backend, page_of(backend, bytes_of(5000, seed))) for seed, backend in ((1, one), (2, two))
    ]
    for backend, page in pages:
        run(backend, Lane.D2N, page, 5000, 4096)
    for (backend, page), seed in zip(pages, (1, 2), strict=True):
        wipe(backend, page, 5000)
        run(backend, Lane.N2D, page, 5000, 4096)
        assert torch.equal(alias(page).cpu(), bytes_of(5000, seed))
    assert os.listdir(tmp_path) == []
