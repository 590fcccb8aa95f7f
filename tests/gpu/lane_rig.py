"""Backends, pages and slots for the tests of lanes on a GPU, and ways to delay and to look."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from tests.gpu.harness import MIB, SLEEP_CYCLES, settled_bytes
from tests.unit.small_backends import alias
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Ticket, Transfer
from tvm_pager.transfer.stream_lane import StreamLane
from tvm_pager.transfer.torch_backend import TorchBackend, TorchBackendOptions

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 32 * MIB
PATIENCE_S = 30.0
Make = Callable[..., TorchBackend]
Reuse = Callable[[TorchBackend, int], torch.Tensor | torch.UntypedStorage]


@contextlib.contextmanager
def open_backends(directory: Path) -> Iterator[Make]:
    """Gives a maker of backends whose slab is page-locked from the start; closes them."""
    settled_bytes()
    made: list[TorchBackend] = []

    def build(host_bytes: int, nvme_bytes: int = 0) -> TorchBackend:
        backend = TorchBackend(
            "cuda",
            host_bytes,
            directory if nvme_bytes else None,
            nvme_bytes,
            engine="posix",
            options=TorchBackendOptions(measure=False, margin_bytes=0),
        )
        made.append(backend)
        backend.grow_host(backend.host_capacity_bytes)
        return backend

    try:
        yield build
    finally:
        torch.cuda.synchronize()
        for backend in made:
            backend.close()


def main_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def a_page(backend: TorchBackend, value: int, nbytes: int = PAGE) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(0, device=backend.device)
    backend.allocate_device(storage, nbytes)
    alias(storage).fill_(value)
    return storage


def copy(lane: Lane, page: torch.UntypedStorage, slot: int, nbytes: int = PAGE) -> Transfer:
    """All of a page from or to the slot of its size in the slab, or in the file."""
    source, target = (0, slot * PAGE) if lane.value[0] == "d" else (slot * PAGE, 0)
    return Transfer(slot, lane, (Piece(0, source, target, nbytes),), page, (main_stream(),))


def submit_all(
    backend: TorchBackend, lane: Lane, pages: list[torch.UntypedStorage], priority: Priority
) -> list[Ticket]:
    """Page i from or to slot i."""
    return [backend.submit(copy(lane, page, slot), priority) for slot, page in enumerate(pages)]


def in_slab(backend: TorchBackend, slot: int) -> list[torch.Tensor]:
    return backend._slab.view(slot * PAGE, PAGE)


def fill_slab(backend: TorchBackend, num_slots: int) -> None:
    """Slot i holds i + 1, over and over."""
    for slot in range(num_slots):
        for view in in_slab(backend, slot):
            view.fill_(slot + 1)


def holds(views: list[torch.Tensor], value: int) -> bool:
    return all(bool((view == value).all()) for view in views)


def stream_of(backend: TorchBackend, lane: Lane) -> torch.cuda.Stream:
    found = backend._lanes[lane][1]
    assert isinstance(found, StreamLane)
    return found.stream


def delay(backend: TorchBackend, lane: Lane) -> None:
    """What is put on the lane from now on comes a tenth of a second late."""
    with torch.cuda.stream(stream_of(backend, lane)):
        torch.cuda._sleep(SLEEP_CYCLES)


def num_done(tickets: list[Ticket]) -> int:
    return sum(ticket.done() for ticket in tickets)


def until_done(tickets: list[Ticket]) -> None:
    """Looks, and does nothing else: neither waits, which makes urgent, nor enters the backend."""
    deadline_s = time.monotonic() + PATIENCE_S
    while num_done(tickets) < len(tickets):
        assert time.monotonic() < deadline_s, f"{num_done(tickets)} of {len(tickets)}"
        time.sleep(0.001)


def seconds_of(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def one_copy_s(backend: TorchBackend, lane: Lane, page: torch.UntypedStorage, slot: int) -> float:
    """A page of 32 MiB on an idle lane, submitted and waited for; best of a few."""
    torch.cuda.synchronize()
    return min(seconds_of(lambda: backend.submit(copy(lane, page, slot)).wait()) for _ in range(10))


def reuse_by_backend(backend: TorchBackend, value: int) -> torch.UntypedStorage:
    return a_page(backend, value)


def reuse_by_torch(backend: TorchBackend, value: int) -> torch.Tensor:
    return torch.full((PAGE,), value, dtype=torch.uint8, device=backend.device)


def overwrite(
    backend: TorchBackend, reuse: Reuse, place: int, value: int
) -> list[torch.Tensor | torch.UntypedStorage]:
    """Takes memory on the current stream until some of it lies at `place`, and fills it."""
    made: list[torch.Tensor | torch.UntypedStorage] = []
    for _ in range(8):
        made.append(reuse(backend, value))
        if made[-1].data_ptr() == place:
            return made
    raise AssertionError("the memory was not reused, so nothing would be shown")
