"""What the tests of the torch backend share: small backends, random pages, whole copies."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tvm_pager.transfer.protocol import Lane, Piece, Transfer
from tvm_pager.transfer.torch_backend import TorchBackend, TorchBackendOptions

MIB = 1 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Make = Callable[..., TorchBackend]


@contextlib.contextmanager
def small_backends(device: str, directory: Path) -> Iterator[Make]:
    """Gives a maker of backends with small regions and staging; closes them at the end."""
    with contextlib.ExitStack() as stack:

        def build(
            host_bytes: int = 8 * MIB, nvme_bytes: int | None = 8 * MIB, **options: Any
        ) -> TorchBackend:
            small = {"region_bytes": 256 << 10, "staging_bytes": 64 << 10}
            quick = {"measure": False, "margin_bytes": 0}
            backend = TorchBackend(
                device,
                host_bytes,
                None if nvme_bytes is None else directory,
                nvme_bytes or 0,
                engine="posix",
                options=TorchBackendOptions(**{**small, **quick, **options}),
            )
            stack.callback(backend.close)
            return backend

        yield build


def bytes_of(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes)), dtype=torch.uint8)


def alias(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def page_of(backend: TorchBackend, data: torch.Tensor) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(0, device=backend.device)
    backend.allocate_device(storage, len(data))
    alias(storage).copy_(data)
    return storage


def copy(lane: Lane, storage: torch.UntypedStorage | None, nbytes: int, offset: int) -> Transfer:
    """The whole of a page to or from `offset` of the other tier, or tiers."""
    source = 0 if lane.value[0] == "d" else offset
    target = 0 if lane.value[2] == "d" else offset
    return Transfer(1, lane, (Piece(0, source, target, nbytes),), storage)


def run(backend: TorchBackend, lane: Lane, *args: Any) -> None:
    ticket = backend.submit(copy(lane, *args))
    ticket.wait()
    assert ticket.done()
    ticket.wait()


def wipe(backend: TorchBackend, storage: torch.UntypedStorage, nbytes: int) -> None:
    backend.release_device(storage)
    assert storage.nbytes() == 0
    backend.allocate_device(storage, nbytes)
    alias(storage).fill_(0xDB)
