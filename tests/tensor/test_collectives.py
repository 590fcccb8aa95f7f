"""Collectives over pages: they stay while a collective works on them, and leave when it is done.

Most tests are rank 0 of two, in this process: the other rank is a bare gloo backend that joins a
collective when the test says so. Two real processes run what needs `torch.distributed` as a whole.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

import tvm_pager
from tests.tensor.two_processes import run_on_two_ranks, start_and_wait, train_data_parallel
from tests.trials.harness import KIB, num_pages, small_pager

# Newer torch has other names for them, which older torch does not know.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.distributed.*deprecated:FutureWarning")

TIMEOUT = timedelta(seconds=20)
NUM = 1024  # elements of a block; a page of 4 KiB


class Ranks(NamedTuple):
    """Two ranks of one group. What the second does, it does on plain tensors."""

    group: dist.ProcessGroup
    other: dist.ProcessGroup


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    store = dist.HashStore()
    groups: dict[int, dist.ProcessGroup] = {}

    def connect(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        backend = dist.ProcessGroupGloo(store, rank, 2, options)
        groups[rank] = group = dist.ProcessGroup(store, rank, 2)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, backend)
        group._set_group_name(f"rank {rank} of one process")

    other = threading.Thread(target=connect, args=(1,))  # each waits for the other
    other.start()
    connect(0)
    other.join()
    # Functional collectives look the group up by its name.
    distributed_c10d._register_process_group(groups[0].group_name, groups[0])
    yield Ranks(groups[0], groups[1])
    distributed_c10d._unregister_process_group(groups[0].group_name)


def plain(*values: float) -> torch.Tensor:
    """Blocks of equal numbers, on no page."""
    with torch._C._DisableTorchDispatch():
        return torch.tensor(values).repeat_interleave(NUM)


def paged(*values: float) -> torch.Tensor:
    return torch.cat([torch.full((NUM,), value) for value in values])


def blocks(tensor: torch.Tensor) -> list[float]:
    """The numbers of which `tensor` has blocks."""
    rows = tensor.reshape(-1, NUM)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


class Case(NamedTuple):
    """One collective by both its interfaces; rank 1 always joins by the first."""

    operands: tuple[tuple[tuple[float, ...], ...], ...]  # of each rank: the output first
    start: Callable[..., Any]  # gives a Work
    functional: Callable[..., list[Any]]  # of the last operand, and the group
    result: tuple[float, ...]  # of rank 0
    can_tell: bool = True  # when it is done; gloo's reduce_scatter cannot


CASES = {
    "all_reduce": Case(
        (((1.0,),), ((2.0,),)),
        dist.all_reduce,
        lambda own, group: [functional.all_reduce(own, "sum", group)],
        (3.0,),
    ),
    "all_gather": Case(
        (((0.0, 0.0), (1.0,)), ((0.0, 0.0), (2.0,))),
        dist.all_gather_into_tensor,
        lambda own, group: [functional.all_gather_tensor(own, 0, group)],
        (1.0, 2.0),
    ),
    "reduce_scatter": Case(
        (((0.0,), (1.0, 2.0)), ((0.0,), (3.0, 4.0))),
        dist.reduce_scatter_tensor,
        lambda own, group: [functional.reduce_scatter_tensor(own, "sum", 0, group)],
        (4.0,),
        can_tell=False,
    ),
    "all_to_all": Case(
        (((0.0, 0.0), (1.0, 2.0)), ((0.0, 0.0), (3.0, 4.0))),
        dist.all_to_all_single,
        lambda own, group: [functional.all_to_all_single(own, None, None, group)],
        (1.0, 3.0),
    ),
    "broadcast": Case(
        (((0.0,),), ((5.0,),)),
        lambda own, **options: dist.broadcast(own, group_src=1, **options),
        lambda own, group: [functional.broadcast(own, 1, group)],
        (5.0,),
    ),
    "all_reduce_coalesced": Case(
        (((1.0,), (1.0,)), ((2.0,), (2.0,))),
        lambda *own, **options: dist.all_reduce_coalesced(list(own), **options),
        lambda own, group: functional.all_reduce_coalesced([own, own], "sum", group),
        (3.0,),
    ),
}


COPIED = ("all_reduce", "broadcast", "all_reduce_coalesced")  # the functional ones clone the input


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def join(case: Case, ranks: Ranks) -> Any:
    """Rank 1's part; gives its Work."""
    operands = [plain(*values) for values in case.operands[1]]
    return case.start(*operands, group=ranks.other, async_op=True)


def tiers(pager: Any, *tensors: torch.Tensor) -> set[str]:
    return {pager.residency(tensor).name for tensor in tensors}


@pytest.mark.parametrize("name", CASES)
def test_pages_stay_until_the_collective_is_done(name: str, ranks: Ranks, pager: Any) -> None:
    case = CASES[name]
    operands = [paged(*values) for values in case.operands[0]]
    pager.evict_all()
    assert "DEVICE" not in tiers(pager, *operands)
    work = case.start(*operands, group=ranks.group, async_op=True)
    for _ in range(2):
        pager.evict_all()
        assert tiers(pager, *operands) == {"DEVICE"}
        if case.can_tell:
            pager.step()  # a boundary is no reason
    other = join(case, ranks)
    work.wait()
    other.wait()
    if not case.can_tell:
        pager.step()
    pager.evict_all()
    assert "DEVICE" not in tiers(pager, *operands)
    assert blocks(operands[0]) == list(case.result)


