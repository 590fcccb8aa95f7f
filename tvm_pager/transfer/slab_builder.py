"""Builds a host slab ahead of use, one region after the other, in a thread of its own.

[Note: A build in the background]
    The thread holds the slab only while it works on one region, so a slab that nobody holds any
    more ends it, and so do `stop`, the first error and the end of the interpreter. It asks for the
    next missing region each time: what other threads have mapped meanwhile is not done twice, and
    what has been cut off is not done at all.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.transfer.slab import HostSlab

__all__ = ["SlabBuilder"]

_REPORT_INTERVAL_S = 0.25
_LOGGER = logging.getLogger(__name__)


class SlabBuilder:
    """The builder of one slab; see [Note: A build in the background].

    Attributes:
        error: what ended the last build, or None.
    """

    def __init__(self, slab: HostSlab) -> None:
        self.error: TransferError | None = None
        self._slab = weakref.ref(slab)
        self._lock = threading.Lock()  # guards what follows; never held while anything is mapped
        self._thread: threading.Thread | None = None
        self._target_bytes = 0
        self._progress: Callable[[int, int], None] | None = None
        self._reported_s = 0.0

    def build(self, nbytes: int, progress: Callable[[int, int], None] | None) -> None:
        """See `HostSlab.build_in_background`."""
        with self._lock:
            self.error = None
            self._progress, self._reported_s = progress or self._progress, 0.0
            if self._thread is not None:
                self._target_bytes = max(self._target_bytes, nbytes)
                return
            self._target_bytes = nbytes
            thread = threading.Thread(target=self._run, name="tvm_pager-slab", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise TransferError(
                    f"host slab: no thread for the build ({error}); raise ulimit -u, or do without",
                    errno.EAGAIN,
                ) from error
            self._thread = thread

    def stop(self) -> None:
        """Ends the build after the region that is under way, if any. Blocks for that."""
        with self._lock:
            self._target_bytes, self._progress = 0, None
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        with self._lock:
            target_bytes = self._target_bytes
        try:
            slab = self._slab()
            if slab is not None:
                self._report(slab, target_bytes)
                if slab.map_next(target_bytes):
                    return True
        except Exception as error:
            self._fail(error, target_bytes)
            return False
        with self._lock:
            is_extended = slab is not None and self._target_bytes > target_bytes
            if not is_extended:
                self._thread = self._progress = None
            return is_extended

    def _fail(self, error: Exception, target_bytes: int) -> None:
        text, code = str(error), getattr(error, "errno", None)
        if not isinstance(error, TransferError):
            text = f"{type(error).__name__}: {error}; give a smaller host budget"
        with self._lock:
            # A new one: the traceback of the old one holds the slab.
            self.error = TransferError(
                f"building {format_bytes(target_bytes)} of the host slab ahead of use: {text}", code
            )
            self._thread = self._progress = None

    def _report(self, slab: HostSlab, target_bytes: int) -> None:
        progress, now_s = self._progress, time.monotonic()
        if progress is None:
            return
        total_bytes = min(target_bytes, slab.capacity_bytes)
        done_bytes = slab.ready_bytes(total_bytes)
        if done_bytes < total_bytes and now_s - self._reported_s < _REPORT_INTERVAL_S:
            return
        self._reported_s = now_s
        try:
            progress(done_bytes, total_bytes)
        except Exception:
            _LOGGER.warning("host slab: the progress callback failed", exc_info=True)
            self._progress = None
