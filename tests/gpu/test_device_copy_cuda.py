"""Copies by address, as a thread that has used no device makes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.harness import MIB
from tvm_pager.runtime.device import prepare_cuda
from tvm_pager.transfer.device_copy import CudaCopier, SlabRange
from tvm_pager.transfer.slab import HostSlab

pytestmark = pytest.mark.gpu

NBYTES = 256 * MIB  # a mapping of an expandable segment has 20 MiB


@pytest.fixture
def slab() -> Iterator[HostSlab]:
    slab = HostSlab(NBYTES, page_lock=True)
    slab.grow(NBYTES)
    yield slab
    slab.close()


@pytest.mark.parametrize("down", [True, False])
def test_a_threads_first_call_may_be_a_copy_across_mappings(slab: HostSlab, down: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    prepare_cuda(device)
    pattern = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    data = (pattern if down else torch.zeros_like(pattern)).to(device)
    address = data.data_ptr()
    segments = torch.cuda.memory_snapshot()
    assert any(
        found["is_expandable"] and 0 <= address - found["address"] < found["total_size"]
        for found in segments
    )
    (host,) = slab.view(0, NBYTES)
    if not down:
        host.copy_(pattern)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    copier, failures = CudaCopier(stream), list[BaseException]()

    def copy() -> None:
        try:
            copier.copy(data.untyped_storage(), 0, SlabRange(slab, 0, NBYTES), down=down)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    stream.synchronize()
    assert not failures
    assert torch.equal(host if down else data.cpu(), pattern)
