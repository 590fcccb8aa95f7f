"""The engine kvikio gives the same bits as plain torch, where the package is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.harness import same
from tests.gpu.programs import Trained
from tests.unit.small_backends import alias
from tvm_pager.transfer.kvikio import probe
from tvm_pager.transfer.protocol import Lane, Piece, Transfer
from tvm_pager.transfer.torch_backend import TorchBackend, TorchBackendOptions

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kvikio() -> None:
    works, why = probe(gds=True)
    if not works:
        pytest.skip(f"kvikio cannot be used here: {why}")


@pytest.mark.parametrize("mode", ["context", "adopt"])
def test_training_over_kvikio_gives_the_same_bits(mode: str, tmp_path: Path) -> None:
    stats = same(Trained(), tmp_path, nvme=True, mode=mode, engine="kvikio")
    assert stats.engine.startswith("kvikio ("), stats.engine
    assert "kvikio" in str(stats)


def test_auto_takes_kvikio_on_a_gpu_machine_and_says_so(tmp_path: Path) -> None:
    program = Trained(depth=8, num_steps=1)
    stats = same(program, tmp_path, nvme=True, engine="auto")
    assert stats.engine.partition(" ")[0] in {"kvikio", "posix"}
    if not stats.engine.startswith("kvikio"):
        assert any("kvikio" in notice for notice in stats.notices), stats.notices


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 5000, (40 << 20) + 7])
def test_the_direct_route_moves_device_memory(nbytes: int, tmp_path: Path) -> None:
    """In compatibility mode too, where kvikio copies through host memory of its own."""
    backend = TorchBackend(
        "cuda",
        1 << 20,
        tmp_path,
        64 << 20,
        engine="kvikio",
        options=TorchBackendOptions(device_io="direct", margin_bytes=0),
    )
    assert "device memory directly" in backend.engine_text
    data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    storage = torch.UntypedStorage(nbytes, device="cuda")
    alias(storage).copy_(data)
    piece = (Piece(0, 0, 4096, nbytes),)
    owner = (backend.current_executor(),)
    backend.submit(Transfer(1, Lane.D2N, piece, storage, owner)).wait()
    alias(storage).fill_(0xDB)
    piece = (Piece(0, 4096, 0, nbytes),)
    backend.submit(Transfer(1, Lane.N2D, piece, storage, owner)).wait()
    assert torch.equal(alias(storage).cpu(), data)
    backend.close()
