"""Which engine is chosen, how fast it says it is, and kvikio against the same cases as posix.

kvikio runs in a fresh process, because it cannot be forked and may hang.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.block_io import FaultyCalls, buffer_of
from tvm_pager.errors import ConfigError, TransferError
from tvm_pager.transfer import kvikio
from tvm_pager.transfer.block_store import measure, open_block_store
from tvm_pager.transfer.posix import PosixStore

if TYPE_CHECKING:
    from tvm_pager.transfer.swap_file import SwapFile

ROOT = Path(__file__).resolve().parents[2]


# --- choice and measurement -----------------------------------------------------------------------


def test_auto_without_a_gpu_is_posix_in_silence(file: SwapFile) -> None:
    store, notices = open_block_store(file, "auto", on_gpu=False)
    assert (store.engine, notices) == ("posix", [])
    store.close()


def test_unknown_engine_is_refused(file: SwapFile) -> None:
    with pytest.raises(ConfigError, match="auto, posix, kvikio"):
        open_block_store(file, "io_uring", on_gpu=False)


def test_unusable_kvikio_is_refused_by_name_and_replaced_in_auto(file: SwapFile) -> None:
    is_usable, reason = kvikio.probe()
    if is_usable:
        pytest.skip("kvikio works here")
    with pytest.raises(ConfigError, match="engine='posix'"):
        open_block_store(file, "kvikio", on_gpu=True)
    store, notices = open_block_store(file, "auto", on_gpu=True)
    assert store.engine == "posix"
    assert len(notices) == 1
    assert reason in notices[0]
    store.close()


def test_measuring_says_how_fast_in_words(store: PosixStore) -> None:
    moments = iter([0.0, 1.0, 5.0, 7.0])
    text = measure(store, [buffer_of(10_000_000)], clock=lambda: next(moments))
    assert text == store.measured
    assert "write 0.01 GB/s, read 0.01 GB/s" in text or "write 0.01 GB/s, read 0.00 GB/s" in text


def test_measuring_finds_a_disk_that_forgets(file: SwapFile) -> None:
    class Forgetful(FaultyCalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
            return len(buffers[0])

    store = PosixStore(file, calls=Forgetful([]))
    with pytest.raises(TransferError, match="came back different"):
        measure(store, [buffer_of(8192)])
    store.close()


# --- kvikio ---------------------------------------------------------------------------------------

_DRIVER_NAMES = """
    MemHostAlloc MemFreeHost MemHostRegister_v2 MemHostUnregister MemcpyHtoDAsync_v2
    MemcpyDtoHAsync_v2 MemcpyAsync PointerGetAttribute PointerGetAttributes CtxCreate_v2
    CtxCreate_v4 CtxDestroy_v2 CtxPushCurrent_v2 CtxPopCurrent_v2 CtxGetCurrent CtxGetDevice
    MemGetAddressRange_v2 DeviceGet DeviceGetCount DeviceGetAttribute DevicePrimaryCtxRetain
    DevicePrimaryCtxRelease_v2 StreamSynchronize StreamCreate StreamDestroy_v2 EventSynchronize
    EventCreate EventDestroy_v2 EventRecord EventQuery LaunchHostFunc Init
"""
# 3 is CUDA_ERROR_NOT_INITIALIZED, which kvikio takes for "this is host memory".
_DRIVER_SOURCE = """
int cuDriverGetVersion(int *v) { *v = 0; return 0; }
int cuGetErrorName(int e, const char **s) { *s = "NOT_INITIALIZED"; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "stub"; return 0; }
"""

_KVIKIO_PROGRAM = """
import ctypes, errno, gc, os, sys
driver, directory, io = sys.argv[1:]
ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
from tests.unit import block_io as cases
from tests.unit.test_block_store import test_many_threads_share_a_store
from tvm_pager.errors import TransferError
from tvm_pager.transfer import kvikio
from tvm_pager.transfer.block_store import measure, open_block_store
from tvm_pager.transfer.swap_file import SwapFile

assert "kvikio" not in sys.modules, "importing the engine's module must not import kvikio"
is_usable, reason = kvikio.probe()
if not is_usable:
    sys.exit(f"unusable: {reason}")
