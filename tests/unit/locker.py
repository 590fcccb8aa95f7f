"""A page-locker that locks nothing, remembers everything, and can be made to wait or refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tvm_pager.errors import TransferError

PATIENCE_S = 30.0  # far more than anything here takes


class RecordingLocker:
    """Remembers what is locked; refuses once `limit_bytes` are; asks `before` first."""

    def __init__(
        self, limit_bytes: int = 1 << 40, before: Callable[[int], None] | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.before = before or (lambda call: None)
        self.locked: dict[int, int] = {}
        self.num_calls = 0
        self._lock = threading.Lock()

    @property
    def locked_bytes(self) -> int:
        return sum(self.locked.values())

    def lock(self, address: int, nbytes: int) -> None:
        with self._lock:
            call = self.num_calls
            self.num_calls += 1
        self.before(call)
        with self._lock:
            assert address not in self.locked
            if self.locked_bytes + nbytes > self.limit_bytes:
                raise TransferError(f"too much: {nbytes} bytes")
            self.locked[address] = nbytes

    def unlock(self, address: int, nbytes: int) -> None:
        with self._lock:
            assert self.locked.pop(address) == nbytes


class Turnstile:
    """Lets calls with the given numbers wait until it is opened; tells when one has arrived."""

    def __init__(self, *calls: int) -> None:
        self.calls = calls
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def __call__(self, call: int) -> None:
        if call in self.calls:
            self.arrived.set()
            assert self.opened.wait(PATIENCE_S)
