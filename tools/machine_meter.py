"""What the machine gives beside a block of steps: its link and its launching thread.

A GPU of a shared host has neighbours. They take from the host's memory, which every link ends in
(two GPUs of one host got 100 and 95 GB/s alone, and 140 together), and from its processors. A step
that was slow because of them says nothing about a policy.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Self

import torch

__all__ = ["MachineMeter"]

_NBYTES = 64 << 20
_NUM_COPIES = 8  # each way: 10 ms at 100 GB/s
_NUM_LAUNCHES = 500  # 5 ms
_guard = torch._C._DisableTorchDispatch


class MachineMeter:
    """Measures both directions of the link at once, and launches. A context manager.

    To be made before a pager takes over: memory of the device comes from the driver, so that
    neither torch's allocator nor a budget counts it, and page-locked memory is torch's.
    """

    def __init__(self) -> None:
        torch.cuda.init()
        self._driver: Any = ctypes.PyDLL("libcuda.so.1")
        self._hosts = [torch.ones(_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._small = torch.ones(64, device="cuda")
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._devices = [ctypes.c_uint64() for _ in range(2)]
        for pointer in self._devices:
            self._check(self._driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(_NBYTES)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        for pointer in self._devices:
            self._driver.cuMemFree_v2(pointer)

    def link_bytes_per_s(self) -> float:
        """Both directions together. Blocks, for some 10 ms; the device should be at rest."""
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        size = ctypes.c_size_t(_NBYTES)
        up, down = (ctypes.c_void_p(stream.cuda_stream) for stream in self._streams)
        addresses = [ctypes.c_void_p(host.data_ptr()) for host in self._hosts]
        for _ in range(_NUM_COPIES):
            self._check(self._driver.cuMemcpyHtoDAsync_v2(self._devices[0], addresses[0], size, up))
            self._check(
                self._driver.cuMemcpyDtoHAsync_v2(addresses[1], self._devices[1], size, down)
            )
        torch.cuda.synchronize()
        return 2 * _NUM_COPIES * _NBYTES / (time.perf_counter() - started_s)

    def launch_s(self) -> float:
        """Of one plain operation on 64 elements. Blocks; the device should be at rest."""
        with _guard(), torch.no_grad():
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            for _ in range(_NUM_LAUNCHES):
                torch.add(self._small, 1, out=self._small)
            took_s = time.perf_counter() - started_s
            torch.cuda.synchronize()
        return took_s / _NUM_LAUNCHES

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code} while the link was measured")
