"""Peak memory of a plain run where no allocator counts it: the sum of its live storages.

On CUDA `torch.cuda.max_memory_allocated` answers this; on the CPU nothing does. `Footprint` sees
every operation, and follows each storage from the operation that made it until torch releases it.
What a kernel allocates and frees inside one operation is not seen, so the figure is a lower bound
of what plain torch needs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["Footprint"]


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the live storages of one device type: `live_bytes` now, `peak_bytes` at worst.

    Args:
        device_type: storages elsewhere are not counted.
        tensors: made before; counted from the start.
    """

    live_bytes: int
    peak_bytes: int

    def __init__(self, device_type: str = "cpu", tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._device_type = device_type
        # By id of the storage's Python object, which torch keeps as long as the storage itself. The
        # weak reference takes its entry out before the id can be used again.
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        # Backward runs operations, and releases storages, on threads of its own; a release can also
        # happen inside `_count`, so the lock is re-entrant.
        self._lock = threading.RLock()
        for tensor in tensors:
            self._count(tensor)

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
            known = self._storages.get(key)
            if known is not None and known[1] == nbytes:
                return
            if known is not None:
                reference = known[0]  # and its size is another: the storage was resized
            else:
                reference = weakref.ref(storage, functools.partial(self._release, key))
            self._storages[key] = (reference, nbytes)
            self.live_bytes += nbytes - (known[1] if known else 0)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            self.live_bytes -= self._storages.pop(key)[1]
