"""Engine `kvikio`: the swap file through NVIDIA's library, for GPU machines.

Host buffers, and device memory for the direct route.

Importing this module neither imports kvikio nor needs it; `probe` says whether it can be used.

[Note: What kvikio does not do]
    Its futures own neither file nor buffer (dropping either first corrupts memory), its errors are
    text without an errno, and without libcuda no I/O works at all. After a fork its threads are
    gone and I/O hangs. With compatibility mode off or automatic and no driver, opening a file may
    spin for ever: so that mode is forced on before the import unless GPUDirect is wanted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tvm_pager.errors import TransferError
from tvm_pager.transfer.block_store import check_range, transfer_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.transfer.swap_file import SwapFile

__all__ = ["KvikioCompletion", "KvikioStore", "probe"]

_TASK_BYTES = 2 << 20  # several to a chunk of a disk's lane
_DEVICE_TASK_BYTES = 8 << 20  # two to a chunk: each is a call of the driver
_DRIVER = "libcuda.so.1"


def probe(*, gds: bool = False) -> tuple[bool, str]:
    """Says whether the engine works here, and if not, why. The first call imports kvikio (0.2 s).

    Args:
        gds: leave kvikio's compatibility mode as the environment says, so that GPUDirect can be
            used. Only on a machine with a GPU; see [Note: What kvikio does not do].
    """
    with contextlib.suppress(ImportError, ValueError):  # what cannot tell is imported below
        if importlib.util.find_spec("kvikio") is None:
            return False, "the package kvikio is not installed"
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        return False, f"no CUDA driver ({error})"
    if not gds:
        os.environ["KVIKIO_COMPAT_MODE"] = "ON"  # read once, at the import
    was_loaded = "kvikio" in sys.modules
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        if was_loaded and not gds:
            defaults.set({"compat_mode": kvikio.CompatMode.ON})
    except Exception as error:  # a broken installation must not take the posix engine down with it
        return False, f"importing kvikio failed ({type(error).__name__}: {error})"
    return True, ""


class KvikioCompletion:
    """The completion of several kvikio futures. Holds file and buffers until all have ended."""

    __slots__ = ("_error", "_futures", "_lock", "_owned", "_range", "_store")

    def __init__(self, store: KvikioStore, owned: list[Any], span: tuple[str, int, int]) -> None:
        self._futures: list[tuple[Any, int]] = []
        self._owned = owned
        self._store = store
        self._range = span
        self._error: TransferError | None = None
        self._lock = threading.Lock()

    def add(self, future: Any, nbytes: int) -> None:
        """Takes one more future, which must move `nbytes` bytes."""
        self._futures.append((future, nbytes))

    def done(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # somebody is waiting for it
        try:
            return all(future.done() for future, _ in self._futures)
        finally:
            self._lock.release()

    def wait(self) -> None:
        interrupt: BaseException | None = None
        with self._lock:
            while self._futures:
                future, nbytes = self._futures[0]
                try:
                    moved = future.get()
                    if moved != nbytes:
                        self._fail(f"moved {moved} of {nbytes} bytes", errno.EIO)
                except Exception as error:
                    self._fail(str(error), None)
                except BaseException as error:  # an interrupt; see [Note: Completions]
                    interrupt = interrupt or error
                    continue
                del self._futures[0]
            if self._owned:
                self._finish()
        if interrupt is not None:
            raise interrupt
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _finish(self) -> None:
        verb, offset, nbytes = self._range
        file = self._store.file
        if verb == "writing" and self._error is None and file.io == "buffered":
            try:
                file.push(offset, nbytes)
            except TransferError as error:
                self._error = error
        self._owned.clear()
        self._store.forget(self)

    def _fail(self, detail: str, code: int | None) -> None:
        verb, offset, nbytes = self._range
        what = f"{verb} {nbytes} bytes at {offset} of the swap file"
        self._error = self._error or transfer_error(what, self._store.file, detail, code)


class KvikioStore:
    """Block store over kvikio's thread pool, which is the process's; see [Note: Blocks].

    kvikio aligns and splits by itself, so lengths go to it as they are.

    Args:
        file: the open swap file; stays its owner's.
        num_threads: I/O depth, for all users of kvikio in this process.

    Raises:
        TransferError: kvikio cannot open the file.
    """

    engine = "kvikio"

    def __init__(self, file: SwapFile, *, num_threads: int = 4) -> None:
        kvikio = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults").set(
            {
                "num_threads": num_threads,
                "task_size": _TASK_BYTES,
                "auto_direct_io_read": file.io == "direct",
                "auto_direct_io_write": file.io == "direct",
            }
        )
        self.measured = ""
        self.file = file
        self._lock = threading.Lock()
        self._in_flight: set[KvikioCompletion] = set()
        self._is_closed = False
        try:
            self._handle = kvikio.CuFile(file.path, "r+")  # "w" would truncate
        except Exception as error:
            raise transfer_error(
                "opening the swap file with kvikio", file, str(error), None
            ) from error

    @property
    def io(self) -> Literal["direct", "buffered"]:
        return self.file.io

    def write(self, file_offset: int, buffers: Sequence[memoryview]) -> KvikioCompletion:
        return self._submit("writing", file_offset, buffers)

    def read(self, file_offset: int, buffers: Sequence[memoryview]) -> KvikioCompletion:
        return self._submit("reading", file_offset, buffers)

    def write_device(self, file_offset: int, parts: Sequence[Any]) -> KvikioCompletion:
        """Starts writing device memory, uint8 tensors one after the other; otherwise as `write`.

        The caller has waited for the work that fills them: kvikio knows no streams.
        """
        return self._start("writing", file_offset, parts, _DEVICE_TASK_BYTES)

    def read_device(self, file_offset: int, parts: Sequence[Any]) -> KvikioCompletion:
        """Starts filling device memory; what it has read is there for every stream when done."""
        return self._start("reading", file_offset, parts, _DEVICE_TASK_BYTES)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            left = list(self._in_flight)
        for completion in left:
            with contextlib.suppress(TransferError):  # whoever waits for it is told
                completion.wait()
        if not self._handle.closed:
            self._handle.close()

    def forget(self, completion: KvikioCompletion) -> None:
        """Drops the store's own reference to a completion that has ended."""
        with self._lock:
            self._in_flight.discard(completion)

    def _submit(self, verb: str, offset: int, buffers: Sequence[memoryview]) -> KvikioCompletion:
        arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers if len(buffer)]
        return self._start(verb, offset, arrays)

    def _start(
        self, verb: str, offset: int, arrays: Sequence[Any], *task_bytes: int
    ) -> KvikioCompletion:
        nbytes = check_range(self.file, offset, arrays)
        completion = KvikioCompletion(self, [self._handle, *arrays], (verb, offset, nbytes))
        with self._lock:
            if self._is_closed:
                raise TransferError("the block store is closed: make a new pager", errno.EBADF)
            # Kept before the first byte moves: a dropped completion must not free what is in use.
            self._in_flight.add(completion)
        self._sweep()
        start = self._handle.pwrite if verb == "writing" else self._handle.pread
        try:
            for array in arrays:
                completion.add(start(array, array.nbytes, offset, *task_bytes), array.nbytes)
                offset += array.nbytes
        except Exception as error:
            completion._fail(str(error), None)  # what was started is waited for by `wait`
        return completion

    def _sweep(self) -> None:
        """Finishes completions that have ended and that nobody waited for."""
        with self._lock:
            left = [completion for completion in self._in_flight if completion.done()]
        for completion in left:
            with contextlib.suppress(TransferError):
                completion.wait()
