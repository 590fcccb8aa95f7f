"""A region of the slab: backed before it is locked, gone at once when that fails."""

from __future__ import annotations

import ctypes
import errno
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.locker import RecordingLocker
from tvm_pager.errors import TransferError
from tvm_pager.transfer import region as module
from tvm_pager.transfer.region import CudaLocker, Region, touch

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def num_backed_pages(address: int, nbytes: int) -> int:
    """Counts the pages in memory, as mincore(2) sees them."""
    present = (ctypes.c_ubyte * (nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), present) == 0
    return sum(byte & 1 for byte in present)


@pytest.mark.parametrize("populate", [True, False])
@pytest.mark.parametrize("nbytes", [PAGE, 65 * MIB])
def test_a_touched_range_is_backed_to_its_last_page_and_zero(populate: bool, nbytes: int) -> None:
    with mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would back the neighbour too
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        assert num_backed_pages(address, nbytes + PAGE) == 0
        touch(address, nbytes, populate=populate)
        assert num_backed_pages(address, nbytes) == nbytes // PAGE
        assert num_backed_pages(address + nbytes, PAGE) == 0
        assert mapping[:PAGE] == bytes(PAGE)


def set_errno(code: int) -> Any:
    def madvise(*arguments: object) -> int:
        ctypes.set_errno(code)
        return -1

    return type("Libc", (), {"madvise": staticmethod(madvise)})


def test_a_kernel_that_cannot_populate_gets_zeros_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIBC", set_errno(errno.EINVAL))
    region = Region(0, 16 * PAGE)
    region.map(RecordingLocker())
    assert num_backed_pages(region.address, region.nbytes) == 16


def test_a_kernel_without_memory_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIBC", set_errno(errno.ENOMEM))
    locker = RecordingLocker()
    with pytest.raises(TransferError, match=r"64\.00 KiB .*smaller host budget") as caught:
        Region(0, 64 << 10).map(locker)
    assert caught.value.errno == errno.ENOMEM
    assert locker.num_calls == 0


def test_without_threads_one_thread_touches_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit on threads, and when the interpreter is about to end."""

    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    region = Region(0, 65 * MIB)
    region.map(RecordingLocker())
    assert num_backed_pages(region.address, region.nbytes) == region.nbytes // PAGE


def test_memory_is_touched_before_it_is_locked_and_only_then() -> None:
    steps: list[str] = []
    region = Region(0, 4 * PAGE)
    locker = RecordingLocker(before=lambda call: steps.append("lock"))
    region.map(locker, touch_with=lambda address, nbytes: steps.append(f"touch {nbytes}"))
    assert steps == [f"touch {4 * PAGE}", "lock"]
    assert (region.is_ready, region.is_locked) == (True, True)
    unlocked = Region(0, 4 * PAGE)
    unlocked.map(None)
    assert num_backed_pages(unlocked.address, unlocked.nbytes) == 0
    assert (unlocked.is_ready, unlocked.is_locked) == (True, False)


def test_a_region_that_cannot_be_locked_is_unmapped_although_the_error_is_kept() -> None:
    region = Region(0, 4 * PAGE)
    seen: list[mmap.mmap | None] = []
    with pytest.raises(TransferError, match="too much") as caught:
        region.map(RecordingLocker(0), touch_with=lambda *_: seen.append(region.mapping))
    (mapping,) = seen
    assert mapping is not None
    assert mapping.closed
    assert region.mapping is None
    assert not region.is_ready
    assert caught.value.__traceback__ is not None, "what would have kept it"


def test_memory_is_registered_in_the_context_of_its_own_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that has not chosen a card would make a context on the first one."""
    calls: list[tuple[str, object, int]] = []
    chosen: list[object] = ["none"]

    @contextmanager
    def choose(device: object) -> Iterator[None]:
        chosen.append(device)
        try:
            yield
        finally:
            chosen.pop()

    class Runtime:
        code = 0

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            calls.append(("register", chosen[-1], nbytes))
            return self.code

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unregister", chosen[-1], address))
            return self.code

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "device", choose)
    monkeypatch.setattr(module, "_cudart", lambda: runtime)
    locker = CudaLocker(1)
    locker.lock(4096, 8192)
    locker.unlock(4096, 8192)
    assert calls == [("register", 1, 8192), ("unregister", 1, 4096)]
    runtime.code = 2
    with pytest.raises(TransferError, match=r"register 8\.00 KiB .*cudaError 2.*ulimit -l"):
        locker.lock(4096, 8192)
    assert chosen == ["none"]
