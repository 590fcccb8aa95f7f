"""Peak memory of a plain run where no allocator counts it: the sum of its live storages.

On CUDA `torch.cuda.max_memory_allocated` answers this; on the CPU nothing does. `Footprint` sees
every operation, and follows each storage from the operation that made it until torch releases it.
What a kernel allocates and frees inside one operation is not seen, so the figure is a lower bound
of what plain torch needs.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["Footprint"]


class _StorageRef(weakref.ref["torch.UntypedStorage"]):
    """A weak reference that still knows its storage's key and size once that is gone."""

    __slots__ = ("key", "nbytes")

    key: int
    nbytes: int


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the live storages of one device type: `live_bytes` now, `peak_bytes` at worst.

    Args:
        device_type: storages elsewhere are not counted.
        tensors: made before; counted from the start.

    Attributes:
        peak_bytes: the most that was alive at the end of one operation.
    """

    peak_bytes: int

    def __init__(self, device_type: str = "cpu", tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._device_type = device_type
        # By id of the storage's Python object, which torch keeps as long as the storage itself. An
        # id can be used again: entries of what was released are taken out before one is looked up.
        self._storages: dict[int, _StorageRef] = {}
        # The callback of the weak references is `append` itself: in one written in Python, Ctrl-C
        # would be raised, reported as "Exception ignored", and lost.
        self._released: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._lock = threading.Lock()  # backward runs operations on threads of its own
        for tensor in tensors:
            self._count(tensor)

    @property
    def live_bytes(self) -> int:
        """Bytes of the counted storages that torch has not released."""
        with self._lock:
            self._take_out_released()
            return self._live_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and counts the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        with self._lock:
            self._take_out_released()
            known = self._storages.get(key)
            if known is None:
                known = self._storages[key] = _StorageRef(storage, self._released.append)
                known.key, known.nbytes = key, 0
            self._live_bytes += nbytes - known.nbytes  # a known storage can have been resized
            known.nbytes = nbytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _take_out_released(self) -> None:
        while self._released:
            reference = self._released.popleft()
            assert isinstance(reference, _StorageRef)
            self._live_bytes -= reference.nbytes
            del self._storages[reference.key]
