"""Lanes over CUDA streams: urgent transfers overtake, memory is reused in stream order.

Sleep kernels make the order certain: one on a lane's own stream delays the copies behind it by a
tenth of a second, while everything else goes on at once.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.harness import MIB, SLEEP_CYCLES
from tests.gpu.lane_rig import (
    PAGE,
    Make,
    Reuse,
    a_page,
    copy,
    delay,
    fill_slab,
    holds,
    in_slab,
    main_stream,
    num_done,
    one_copy_s,
    open_backends,
    overwrite,
    reuse_by_backend,
    reuse_by_torch,
    seconds_of,
    submit_all,
    until_done,
)
from tests.unit.small_backends import alias
from tvm_pager.errors import TransferError
from tvm_pager.transfer.protocol import Lane, Priority
from tvm_pager.transfer.region import CudaLocker
from tvm_pager.transfer.routes import CHUNK_BYTES

if TYPE_CHECKING:
    from tvm_pager.transfer.protocol import Ticket

pytestmark = pytest.mark.gpu

NUM = 64  # pages of 32 MiB: 2 GiB
DOWN, UP = Lane.D2H, Lane.H2D


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with open_backends(tmp_path) as build:
        yield build


# --- who goes first -------------------------------------------------------------------------------


def test_a_fault_does_not_wait_for_two_gibibytes_of_prefetches(make: Make) -> None:
    backend = make((NUM + 1) * PAGE)
    fill_slab(backend, NUM + 1)
    pages = [a_page(backend, 0xEE) for _ in range(NUM)]
    wanted = a_page(backend, 0xEE)
    copy_s = one_copy_s(backend, UP, wanted, NUM)
    waited_s, left = [], []
    for _ in range(3):  # the best round counts: the host itself may be held up
        for page in (*pages, wanted):
            alias(page).fill_(0xEE)
        torch.cuda.synchronize()
        queued = submit_all(backend, UP, pages, Priority.PREFETCH)
        fault = backend.submit(copy(UP, wanted, NUM), Priority.FAULT)
        assert fault.is_certain
        waited_s.append(seconds_of(fault.wait))
        left.append(len(queued) - num_done(queued))
        assert bool((alias(wanted) == NUM + 1).all())
        until_done(queued)
        for slot, page in enumerate(pages):
            assert bool((alias(page) == slot + 1).all()), slot
    assert max(left) > NUM // 2, f"the fault was served behind the prefetches: {left}"
    limit_s = 3 * 4 * copy_s
    assert min(waited_s) < limit_s, f"waited {waited_s}, one copy takes {copy_s}"
    # Otherwise the limit would prove nothing: all that was queued takes much longer.
    assert limit_s < NUM * copy_s / 2


def test_a_prefetch_that_is_needed_after_all_overtakes_the_others(make: Make) -> None:
    """By stream order: the host waits for nothing, the consumer for the copy."""
    backend = make(NUM * PAGE)
    fill_slab(backend, NUM)
    pages = [a_page(backend, 0xEE) for _ in range(NUM)]
    torch.cuda.synchronize()
    delay(backend, UP)
    queued = submit_all(backend, UP, pages, Priority.PREFETCH)
    needed = queued[-1]
    assert not needed.is_certain
    ordered_s = seconds_of(lambda: backend.order(needed, (main_stream(),)))
    assert needed.is_certain
    assert not needed.done()
    assert ordered_s < 0.05, "only queueing was to be done"
    result = alias(pages[-1]) == NUM
    assert bool(result.all())
    assert num_done(queued) < NUM // 2
    until_done(queued)
    for slot, page in enumerate(pages):
        assert bool((alias(page) == slot + 1).all()), slot


def test_a_write_back_that_is_waited_for_overtakes_the_others(make: Make) -> None:
    backend = make(NUM * PAGE)
    pages = [a_page(backend, slot + 1) for slot in range(NUM)]
    torch.cuda.synchronize()
    copy_s = one_copy_s(backend, DOWN, pages[0], 0)
    queued = submit_all(backend, DOWN, pages, Priority.WRITE_BACK)
    last, middle = queued[-1], queued[NUM // 2]
    backend.promote(middle, Priority.FAULT)
    assert middle.is_certain
    waited_s = seconds_of(last.wait)
    left = len(queued) - num_done(queued)
    assert middle.done(), "it was promoted first, and nothing overtakes on a stream"
    assert left > NUM // 2
    assert waited_s < NUM * copy_s / 2
    assert holds(in_slab(backend, NUM - 1), NUM)
    until_done(queued)
    for slot in range(NUM):
        assert holds(in_slab(backend, slot), slot + 1), slot


def test_cancelled_prefetches_write_nothing_and_let_go_of_their_memory(make: Make) -> None:
    backend = make(NUM * PAGE)
    fill_slab(backend, NUM)
    pages = [a_page(backend, 0xEE) for _ in range(NUM)]
    torch.cuda.synchronize()
    delay(backend, UP)
    queued = submit_all(backend, UP, pages, Priority.PREFETCH)
    cancelled = [backend.cancel(ticket) for ticket in queued]
    num_begun = cancelled.count(False)
    assert 1 <= num_begun <= 4, "two chunks of 16 MiB are on the stream"
    assert cancelled == [False] * num_begun + [True] * (NUM - num_begun)
    for ticket in queued[num_begun:]:
        assert ticket.done()
        assert ticket.transfer.memory is None
        with pytest.raises(TransferError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.ECANCELED
    backend.release_device(pages.pop())  # at once: nothing will write it
    until_done(queued)
    for slot, page in enumerate(pages):
        expected = slot + 1 if slot < num_begun else 0xEE
        assert bool((alias(page) == expected).all()), slot


# --- memory is reused in stream order -------------------------------------------------------------


@pytest.mark.parametrize("is_told", [True, False], ids=["ordered", "control"])
@pytest.mark.parametrize(
    ("reuse", "value"),
    [(reuse_by_torch, 7), (reuse_by_backend, 0xDB)],
    ids=["reused", "poisoned"],
)
def test_memory_released_under_a_late_write_back_is_overwritten_after_it(
    make: Make, reuse: Reuse, value: int, is_told: bool
) -> None:
    """The control does not mention the copy on release, and shows that the order is what helps."""
    backend = make(PAGE)
    page = a_page(backend, 3)
    backend.submit(copy(DOWN, page, 0)).wait()  # warm-up
    for view in in_slab(backend, 0):
        view.fill_(0)
    place = page.data_ptr()
    delay(backend, DOWN)
    ticket = backend.submit(copy(DOWN, page, 0))
    assert ticket.is_certain
    tickets = (ticket,) if is_told else ()
    released_s = seconds_of(
        lambda: backend.release_device(page, (main_stream(),), tickets, main_stream())
    )
    made = overwrite(backend, reuse, place, value)
    assert not ticket.done(), "the sleep was too short, so nothing was shown"
    assert released_s < 0.05
    ticket.wait()
    torch.cuda.synchronize()
    assert holds(in_slab(backend, 0), 3 if is_told else value)
    del made


def test_memory_released_while_a_side_stream_and_a_copy_read_it(make: Make) -> None:
    """Allocated on the main stream, read elsewhere twice, reused on the main stream."""
    backend = make(PAGE)
    page = a_page(backend, 3)
    seen = torch.zeros(PAGE, dtype=torch.uint8, device=backend.device)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    place = page.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        seen.copy_(alias(page))
    delay(backend, DOWN)
    ticket = backend.submit(copy(DOWN, page, 0))
    backend.release_device(page, (main_stream(), side), (ticket,), main_stream())
    made = overwrite(backend, reuse_by_torch, place, 7)
    assert not side.query()
    torch.cuda.synchronize()
    assert bool((seen == 3).all())
    assert holds(in_slab(backend, 0), 3)
    del made


def test_memory_of_a_late_fetch_is_not_written_by_it_after_it_was_reused(make: Make) -> None:
    """A page may die as soon as its fetch is ordered before the main stream."""
    backend = make(PAGE)
    fill_slab(backend, 1)
    page = a_page(backend, 0)
    backend.submit(copy(UP, page, 0)).wait()
    place = page.data_ptr()
    delay(backend, UP)
    ticket = backend.submit(copy(UP, page, 0))
    backend.order(ticket, (main_stream(),))
    backend.release_device(page, (main_stream(),), (), main_stream())
    assert not ticket.done()
    made = overwrite(backend, reuse_by_torch, place, 7)
    torch.cuda.synchronize()
    assert isinstance(made[-1], torch.Tensor)
    assert bool((made[-1] == 7).all())


def test_a_transfer_comes_after_the_work_that_was_queued_on_its_memory(make: Make) -> None:
    """Also where it is on the stream much later than it was submitted."""
    backend = make(NUM * PAGE)
    pages = [a_page(backend, 0xEE) for _ in range(4)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    for slot, page in enumerate(pages):
        alias(page).fill_(slot + 1)
    queued = submit_all(backend, DOWN, pages, Priority.WRITE_BACK)
    assert num_done(queued) == 0
    until_done(queued)
    for slot in range(4):
        assert holds(in_slab(backend, slot), slot + 1)


# --- both ways, many sizes ------------------------------------------------------------------------


def test_both_directions_at_once_leave_every_byte_as_it_was(make: Make) -> None:
    rng = random.Random(0)
    sizes = [1, 511, 4096, 4097, MIB, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, PAGE]
    num = 3 * len(sizes)
    backend = make(2 * num * PAGE)
    generator = torch.Generator("cuda").manual_seed(0)
    data = [
        torch.randint(0, 256, (sizes[i % len(sizes)],), dtype=torch.uint8, device="cuda",
                      generator=generator)
        for i in range(num)
    ]  # fmt: skip
    expected = [tensor.cpu() for tensor in data]
    goals = [torch.UntypedStorage(0, device="cuda") for _ in range(num)]
    for slot, tensor in enumerate(expected):
        backend.allocate_device(goals[slot], len(tensor))
        backend._slab.view((num + slot) * PAGE, len(tensor))[0].copy_(tensor)
    tickets: list[Ticket] = []
    for slot, tensor in enumerate(data):
        urgency = rng.choice(list(Priority))
        page = tensor.untyped_storage()
        tickets.append(backend.submit(copy(DOWN, page, slot, len(tensor)), urgency))
        urgency = rng.choice(list(Priority))
        up = copy(UP, goals[slot], num + slot, len(tensor))
        tickets.append(backend.submit(up, urgency))
    rng.shuffle(tickets)
    for ticket in tickets[: len(tickets) // 2]:
        ticket.wait()
    until_done(tickets)
    for slot, tensor in enumerate(expected):
        assert torch.equal(backend._slab.view(slot * PAGE, len(tensor))[0], tensor), slot
        assert torch.equal(alias(goals[slot]).cpu(), tensor), slot


# --- what nobody does -----------------------------------------------------------------------------


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_no_device_wide_synchronisation_and_no_page_locking_after_the_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, nvme: bool
) -> None:
    """A kernel that sleeps elsewhere would hold up whoever waits for the whole device."""
    backend = make(4 * PAGE + 64 * MIB, 4 * PAGE if nvme else 0)
    down, up = (Lane.D2N, Lane.N2D) if nvme else (DOWN, UP)
    pages = [a_page(backend, slot + 1) for slot in range(4)]

    def evict_and_fetch() -> None:
        home = main_stream()
        for slot, page in enumerate(pages):
            ticket = backend.submit(copy(down, page, slot))
            if not ticket.is_certain:
                ticket.wait()
            backend.release_device(page, (home,), (ticket,), home)
        for slot, page in enumerate(pages):
            backend.allocate_device(page, PAGE, home)
            priority = Priority.PREFETCH if slot % 2 else Priority.FAULT
            backend.order(backend.submit(copy(up, page, slot), priority), (home,))

    def last_bytes() -> list[int]:
        return [int(b) for b in torch.stack([alias(page)[-1] for page in pages]).cpu()]

    evict_and_fetch()
    assert last_bytes() == [1, 2, 3, 4]
    torch.cuda.synchronize()
    calls: list[str] = []
    for owner, name in ((torch.cuda, "synchronize"), (CudaLocker, "lock")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    mapped_bytes, locked_bytes = backend.host_mapped_bytes, backend.host_locked_bytes
    before = dict(torch.cuda.host_memory_stats()) if has_host_stats() else {}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(30 * SLEEP_CYCLES)  # one kernel: several would block others' queue
    for _ in range(3):
        evict_and_fetch()
    values = last_bytes()
    is_sleeping = not side.query()
    monkeypatch.undo()
    assert is_sleeping, "something waited for the whole device, or the disk is very slow"
    assert values == [1, 2, 3, 4]
    assert calls == []
    assert (backend.host_mapped_bytes, backend.host_locked_bytes) == (mapped_bytes, locked_bytes)
    after = dict(torch.cuda.host_memory_stats()) if has_host_stats() else {}
    assert after.get("num_host_alloc") == before.get("num_host_alloc")
    for slot, page in enumerate(pages):
        assert bool((alias(page) == slot + 1).all())


def has_host_stats() -> bool:
    return hasattr(torch.cuda, "host_memory_stats")
