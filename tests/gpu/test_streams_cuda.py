"""Memory of a page is copied, released or reused only after every stream that used it.

Sleep kernels make the order certain: what the host enqueues after one runs a tenth of a second
later, unless somebody waits as they must. Users wait where plain torch asks them to, and nowhere
else. See [Note: Streams] in runtime/context.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tvm_pager
from tests.gpu.harness import MIB, SLEEP_CYCLES, open_pager, same, settled_bytes
from tests.gpu.programs import Streams
from tvm_pager.memory import Tier
from tvm_pager.runtime.storage import storage_of

pytestmark = pytest.mark.gpu

NUM = 8 * MIB  # floats: 32 MiB


@pytest.fixture
def seen() -> torch.Tensor:
    """A plain tensor: made before any pager, so that nothing moves it."""
    settled_bytes()
    return torch.zeros(NUM, device="cuda")


@pytest.fixture
def pager(seen: torch.Tensor, tmp_path: Path) -> Iterator[Any]:
    with open_pager(tmp_path) as pager:
        yield pager
        pager.check_invariants()


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def address(tensor: torch.Tensor) -> int:
    """Where a resident page lies; below `data_ptr()`, which would keep it there."""
    return storage_of(tensor).data_ptr()


def resident_and_clean(pager: Any, stream: torch.cuda.Stream | None = None) -> torch.Tensor:
    """A page of ones whose copy below is current, fetched under `stream`."""
    x = torch.full((NUM,), 1.0, device="cuda")
    pager.evict_all()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x.add(0)
    torch.cuda.synchronize()
    assert pager.residency(x) is Tier.DEVICE
    return x


def overwrite(place: int) -> list[torch.Tensor]:
    """New pages full of sevens on the current stream; one of them must lie at `place`."""
    made = []
    for _ in range(8):
        made.append(torch.full((NUM,), 7.0, device="cuda"))
        if address(made[-1]) == place:
            return made
    return made


@pytest.mark.filterwarnings("ignore::UserWarning")  # autograd's, on gradients of other streams
@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_forward_backward_and_recompute_on_three_streams(nvme: bool, tmp_path: Path) -> None:
    same(Streams(), tmp_path, fraction=0.35, nvme=nvme)


def test_clean_page_stays_until_a_side_stream_has_read_it(
    pager: Any, side: torch.cuda.Stream, seen: torch.Tensor
) -> None:
    x = resident_and_clean(pager)
    place, before = address(x), pager.stats()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        seen.copy_(x)
    pager.evict_all()
    made = overwrite(place)
    torch.cuda.synchronize()
    assert pager.stats().num_clean_evictions > before.num_clean_evictions
    assert place in map(address, made), "the memory was not reused, so nothing was shown"
    assert bool((seen == 1).all())
    assert bool((x == 1).all())


def test_write_back_waits_for_a_side_stream_that_writes(
    pager: Any, side: torch.cuda.Stream
) -> None:
    x = resident_and_clean(pager)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.fill_(5)
    pager.evict_all()
    torch.cuda.current_stream().wait_stream(side)
    assert pager.residency(x) is not Tier.DEVICE
    assert bool((x == 5).all())


def test_page_fetched_under_one_stream_is_consumed_on_another(
    pager: Any, side: torch.cuda.Stream
) -> None:
    x = torch.arange(NUM, device="cuda", dtype=torch.float32)
    pager.evict_all()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)  # the fetch must not be behind it for the other reader
        y = x + 1
    z = x * 2
    torch.cuda.current_stream().wait_stream(side)
    expected = torch.arange(NUM, dtype=torch.float32)
    assert torch.equal(z.cpu(), expected * 2)
    assert torch.equal(y.cpu(), expected + 1)


def test_page_in_a_side_streams_pool_stays_until_the_default_stream_has_read_it(
    pager: Any, side: torch.cuda.Stream, seen: torch.Tensor
) -> None:
    """Fetched under the side stream, perhaps into its pool; used here; evicted clean; reused."""
    x = resident_and_clean(pager, side)
    place = address(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda._sleep(SLEEP_CYCLES)
    seen.copy_(x)
    pager.evict_all()
    with torch.cuda.stream(side):
        made = overwrite(place)
    torch.cuda.synchronize()
    del made
    assert bool((seen == 1).all())
    assert bool((x == 1).all())


def test_page_made_on_a_side_stream_is_evicted_clean_and_its_memory_reused(
    pager: Any, side: torch.cuda.Stream, seen: torch.Tensor
) -> None:
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        x = torch.full((NUM,), 3.0, device="cuda")
        pager.evict_all()  # written back from behind the sleep
        x.add(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda._sleep(SLEEP_CYCLES)
    seen.copy_(x)
    place = address(x)
    pager.evict_all()
    with torch.cuda.stream(side):
        made = overwrite(place)
    torch.cuda.synchronize()
    del made
    assert bool((seen == 3).all())
    assert bool((x == 3).all())


@pytest.mark.parametrize("home", ["default", "side"])
def test_dropped_page_goes_back_to_the_pool_that_it_came_from(
    home: str, pager: Any, side: torch.cuda.Stream, seen: torch.Tensor
) -> None:
    """In plain torch a tensor may be dropped while its own stream still uses it: that stream
    alone reuses the memory. A fetch under another stream must not change whose it is."""
    main = torch.cuda.current_stream()
    own, other = (main, side) if home == "default" else (side, main)
    with torch.cuda.stream(own):
        x = torch.full((NUM,), 1.0, device="cuda")
    torch.cuda.synchronize()
    pager.evict_all()
    with torch.cuda.stream(other):
        x.add(0)
    torch.cuda.synchronize()
    place = address(x)
    with torch.cuda.stream(own):
        torch.cuda._sleep(SLEEP_CYCLES)
        seen.copy_(x)
        del x
    with torch.cuda.stream(other):
        made = overwrite(place)
    torch.cuda.synchronize()
    del made
    assert bool((seen == 1).all())


def test_write_through_a_pointer_taken_under_a_side_stream_is_not_lost(
    pager: Any, side: torch.cuda.Stream
) -> None:
    x = torch.full((NUM,), 1.0, device="cuda")
    pager.evict_all()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.data_ptr()
        alias = torch.from_dlpack(x)
        torch.cuda._sleep(SLEEP_CYCLES)
        with torch._C._DisableTorchDispatch():  # as a kernel that was launched with the pointer
            alias.fill_(5)
    del alias
    pager.release(x)
    pager.evict_all()
    torch.cuda.current_stream().wait_stream(side)
    assert pager.residency(x) is not Tier.DEVICE
    assert bool((x == 5).all())


@torch.library.custom_op("tvm_pager_tests::slow_fill", mutates_args=("x",))
def slow_fill(x: torch.Tensor, value: float) -> None:
    torch.cuda._sleep(SLEEP_CYCLES)
    x.fill_(value)


def test_write_by_a_custom_operator_under_a_side_stream_is_not_lost(
    pager: Any, side: torch.cuda.Stream
) -> None:
    x = resident_and_clean(pager)
    with torch.cuda.stream(side):
        slow_fill(x, 5.0)
    pager.evict_all()
    torch.cuda.current_stream().wait_stream(side)
    assert bool((x == 5).all())


def test_asynchronous_copies_to_and_from_pinned_memory_finish_before_the_page_leaves(
    pager: Any, side: torch.cuda.Stream
) -> None:
    x = resident_and_clean(pager)
    out, back = torch.empty(NUM, pin_memory=True), torch.full((NUM,), 9.0).pin_memory()
    side.wait_stream(torch.cuda.current_stream())
    place = address(x)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        out.copy_(x, non_blocking=True)
    pager.evict_all()
    made = overwrite(place)
    side.synchronize()
    assert bool((out == 1).all())
    del made
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(back, non_blocking=True)
    pager.evict_all()
    torch.cuda.current_stream().wait_stream(side)
    assert bool((x == 9).all())


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_graph_capture_over_pages_is_refused_by_name(pager: Any) -> None:
    """A graph keeps addresses for ever, so a replay after an eviction would read what is there."""
    x = torch.ones(1024, device="cuda")
    x.add(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(tvm_pager.PagerError, match=r"(?i)graph"), torch.cuda.graph(graph):
        x.add(1)
    torch.cuda.synchronize()
    assert bool((x + 1 == 2).all())
