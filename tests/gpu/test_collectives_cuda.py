"""Pages stay while NCCL works on them, on a stream of its own, long after its call has returned.

One rank is enough: its collective, too, runs behind what the current stream has yet to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.gpu.harness import MIB, SLEEP_CYCLES, open_pager
from tvm_pager.memory import Tier

pytestmark = pytest.mark.gpu

NUM = 8 * MIB  # floats: 32 MiB


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/rendezvous",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("is_functional", [False, True])
def test_a_page_stays_while_nccl_works_on_it(
    is_functional: bool, group: Any, tmp_path: Path
) -> None:
    with open_pager(tmp_path) as pager:
        x = torch.full((NUM,), 2.0, device="cuda")
        dist.all_reduce(x)  # makes the communicator
        torch.cuda.synchronize()
        pager.evict_all()
        assert pager.residency(x) is not Tier.DEVICE  # waited for, so it may leave
        x.add_(1.0)
        torch.cuda._sleep(SLEEP_CYCLES)
        out: Any
        if is_functional:
            out = functional.all_reduce(x, "sum", group)
            page, wait = out.elem, out.trigger_wait
        else:
            out = dist.all_reduce(x, async_op=True)
            page, wait = x, out.wait
        pager.step()
        pager.evict_all()
        assert pager.residency(page) is Tier.DEVICE
        torch.cuda.synchronize()
        pager.evict_all()
        assert pager.residency(page) is not Tier.DEVICE
        wait()
        assert bool((page == 3.0).all())
        pager.check_invariants()