file = SwapFile(directory, 16 << 20, direct=io == "direct")
store, notices = open_block_store(file, "kvikio", on_gpu=False)
assert (store.engine, notices) == ("kvikio", [])
for nbytes in cases.SIZES:
    for shift in cases.SHIFTS:
        data = cases.random_buffer(nbytes, shift)
        store.write(8192, [data]).wait()
        assert os.pread(file.fd, nbytes, 8192) == bytes(data), (nbytes, shift)
        target = cases.buffer_of(nbytes, shift)
        completion = store.read(8192, [target])
        completion.wait()
        completion.wait()
        assert completion.done()
        assert target == data, (nbytes, shift)
parts = [cases.random_buffer(n, seed=n) for n in (512, 4096, 3, 70000)]
store.write(0, parts).wait()
assert os.pread(file.fd, 74611, 0) == b"".join(parts)
test_many_threads_share_a_store(store)

data = bytes(cases.random_buffer(5 << 20))
for _ in range(20):
    store.write(0, [memoryview(bytearray(data))])  # dropped
    gc.collect()
assert "GB/s" in measure(store, [cases.buffer_of(1 << 20)])

os.ftruncate(file.fd, 8192)
completion = store.read(4096, [cases.buffer_of(8192)])
for _ in range(2):
    try:
        completion.wait()
    except TransferError as error:
        assert error.errno in (errno.EIO, errno.EFAULT), error  # kvikio is not sure itself
    else:
        raise AssertionError("a short read is an error")

child = os.fork()
if child == 0:  # kvikio itself hangs in a child
    try:
        store.read(0, [cases.buffer_of(1)])
    except TransferError:
        os._exit(17)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17

store.close()
store.close()
try:
    store.write(0, [cases.buffer_of(1)])
except TransferError as error:
    assert error.errno == errno.EBADF
else:
    raise AssertionError("closed")
file.close()
print("all well")
"""


@pytest.mark.skipif(find_spec("kvikio") is None, reason="the package kvikio is not installed")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the stand-in driver")
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_kvikio_does_the_same(tmp_path: Path, io: str) -> None:
    names = "".join(f"int cu{name}(void) {{ return 3; }}\n" for name in _DRIVER_NAMES.split())
    (tmp_path / "driver.c").write_text(_DRIVER_SOURCE + names)
    driver = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(driver)]
    subprocess.run([*command, str(tmp_path / "driver.c")], check=True, timeout=60)
    swap = tmp_path / "swap"
    swap.mkdir()
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _KVIKIO_PROGRAM, driver, swap, io],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if run.stderr.startswith("unusable: "):
        pytest.skip(run.stderr.strip())
    assert run.stdout == "all well\n", run.stderr
    assert os.listdir(swap) == []


def test_kvikios_words_become_errnos(file: SwapFile) -> None:
    class Future:
        def get(self) -> int:
            raise RuntimeError(
                "KvikIO failure at: x.cpp:1: POSIX error on pwrite: No space left on device"
            )

        def done(self) -> bool:
            return True

    class Store:
        def __init__(self) -> None:
            self.file = file
            self.forgotten: list[object] = []

        def forget(self, completion: object) -> None:
            self.forgotten.append(completion)

    store = Store()
    completion = kvikio.KvikioCompletion(store, [object()], ("writing", 4096, 10))  # type: ignore[arg-type]
    completion.add(Future(), 10)
    for _ in range(2):
        with pytest.raises(TransferError, match="No space left") as caught:
            completion.wait()
        assert caught.value.errno == errno.ENOSPC
    assert store.forgotten == [completion]


def test_kvikio_moving_less_than_asked_is_an_error(file: SwapFile) -> None:
    class Future:
        def get(self) -> int:
            return 9

        def done(self) -> bool:
            return True

    class Store:
        def __init__(self) -> None:
            self.file = file

        def forget(self, completion: object) -> None:
            pass

    completion = kvikio.KvikioCompletion(Store(), [object()], ("reading", 0, 10))  # type: ignore[arg-type]
    completion.add(Future(), 10)
    with pytest.raises(TransferError, match="moved 9 of 10") as caught:
        completion.wait()
    assert caught.value.errno == errno.EIO