@pytest.mark.parametrize("name", CASES)
def test_pages_of_a_functional_collective_stay_until_it_is_done(
    name: str, ranks: Ranks, pager: Any
) -> None:
    case = CASES[name]
    own = paged(*case.operands[0][-1])
    pager.evict_all()
    outs = case.functional(own, ranks.group)
    results = [out.elem for out in outs]  # each is an AsyncCollectiveTensor
    inputs = () if name in COPIED else (own,)
    for _ in range(2):
        pager.evict_all()
        assert tiers(pager, *results, *inputs) == {"DEVICE"}
        if case.can_tell:
            pager.step()
    join(case, ranks).wait()
    if not case.can_tell:
        pager.step()
    pages = (*results, own)
    until(lambda: pager.evict_all() == 0 and "DEVICE" not in tiers(pager, *pages))
    outs = [functional.wait_tensor(out) for out in outs]
    assert blocks(outs[-1]) == list(case.result)
    pager.evict_all()
    assert "DEVICE" not in tiers(pager, *pages)
    assert blocks(own) == list(case.operands[0][-1])


def test_a_request_that_lacks_room_waits_for_a_collective(ranks: Ranks, tmp_path: Path) -> None:
    with small_pager(tmp_path, device=64 * KIB) as pager:
        held = torch.full((12 * NUM,), 1.0)  # 48 KiB
        other = plain(*[2.0] * 12)
        work = dist.all_reduce(held, group=ranks.group, async_op=True)
        is_joining = threading.Event()

        def join() -> None:
            is_joining.set()  # first: it may be over before this thread runs again
            dist.all_reduce(other, group=ranks.other, async_op=True)

        late = threading.Timer(0.3, join)
        late.start()
        fresh = torch.full((12 * NUM,), 7.0)  # has no room beside it
        assert is_joining.is_set()
        assert tiers(pager, held) == {"HOST"}
        work.wait()
        late.join()
        assert blocks(held) == [3.0] * 12
        assert blocks(fresh) == [7.0] * 12


def test_a_request_does_not_wait_for_what_it_may_have_to_answer(
    ranks: Ranks, tmp_path: Path
) -> None:
    with small_pager(tmp_path, device=64 * KIB) as pager:
        held = torch.zeros(12 * NUM)
        work = dist.irecv(held, group=ranks.group, group_src=1)
        with pytest.raises(tvm_pager.BudgetError):
            torch.zeros(12 * NUM)
        sent = plain(*[5.0] * 12)
        dist.isend(sent, group=ranks.other, group_dst=0).wait()
        work.wait()
        assert blocks(held) == [5.0] * 12
        pager.evict_all()
        assert tiers(pager, held) == {"HOST"}


@pytest.mark.parametrize("is_coalesced", [False, True])
def test_an_unfinished_exchange_is_held_until_the_next_boundary(
    is_coalesced: bool, ranks: Ranks, pager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = paged(1.0)
    if is_coalesced:
        # As inside `batch_isend_irecv` on a backend that starts operations together.
        monkeypatch.setitem(distributed_c10d._world.pg_coalesce_state, ranks.group, [])
    work = dist.isend(tensor, group=ranks.group, group_dst=1)
    received = plain(0.0)
    dist.irecv(received, group=ranks.other, group_src=0).wait()
    if is_coalesced:
        work.wait()  # of this operation alone it means nothing
    pager.evict_all()
    assert tiers(pager, tensor) == {"DEVICE"}
    pager.step()
    pager.evict_all()
    assert tiers(pager, tensor) == {"HOST"}
    assert blocks(received) == [1.0]


def test_finished_collectives_keep_nothing_alive(ranks: Ranks, pager: Any) -> None:
    before = num_pages(pager)
    for _ in range(20):
        tensor = paged(1.0)
        work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
        join(CASES["all_reduce"], ranks).wait()
        work.wait()
        del tensor, work
    until(lambda: num_pages(pager) == before)
    for _ in range(3):  # without a boundary
        operands = [paged(*values) for values in CASES["reduce_scatter"].operands[0]]
        work = dist.reduce_scatter_tensor(*operands, group=ranks.group, async_op=True)
        join(CASES["reduce_scatter"], ranks).wait()
        work.wait()
        del operands, work
    until(lambda: num_pages(pager) == before)


class Transparent(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_mode", [False, True])
def test_results_over_plain_inputs_are_held_too(
    has_mode: bool, ranks: Ranks, tmp_path: Path
) -> None:
    own = plain(1.0)
    mode = Transparent() if has_mode else contextlib.nullcontext()
    with mode, small_pager(tmp_path) as pager:
        out = functional.all_reduce(own, "sum", ranks.group)
        pager.evict_all()
        assert tiers(pager, out.elem) == {"DEVICE"}
        join(CASES["all_reduce"], ranks).wait()
        out = out.trigger_wait()
        pager.step()
        pager.evict_all()
        assert tiers(pager, out) == {"HOST"}
        assert blocks(out) == [3.0]


def test_adopted_pages_are_held_outside_every_context(ranks: Ranks, tmp_path: Path) -> None:
    module = torch.nn.Linear(NUM, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    with contextlib.closing(small_pager(tmp_path)) as pager:
        pager.page(module)
        with torch.no_grad():
            out = functional.all_reduce(module.weight, "sum", ranks.group)
        pager.evict_all()
        assert tiers(pager, out.elem) == {"DEVICE"}
        join(CASES["all_reduce"], ranks).wait()
        assert blocks(out.trigger_wait()) == [3.0]
        assert blocks(module.weight.detach()) == [1.0]


def test_a_page_may_leave_when_its_collective_is_done_and_not_before(tmp_path: Path) -> None:
    run_on_two_ranks(start_and_wait, tmp_path)


def test_data_parallel_training_over_pages_gives_the_same_bits(tmp_path: Path) -> None:
    run_on_two_ranks(train_data_parallel, tmp_path)
