"""The host slab: flat offsets over regions, page-locking in step with mapping, fork."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.interpreter import run_program
from tests.unit.locker import RecordingLocker
from tvm_pager.errors import TransferError
from tvm_pager.transfer.slab import HostSlab

REGION_BYTES = 16384


def make_slab(nbytes: int, **options: object) -> HostSlab:
    return HostSlab(nbytes, region_bytes=REGION_BYTES, **{"page_lock": False, **options})


def test_capacity_is_rounded_down_and_nothing_is_mapped_before_use() -> None:
    slab = make_slab(3 * REGION_BYTES + 4095)
    assert slab.capacity_bytes == 3 * REGION_BYTES
    assert slab.mapped_bytes == 0
    slab.view(2 * REGION_BYTES, 1)
    assert slab.mapped_bytes == REGION_BYTES
    slab.grow(1)
    assert slab.mapped_bytes == 2 * REGION_BYTES


def test_last_region_is_exact() -> None:
    slab = make_slab(REGION_BYTES + 4096)
    slab.grow(1 << 40)
    assert slab.mapped_bytes == REGION_BYTES + 4096
    with pytest.raises(AssertionError, match="leaves"):
        slab.view(REGION_BYTES + 4096, 1)


def test_empty_slab_holds_nothing() -> None:
    slab = make_slab(4095)
    assert slab.capacity_bytes == 0
    assert slab.view(0, 0) == []
    slab.close()


@pytest.mark.parametrize(
    ("offset", "nbytes", "lengths"),
    [
        (0, REGION_BYTES, [REGION_BYTES]),
        (512, REGION_BYTES, [REGION_BYTES - 512, 512]),
        (REGION_BYTES - 1, REGION_BYTES + 2, [1, REGION_BYTES, 1]),
        (100, 0, []),
    ],
)
def test_ranges_split_at_region_borders(offset: int, nbytes: int, lengths: list[int]) -> None:
    slab = make_slab(3 * REGION_BYTES)
    assert [len(view) for view in slab.view(offset, nbytes)] == lengths
    assert [len(buffer) for buffer in slab.buffers(offset, nbytes)] == lengths
    assert [size for _, size in slab.addresses(offset, nbytes)] == lengths


def test_tensors_buffers_and_addresses_are_the_same_bytes() -> None:
    slab = make_slab(2 * REGION_BYTES)
    (low, high) = slab.view(REGION_BYTES - 4, 8)
    low.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    high.copy_(torch.tensor([5, 6, 7, 8], dtype=torch.uint8))
    assert b"".join(slab.buffers(REGION_BYTES - 4, 8)) == bytes(range(1, 9))
    parts = [ctypes.string_at(at, size) for at, size in slab.addresses(REGION_BYTES - 4, 8)]
    assert b"".join(parts) == bytes(range(1, 9))


def test_regions_are_page_aligned() -> None:
    slab = make_slab(2 * REGION_BYTES)
    assert [at % 4096 for at, _ in slab.addresses(0, 2 * REGION_BYTES)] == [0, 0]


def test_views_made_in_inference_mode_are_ordinary_tensors() -> None:
    slab = make_slab(REGION_BYTES)
    with torch.inference_mode():
        (view,) = slab.view(0, 16)
    view.fill_(3)  # an inference tensor refuses this outside of the mode
    assert not view.is_inference()


def test_views_stay_readable_after_close() -> None:
    slab = make_slab(REGION_BYTES)
    (view,) = slab.view(0, 16)
    view.fill_(7)
    slab.close()
    assert view.tolist() == [7] * 16
    assert slab.mapped_bytes == 0


def test_closed_slab_says_so() -> None:
    slab = make_slab(REGION_BYTES)
    slab.close()
    slab.close()
    with pytest.raises(TransferError, match="closed"):
        slab.view(0, 1)


def test_each_region_is_locked_once_and_unlocked_at_close() -> None:
    locker = RecordingLocker()
    slab = make_slab(2 * REGION_BYTES + 4096, page_lock=True, locker=locker)
    slab.view(0, 1)
    slab.view(0, 1)
    assert list(locker.locked.values()) == [REGION_BYTES]
    slab.grow(slab.capacity_bytes)
    assert sum(locker.locked.values()) == slab.locked_bytes == slab.mapped_bytes
    assert slab.locked_bytes == 2 * REGION_BYTES + 4096
    slab.close()
    assert not locker.locked
    assert slab.locked_bytes == 0


def test_refused_lock_counts_nothing_and_can_be_tried_again() -> None:
    locker = RecordingLocker(limit_bytes=REGION_BYTES)
    slab = make_slab(2 * REGION_BYTES, page_lock=True, locker=locker)
    slab.view(0, 1)
    with pytest.raises(TransferError, match="too much"):
        slab.view(REGION_BYTES, 1)
    assert slab.locked_bytes == slab.mapped_bytes == REGION_BYTES
    locker.limit_bytes *= 2
    slab.view(REGION_BYTES, 1)
    slab.close()


@pytest.mark.parametrize(("nbytes", "region"), [(-1, 4096), (4096, 0), (4096, 1000)])
def test_sizes_that_make_no_sense_are_refused(nbytes: int, region: int) -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        HostSlab(nbytes, region_bytes=region, page_lock=False)


def test_memory_that_the_system_refuses_is_an_error_with_numbers() -> None:
    slab = HostSlab(1 << 60, region_bytes=1 << 60, page_lock=False)
    with pytest.raises(TransferError, match="smaller host budget") as caught:
        slab.view(0, 1)
    assert caught.value.errno is not None


def test_a_forked_child_has_no_slab_and_can_end_in_peace() -> None:
    program = """
import gc, os
from tvm_pager.errors import TransferError
from tvm_pager.transfer.slab import HostSlab
slab = HostSlab(1 << 20, page_lock=False)
(view,) = slab.view(0, 16)
view.fill_(9)
child = os.fork()
if child == 0:
    try:
        slab.view(0, 16)
    except TransferError:
        del slab, view
        gc.collect()
        os._exit(17)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert view.tolist() == [9] * 16
"""
    run = run_program(program)
    assert run.returncode == 0, run.stderr
