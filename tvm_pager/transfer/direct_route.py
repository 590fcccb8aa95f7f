"""Chooses the route between device and NVMe: through host memory, or directly. By measurement."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from tvm_pager.transfer.device_copy import CudaCopier
from tvm_pager.transfer.gpu_direct import is_offered
from tvm_pager.transfer.kvikio import KvikioStore
from tvm_pager.transfer.protocol import Lane, Piece, Transfer

if TYPE_CHECKING:
    from tvm_pager.transfer.routes import Routes

__all__ = ["choose_direct"]

_TRIAL_BYTES = 64 << 20


def choose_direct(routes: Routes, device: torch.device, *, is_forced: bool) -> None:
    """Lets device and file exchange bytes directly where that is possible and faster.

    To run before the first page is there: it overwrites the start of the file. 0.2 s where
    GPUDirect is offered, else nothing.

    Args:
        routes: whose `direct` is set.
        device: a CUDA device.
        is_forced: take the direct route without asking or measuring, wherever the engine knows it.
    """
    store = routes.store
    if not isinstance(store, KvikioStore) or not (is_forced or is_offered()[0]):
        return
    if is_forced:
        routes.direct = store
        return
    nbytes = min(_TRIAL_BYTES, store.file.nbytes)
    storage = torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]
    copier = CudaCopier(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    staged_s = _time(routes, storage, copier)
    routes.direct = store
    if _time(routes, storage, copier) >= staged_s:
        routes.direct = None


def _time(routes: Routes, storage: torch.UntypedStorage, copier: CudaCopier) -> float:
    """Seconds that a write and a read take on the route that is set; the better of two."""
    pieces = (Piece(0, 0, 0, storage.nbytes()),)
    seconds = []
    for _ in range(2):
        started_s = time.perf_counter()
        for lane in (Lane.D2N, Lane.N2D):
            for _ in routes.steps(Transfer(-1, lane, pieces, storage), storage, copier):
                pass
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)
