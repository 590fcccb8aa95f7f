"""What an operation takes on its device, while it is recorded.

[Note: Head start]
    A device that has nothing to do passes the event before an operation at once, and then waits
    for the launch: between the two events would be time of the launching thread. So an idle device
    is given something to wait for first, and the operation is launched before that has ended.
    Recording an event gives up the interpreter, and a lane's thread may keep it for longer than
    that; so the event is put down a second time, by a call to the driver that does not.
    On H200 machines that had nothing to do for half of an iteration, the sum was 0.53 to 0.55 s
    for 0.38 s of kernels, and the plan made from it 12 % slower.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OpTimer"]

_HEAD_START_CYCLES = 160_000  # of the device: 80 us at 2 GHz; a launch takes 10 to 40


class OpTimer:
    """Measures one operation, from its making to `stop`.

    On CUDA two events are put around it, and looked at when the time is asked for.

    Args:
        device: where it runs.
        before: the one of the operation before; see [Note: Head start].

    Attributes:
        cost_ns: what measuring has cost the launching thread so far.
    """

    def __init__(self, device: torch.device, before: OpTimer | None) -> None:
        self._events: list[torch.cuda.Event] = []
        self.cost_ns = 0
        self._start_ns = time.perf_counter_ns()
        if device.type == "cuda":
            start = self._mark()
            if before is None or before.is_over():
                torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            # Where it fails, the event stays where it is, and the time is a little longer.
            _driver().cuEventRecord(start.cuda_event, _current_stream(device.index))
            self.cost_ns = time.perf_counter_ns() - self._start_ns

    def is_over(self) -> bool:
        """Whether the operation has ended, and the device with it what was launched before."""
        if not self._events:
            return True
        return bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def stop(self) -> int | Callable[[], int]:
        """The nanoseconds; on CUDA a function that waits for them."""
        now_ns = time.perf_counter_ns()
        if not self._events:
            return now_ns - self._start_ns
        self._mark()
        self.cost_ns += time.perf_counter_ns() - now_ns
        return self._device_ns

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        return event

    def _device_ns(self) -> int:
        start, end = self._events
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)


@functools.cache
def _driver() -> Any:
    driver = ctypes.PyDLL("libcuda.so.1")  # which keeps the interpreter
    driver.cuEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return driver


def _current_stream(index: int | None) -> int:
    return int(torch._C._cuda_getCurrentRawStream(0 if index is None else index))
