"""What operations take on their device, while they are recorded.

[Note: Head start]
    A device that has nothing to do passes the event before an operation at once, and then waits
    for the launch: between the two events would be time of the launching thread. So an idle device
    is given something to wait for first, for longer than the operator's calls take, and the
    operation is launched before that has ended. Recording an event gives up the interpreter, and a
    lane's thread may keep it for longer than that; so the event is put down a second time, by a
    call to the driver that does not.
    On H200 machines that had nothing to do for half of an iteration, the sum was 0.53 to 0.55 s
    for 0.38 s of kernels, and the plan made from it 12 % slower. 60 to 80 us for all operators were
    enough for those that launch one kernel of their own; products, which ask a library first,
    still came out as 0.51 to 0.9 ms instead of 0.35.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HeadStarts", "OpTimer"]

_CYCLES_PER_NS = 2  # of a fast device; others wait a little longer
_LEAST_NS, _MOST_NS = 50_000, 1_000_000  # a launch takes 10 us; a first call may compile a kernel
_MARGIN = 1.5  # over the usual call: an idle device waits for each operation of a recording
_NEW_SHARE = 0.25  # of the last call in what is usual


class HeadStarts:
    """How long an idle device has to wait for each operator; see [Note: Head start]."""

    def __init__(self) -> None:
        self._called_ns: dict[str, float] = {}

    def ns(self, name: str) -> int:
        """Nanoseconds for the operator's next call."""
        return int(min(_MOST_NS, max(_LEAST_NS, _MARGIN * self._called_ns.get(name, 0.0))))

    def called(self, name: str, nanoseconds: int) -> None:
        """A call of the operator took the launching thread as long as that."""
        last_ns = min(nanoseconds, _MOST_NS)
        usual_ns = self._called_ns.get(name, last_ns)
        self._called_ns[name] = usual_ns + _NEW_SHARE * (last_ns - usual_ns)


class OpTimer:
    """Measures one operation, from its making to `stop`.

    On CUDA two events are put around it, and looked at when the time is asked for.

    Args:
        device: where it runs.
        before: the one of the operation before.
        head_start_ns: that the device waits for if it has nothing to do.

    Attributes:
        cost_ns: what measuring has cost the launching thread so far.
        called_ns: of that thread, how long the call took that was measured; 0: it goes on.
    """

    def __init__(self, device: torch.device, before: OpTimer | None, head_start_ns: int) -> None:
        self._events: list[torch.cuda.Event] = []
        self.cost_ns = self.called_ns = 0
        self._start_ns = made_ns = time.perf_counter_ns()
        if device.type == "cuda":
            start = self._mark()
            if before is None or before.is_over():
                cycles = head_start_ns * _CYCLES_PER_NS
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            # Where it fails, the event stays where it is, and the time is a little longer.
            _driver().cuEventRecord(start.cuda_event, _current_stream(device.index))
            self._start_ns = time.perf_counter_ns()
            self.cost_ns = self._start_ns - made_ns

    def is_over(self) -> bool:
        """Whether the operation has ended, and the device with it what was launched before."""
        if not self._events:
            return True
        return bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def stop(self) -> int | Callable[[], int]:
        """The nanoseconds; on CUDA a function that waits for them."""
        now_ns = time.perf_counter_ns()
        self.called_ns = now_ns - self._start_ns
        if not self._events:
            return self.called_ns
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
