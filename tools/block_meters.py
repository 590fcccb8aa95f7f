"""What is read at a block of steps: when each ended, and who has left the device."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch

from tools.bench_llama import synchronise
from tvm_pager.events import Event, EventKind
from tvm_pager.memory import PageKind, PageTable

__all__ = ["Clock", "Others"]

_CERTAIN = {PageKind.PARAM, PageKind.GRAD, PageKind.OPT_STATE, PageKind.ACTIVATION}


class Others:
    """Counts bytes that left the device though their kinds are not the policy's.

    Of kinds that are known for certain: what is an activation is often learned later.
    """

    def __init__(self) -> None:
        self.table: PageTable | None = None
        self.kinds: Collection[PageKind] | None = None
        self.nbytes = 0

    def emit(self, event: Event) -> None:
        if event.kind is EventKind.EVICT and self.kinds is not None and self.table is not None:
            page = self.table.pages.get(event.page_id)
            if page is not None and page.kind in _CERTAIN and page.kind not in self.kinds:
                self.nbytes += page.nbytes


class Clock:
    """The ends of steps: on the device's clock where there is one, so that nobody waits."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = []
        self._started_s = time.perf_counter()
        self.tick()

    def tick(self) -> None:
        """One step more has been launched."""
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        self._marks.append(mark)

    def stop(self) -> tuple[list[float], float]:
        """Waits; gives the seconds of each step and of all of them."""
        synchronise()
        block_s = time.perf_counter() - self._started_s
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._is_cuda:
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs], block_s
        return [end - begin for begin, end in pairs], block_s
