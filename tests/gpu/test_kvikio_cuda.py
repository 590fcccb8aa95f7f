"""The engine kvikio gives the same bits as plain torch, where the package is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.harness import same
from tests.gpu.programs import Trained
from tvm_pager.transfer.kvikio import probe

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
