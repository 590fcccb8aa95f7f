"""What stands behind a page: frames, a file, a recipe, or nothing; and what each commits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.small_backends import alias, bytes_of, page_of, small_backends
from tvm_pager.errors import CommitError, TransferError
from tvm_pager.memory import Backing, Page, PageKind, PageState, Tier
from tvm_pager.paging import DemandPager
from tvm_pager.planning import load_policy
from tvm_pager.transfer.protocol import Lane, Piece, Transfer
from tvm_pager.transfer.ram_backend import RamBackend, RamMemory

KIB = 1024


class Ram:
    """A pager over 16 KiB of device memory and as little below, and pages with their bytes."""

    def __init__(self, host_bytes: int = 8 * KIB) -> None:
        self.backend = RamBackend(host_bytes, 0, max_delay=0)
        self.pager = DemandPager(
            self.backend, 16 * KIB, load_policy("lru"), segment_bytes=4096, strict=True
        )
        self.memory: dict[int, RamMemory] = {}

    def create(self, nbytes: int, fill: int) -> Page:
        self.pager.admit([], nbytes, "create")
        memory = RamMemory()
        self.backend.allocate_device(memory, nbytes)
        memory.data[:] = bytes([fill]) * nbytes
        page = self.pager.create(nbytes, lambda: memory)
        self.memory[page.id] = memory
        return page

    def read(self, page: Page) -> bytes:
        self.pager.admit([page], 0, "read")
        return bytes(self.memory[page.id].data)


def test_a_page_backed_by_a_file_moves_nothing_down_and_commits_nothing() -> None:
    ram = Ram()
    page = ram.create(4 * KIB, 7)
    ram.pager.back(page, Backing.FILE, bytes([7]) * 4 * KIB)
    assert ram.pager.table.committed_bytes == 0
    assert ram.pager.evict_all() == 4 * KIB
    assert ram.pager.table.tier_of(page) is Tier.NVME
    assert ram.read(page) == bytes([7]) * 4 * KIB
    assert {lane for lane, n in ram.backend.num_submitted.items() if n} == {Lane.N2D}
    ram.pager.check_invariants()


def test_more_file_backed_pages_than_all_tiers_hold() -> None:
    ram = Ram(host_bytes=0)
    pages = []
    for fill in range(12):
        page = ram.create(4 * KIB, fill)
        ram.pager.back(page, Backing.FILE, bytes([fill]) * 4 * KIB)
        pages.append(page)
    for fill, page in enumerate(pages):
        assert ram.read(page) == bytes([fill]) * 4 * KIB
    ram.pager.check_invariants()


def test_the_first_write_makes_a_file_backed_page_an_ordinary_one() -> None:
    ram = Ram()
    page = ram.create(4 * KIB, 7)
    ram.pager.back(page, Backing.FILE, bytes([7]) * 4 * KIB)
    ram.pager.written(page)
    ram.memory[page.id].data[:] = bytes([9]) * 4 * KIB
    assert page.backing is Backing.SWAP
    assert ram.pager.table.committed_bytes == 4 * KIB
    ram.pager.evict_all()
    assert ram.read(page) == bytes([9]) * 4 * KIB


def test_a_write_that_no_tier_could_back_is_refused_before_it_happens() -> None:
    ram = Ram(host_bytes=0)
    for fill in range(5):
        page = ram.create(4 * KIB, fill)
        ram.pager.back(page, Backing.FILE, bytes([fill]) * 4 * KIB)
    pages = list(ram.pager.table.pages.values())
    for page in pages[:4]:
        ram.pager.admit([page], 0, "write")
        ram.pager.written(page)
        ram.pager.hold(page)
    ram.pager.drop(pages[3])
    with pytest.raises(CommitError, match=r"file-backed Page 4 .* Give a larger"):
        ram.pager.written(pages[4])
    assert pages[4].backing is Backing.FILE
    ram.pager.check_invariants()


def test_a_recipe_commits_until_it_is_dropped_and_again_when_it_is_back() -> None:
    ram = Ram()
    page = ram.create(4 * KIB, 7)
    ram.pager.back(page, Backing.RECIPE, bytes([7]) * 4 * KIB)
    assert ram.pager.table.committed_bytes == 4 * KIB
    ram.pager.evict_all()
    assert ram.pager.table.committed_bytes == 0
    assert ram.read(page) == bytes([7]) * 4 * KIB
    assert ram.pager.table.committed_bytes == 4 * KIB
    assert ram.backend.num_submitted[Lane.R2D] == 1
    ram.pager.check_invariants()


def test_a_recipe_that_fails_leaves_the_page_where_it_was() -> None:
    ram = Ram()
    page = ram.create(4 * KIB, 7)
    ram.pager.back(page, Backing.RECIPE, bytes([7]) * 4 * KIB)
    ram.pager.evict_all()
    ram.backend.fail_next(1, lane=Lane.R2D)
    with pytest.raises(TransferError):
        ram.read(page)
    assert page.state is PageState.FAILED
    assert ram.pager.table.committed_bytes == 0
    ram.pager.check_invariants()
    assert ram.read(page) == bytes([7]) * 4 * KIB


def test_what_nothing_backs_is_never_chosen() -> None:
    ram = Ram()
    page = ram.create(4 * KIB, 7)
    ram.pager.back(page, Backing.NONE)
    assert ram.pager.evict_all() == 0
    with pytest.raises(AssertionError, match=r"Backing\.NONE"):
        ram.pager.table.evict(page)
    ram.pager.check_invariants()


def test_a_page_born_in_its_file_takes_nothing_until_it_is_read() -> None:
    ram = Ram()
    memory = RamMemory()
    page = ram.pager.table.create_absent(
        4 * KIB, lambda: memory, PageKind.PARAM, bytes([5]) * 4 * KIB
    )
    ram.memory[page.id] = memory
    table = ram.pager.table
    assert (table.device_used_bytes, table.committed_bytes) == (0, 0)
    ram.pager.check_invariants()
    assert ram.read(page) == bytes([5]) * 4 * KIB
    assert (table.device_used_bytes, table.committed_bytes) == (4 * KIB, 0)
    table.free(page)
    ram.pager.check_invariants()


def test_a_recipe_runs_on_the_torch_backend(tmp_path: Any) -> None:
    class Halves:
        def fill(self, memory: object) -> None:
            assert isinstance(memory, torch.UntypedStorage)
            alias(memory)[:500] = 1
            alias(memory)[500:] = 2

    with small_backends("cpu", tmp_path) as make:
        backend = make()
        storage = page_of(backend, bytes_of(1000))
        transfer = Transfer(1, Lane.R2D, (Piece(0, 0, 0, 1000),), storage, (), Halves())
        backend.submit(transfer).wait()
        assert alias(storage).tolist() == [1] * 500 + [2] * 500
