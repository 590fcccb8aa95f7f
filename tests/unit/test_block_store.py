"""Block stores: any size comes back, short I/O and errors are errors, direct and buffered.

The oracle is a plain buffered reader of the same file. Faults come from a wrapper around the system
calls.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path

import pytest

from tests.unit.block_io import MIB, SHIFTS, SIZES, FaultyCalls, buffer_of, random_buffer
from tvm_pager.errors import TransferError
from tvm_pager.transfer.block_store import spans
from tvm_pager.transfer.posix import PosixStore
from tvm_pager.transfer.swap_file import SwapFile

# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_any_size_comes_back(store: PosixStore, file: SwapFile, nbytes: int, shift: int) -> None:
    data = random_buffer(nbytes, shift)
    store.write(8192, [data]).wait()
    with open(file.path, "rb") as reader:
        assert os.pread(reader.fileno(), nbytes, 8192) == bytes(data)
    target = buffer_of(nbytes, shift)
    store.read(8192, [target]).wait()
    assert target == data


@pytest.mark.parametrize(
    "lengths",
    [[1, 1], [512, 3584], [512, 4096, 4096, 3], [4096, 100, 5000, 1, 1, 70000], [0, 7, 0]],
)
def test_buffers_follow_each_other_in_the_file(
    store: PosixStore, file: SwapFile, lengths: list[int]
) -> None:
    sources = [random_buffer(n, seed=i) for i, n in enumerate(lengths)]
    store.write(4096, sources).wait()
    with open(file.path, "rb") as reader:
        assert os.pread(reader.fileno(), sum(lengths), 4096) == b"".join(sources)
    targets = [buffer_of(n) for n in lengths]
    store.read(4096, targets).wait()
    assert targets == sources


def test_reading_leaves_the_bytes_behind_the_buffer_alone(store: PosixStore) -> None:
    store.write(0, [random_buffer(8192)]).wait()
    room = buffer_of(8192)
    room[:] = b"\x77" * 8192
    store.read(0, [room[:4097]]).wait()
    assert bytes(room[4097:]) == b"\x77" * 4095


def test_spans_are_aligned_and_cover_everything_once() -> None:
    generator = random.Random(5)
    for _ in range(200):
        lengths = [generator.choice([0, 1, 512, 4096, 4608, 20000]) for _ in range(6)]
        buffers = [random_buffer(n, seed=i) for i, n in enumerate(lengths)]
        at, seen = 4096, b""
        for span in spans(4096, buffers, 8192):
            assert span.file_offset == at
            assert span.file_offset % 4096 == 0
            assert span.nbytes == sum(map(len, span.views)) <= 8192
            assert len(span.views) == 1 or span.nbytes <= 4096
            seen += b"".join(span.views)
            at += span.nbytes
        assert seen == b"".join(buffers)


@pytest.mark.parametrize(("offset", "nbytes"), [(512, 10), (-4096, 10), (16 * MIB - 4096, 4097)])
def test_ranges_off_the_file_or_the_alignment_are_bugs(
    store: PosixStore, offset: int, nbytes: int
) -> None:
    with pytest.raises(AssertionError, match="multiple of 4096"):
        store.write(offset, [buffer_of(nbytes)])


def test_the_last_block_of_the_file_can_be_used_in_part(store: PosixStore) -> None:
    data = random_buffer(10)
    store.write(16 * MIB - 4096, [data]).wait()
    target = buffer_of(10)
    store.read(16 * MIB - 4096, [target]).wait()
    assert target == data


def test_many_threads_share_a_store(store: PosixStore) -> None:
    failures: list[int] = []

    def work(index: int) -> None:
        data = random_buffer(100_003, seed=index)
        for _ in range(10):
            store.write(index * MIB, [data]).wait()
            target = buffer_of(100_003)
            store.read(index * MIB, [target]).wait()
            if target != data:
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_dropped_completion_is_carried_out(store: PosixStore, file: SwapFile) -> None:
    data = bytes(random_buffer(5 * MIB))
    for _ in range(3):
        store.write(0, [memoryview(bytearray(data))])  # neither completion nor buffer is kept
    store.close()
    assert os.pread(file.fd, 5 * MIB, 0) == data


def test_an_interrupt_is_raised_when_the_buffers_are_free_again(file: SwapFile) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def is_waiting() -> bool:
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code is not futures.wait.__code__:
            frame = frame.f_back
        return frame is not None

    class Slow(FaultyCalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
            while not is_waiting():
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)  # who does not wait for the I/O shows it now
            return super().pwritev(fd, buffers, offset)

    store = PosixStore(file, calls=Slow([]))
    completion = store.write(0, [buffer_of(100)])
    with pytest.raises(KeyboardInterrupt):
        completion.wait()
    assert completion.done()
    completion.wait()
    store.close()


def test_threads_carry_the_pagers_name_and_end_at_close(file: SwapFile) -> None:
    both = threading.Barrier(2, timeout=20)

    class Together(FaultyCalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
            if offset < 8 * MIB:  # the first two of four tasks
                both.wait()
            return super().pwritev(fd, buffers, offset)

    store = PosixStore(file, num_threads=2, calls=Together([]))
    store.write(0, [buffer_of(16 * MIB)]).wait()
    names = {thread.name for thread in threading.enumerate()}
    assert {"tvm_pager-posix-0", "tvm_pager-posix-1"} <= names
    store.close()
    store.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("tvm_pager-posix") for name in names)
    with pytest.raises(TransferError, match="closed"):
        store.write(0, [buffer_of(1)])


def test_a_closed_file_is_noticed_before_any_io(store: PosixStore, file: SwapFile) -> None:
    file.close()
    with pytest.raises(TransferError, match="closed") as caught:
        store.read(0, [buffer_of(1)])
    assert caught.value.errno == errno.EBADF


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("is_write", [True, False])
def test_errors_carry_the_errno_at_each_wait(file: SwapFile, code: int, is_write: bool) -> None:
    store = PosixStore(file, calls=FaultyCalls([code]))
    completion = (store.write if is_write else store.read)(4096, [buffer_of(5000)])
    for _ in range(2):
        with pytest.raises(TransferError, match=os.strerror(code)) as caught:
            completion.wait()
        assert caught.value.errno == code
        assert "4096" in str(caught.value)
    assert completion.done()
    (store.write if is_write else store.read)(4096, [buffer_of(5000)]).wait()  # it goes on working
    store.close()


@pytest.mark.parametrize("is_write", [True, False])
def test_one_failed_part_fails_the_whole_after_all_parts_have_ended(
    file: SwapFile, is_write: bool
) -> None:
    calls = FaultyCalls([errno.EIO])
    store = PosixStore(file, calls=calls)
    completion = (store.write if is_write else store.read)(0, [buffer_of(16 * MIB)])
    with pytest.raises(TransferError, match="Input/output error"):
        completion.wait()
    assert completion.done()
    assert calls.num_calls >= 2
    store.close()


def test_partial_transfers_go_on_from_the_last_whole_block(file: SwapFile) -> None:
    data = random_buffer(64 * 1024)
    half = lambda n: n // 2  # noqa: E731
    odd = lambda n: min(n, 4096 * 3)  # noqa: E731
    store = PosixStore(file, calls=FaultyCalls([half, odd, half]))
    store.write(0, [data]).wait()
    assert os.pread(file.fd, len(data), 0) == bytes(data)
    store.close()
    store = PosixStore(file, calls=FaultyCalls([half, odd, half]))
    target = buffer_of(len(data))
    store.read(0, [target]).wait()
    assert target == data
    store.close()


@pytest.mark.parametrize("is_write", [True, False])
def test_no_progress_is_an_error_not_a_loop(file: SwapFile, is_write: bool) -> None:
    store = PosixStore(file, calls=FaultyCalls([lambda n: n // 2, lambda n: 0]))
    completion = (store.write if is_write else store.read)(0, [buffer_of(8192)])
    with pytest.raises(TransferError, match="short") as caught:
        completion.wait()
    assert caught.value.errno == errno.EIO
    store.close()


def test_a_file_that_was_cut_is_an_error(store: PosixStore, file: SwapFile) -> None:
    os.ftruncate(file.fd, 8192)
    with pytest.raises(TransferError, match="short"):
        store.read(4096, [buffer_of(8192)]).wait()


def test_refused_direct_io_degrades_once_and_loses_nothing(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, 16 * MIB)
    if file.io != "direct":
        file.close()
        pytest.skip(f"no direct I/O in {tmp_path}")

    class RefusesDirect(FaultyCalls):
        def _call(
            self, call: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int
        ) -> int:
            if fd == file.direct_fd:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super()._call(call, fd, buffers, offset)

    store = PosixStore(file, calls=RefusesDirect([]))
    data = random_buffer(12 * MIB + 3)
    store.write(0, [data]).wait()
    assert store.io == "buffered"
    assert len(file.notices) == 1
    target = buffer_of(len(data))
    store.read(0, [target]).wait()
    assert target == data
    store.close()
    file.close()


def test_einval_without_direct_io_is_an_error(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, MIB, direct=False)
    store = PosixStore(file, calls=FaultyCalls([errno.EINVAL]))
    with pytest.raises(TransferError, match="Invalid argument"):
        store.write(0, [buffer_of(10)]).wait()
    store.close()
    file.close()
