"""Several threads on one pager: bitwise right, nobody waits for ever, nobody waits without need."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trials.harness import (
    KIB,
    assert_equal,
    assert_nothing_left,
    assert_within_budgets,
    batch,
    frozen,
    mlp,
    push_to_nvme,
    seed_all,
    small_pager,
)
from tvm_pager.paging import DemandPager
from tvm_pager.runtime.storage import page_of
from tvm_pager.transfer.device_copy import CpuCopier
from tvm_pager.transfer.protocol import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BUDGET_BYTES = 76 * KIB
THIRD_BYTES = 24 * KIB  # three of them fit, and nothing beside them
PATIENCE_S = 15.0
NUM_THREADS = 4
SLOW_S = 1.5


class Stage:
    """What the operators below do to the thread that runs them."""

    def __init__(self) -> None:
        self.is_on = threading.Event()  # `hold` is running
        self.may_end = threading.Event()
        self.order: list[float] = []  # the first elements of what `add_three` was given


stage = Stage()


@torch.library.custom_op("trials::hold", mutates_args=())
def hold(x: torch.Tensor) -> torch.Tensor:
    """Keeps its operand on the device until it is told to end."""
    stage.is_on.set()
    assert stage.may_end.wait(PATIENCE_S)
    return x[:1].clone()


@torch.library.custom_op("trials::hold_and_double", mutates_args={"x"})
def hold_and_double(x: torch.Tensor) -> None:
    stage.is_on.set()
    assert stage.may_end.wait(PATIENCE_S)
    x.mul_(2)


@torch.library.custom_op("trials::add_three", mutates_args=())
def add_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    stage.order.append(float(a[0]))
    if float(a[0]) < 0:
        raise ValueError("a negative number")
    return (a + b + c)[:8].clone()


@pytest.fixture(autouse=True)
def fresh_stage() -> Iterator[None]:
    stage.__init__()  # type: ignore[misc]
    yield
    stage.may_end.set()


class Worker(threading.Thread):
    """A thread with a result, or an error; the test does not wait for it for ever."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error.with_traceback(None)
        finally:
            del self._work

    def get(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it waits for ever"
        if self.error is not None:
            raise self.error
        return self.result


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def third(value: float) -> torch.Tensor:
    return torch.full((THIRD_BYTES // 4,), value)


def assert_at_rest(pager: Any) -> None:
    gc.collect()
    pager.check_invariants()
    core = pager._core
    assert not core.num_transient_pins
    assert not core.reservations.queue
    assert not core.running
    assert_within_budgets(pager.stats())


# --- numbers ---


def infer(model: torch.nn.Module, seed: int) -> Any:
    with torch.no_grad():
        return [frozen(model(batch(10 * seed + step)), version=False) for step in range(3)]


def differentiate(model: torch.nn.Module, seed: int) -> Any:
    loss = model(batch(seed)).square().mean()
    return frozen([loss, *torch.autograd.grad(loss, list(model.parameters()))], version=False)


@pytest.mark.parametrize("work", [infer, differentiate])
def test_threads_that_share_a_model_get_the_numbers_of_plain_torch(
    work: Callable[..., Any], tmp_path: Path
) -> None:
    seeds = range(3 * NUM_THREADS)
    seed_all(0)
    model = mlp(8)
    expected = [work(model, seed) for seed in seeds]
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        pager.page(model)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            running = [pool.submit(work, model, seed) for seed in seeds]
            while not all(future.done() for future in running):
                pager.evict_all()
                time.sleep(0.01)
        for seed, wanted, future in zip(seeds, expected, running, strict=True):
            assert_equal(wanted, future.result(), f"seed {seed}")
        assert pager.stats().num_evictions > len(seeds)
        assert pager.stats().num_failures == 0
        assert_at_rest(pager)
        del model
    assert_nothing_left(tmp_path)


# --- reservations ---


def test_requests_that_each_need_most_of_the_budget_are_granted_whole_and_in_order(
    tmp_path: Path,
) -> None:
    """See [Note: Reservation]. Each request finds a third of what it needs there, and waits.

    If it kept that third meanwhile, neither of the two could ever be granted.
    """
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        held = [third(0.0)]
        first = [third(value) for value in (1.0, 2.0, 3.0)]
        second = [third(value) for value in (10.0, 20.0, 30.0)]
        pager.evict_all()
        holder = Worker(lambda: hold(*held))
        assert stage.is_on.wait(PATIENCE_S)
        assert float(first[0][0] + second[0][0]) == 11.0  # both there, beside `held`
        queue = pager._core.reservations.queue
        older = Worker(lambda: add_three(*first))
        wait_until(lambda: len(queue) == 1)
        younger = Worker(lambda: add_three(*second))
        wait_until(lambda: len(queue) == 2)
        stage.may_end.set()
        assert older.get().tolist() == [6.0] * 8
        assert younger.get().tolist() == [60.0] * 8
        assert stage.order == [1.0, 10.0]
        holder.get()
        del older, younger
        assert_at_rest(pager)
    assert_nothing_left(tmp_path)


def test_many_requests_that_exclude_each_other_all_end(tmp_path: Path) -> None:
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        operands = [third(float(value)) for value in range(8)]

        def work(first: int) -> float:
            total = 0.0
            for step in range(12):
                chosen = [operands[(first + step * i) % 8] for i in (1, 2, 3)]
                total += float(add_three(*chosen)[0])
            return total

        workers = [Worker(lambda first=first: work(first)) for first in range(NUM_THREADS)]
        expected = [
            float(sum((first + step * i) % 8 for step in range(12) for i in (1, 2, 3)))
            for first in range(NUM_THREADS)
        ]
        assert [worker.get() for worker in workers] == expected
        assert_at_rest(pager)
        operands.clear()
    assert_nothing_left(tmp_path)


def failing_operator(operands: list[torch.Tensor]) -> None:
    add_three(third(-1.0), *operands[:2])


def failing_request(operands: list[torch.Tensor]) -> None:
    torch.cat(operands * 4)  # cannot fit


def failing_shapes(operands: list[torch.Tensor]) -> None:
    operands[0] + operands[1][:-1]


def failing_between(operands: list[torch.Tensor]) -> None:
    kept = operands[0] * 2
    raise ValueError(float(kept[0]))


@pytest.mark.parametrize(
    "fail", [failing_operator, failing_request, failing_shapes, failing_between]
)
def test_a_thread_that_dies_in_the_middle_leaves_the_others_at_work(
    fail: Callable[..., None], tmp_path: Path
) -> None:
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        operands = [third(float(value)) for value in range(6)]

        def work() -> list[float]:
            return [float(add_three(*operands[i : i + 3])[0]) for i in (0, 3, 1, 2) * 4]

        healthy = [Worker(work) for _ in range(2)]
        for _ in range(6):
            with pytest.raises((ValueError, RuntimeError)):
                Worker(lambda: fail(operands)).get()
        for worker in healthy:
            assert worker.get() == [3.0, 12.0, 6.0, 9.0] * 4
        operands.clear()
        assert_at_rest(pager)
        assert pager.stats().num_pages == 0
    assert_nothing_left(tmp_path)


def test_an_operand_is_not_taken_for_resized_when_another_thread_evicts_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pins of an operator that writes end, and somebody has been waiting for that."""
    unpin = DemandPager.unpin

    def unpin_slowly(core: DemandPager, pages: Any) -> None:
        unpin(core, pages)
        time.sleep(0.2)

    monkeypatch.setattr(DemandPager, "unpin", unpin_slowly)
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        written = [third(1.0), third(2.0)]
        others = [third(3.0), third(4.0), third(5.0)]
        writer = Worker(lambda: hold_and_double(written[0]))
        assert stage.is_on.wait(PATIENCE_S)
        waiting = Worker(lambda: add_three(*others))
        wait_until(lambda: len(pager._core.reservations.queue) == 1)
        stage.may_end.set()
        writer.get()
        assert waiting.get().tolist() == [12.0] * 8
        assert set(written[0].tolist()) == {2.0}
        written.clear()
        others.clear()
        assert_at_rest(pager)
    assert_nothing_left(tmp_path)


def test_what_others_create_meanwhile_is_not_taken_for_an_operations_own(tmp_path: Path) -> None:
    """The first operation of a kind is measured, and waits; its next one would ask for far more."""
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        held, operands, small = [third(0.0)], [third(1.0), third(2.0)], torch.ones(64)
        pager.evict_all()
        holder = Worker(lambda: hold(*held))
        assert stage.is_on.wait(PATIENCE_S)
        torch.mul(small, 2)
        measured = Worker(lambda: torch.atan2(*operands))
        wait_until(lambda: len(pager._core.reservations.queue) == 1)
        for _ in range(400):
            torch.mul(small, 2)  # small enough to need no request
        stage.may_end.set()
        assert float(measured.get()[0]) == float(torch.atan2(torch.ones(1), 2 * torch.ones(1)))
        assert max(pager._context.sizes.by_key.values()) <= 2 * THIRD_BYTES
        assert float(holder.get()) == 0.0
        held.clear()
        operands.clear()
        assert_at_rest(pager)
    assert_nothing_left(tmp_path)


# --- waiting ---


def test_what_needs_no_room_does_not_queue_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation on pages that are there, also while one of them is being written back."""
    copy, may_copy = CpuCopier.copy, threading.Event()

    def copy_late(copier: CpuCopier, *args: Any, **kwargs: Any) -> None:
        assert not kwargs["down"] or may_copy.wait(PATIENCE_S)
        copy(copier, *args, **kwargs)

    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        held, others = [third(0.0)], [third(3.0), third(4.0), third(5.0)]
        near = torch.zeros(512)
        pager.evict_all()
        near.add_(1.0)
        holder = Worker(lambda: hold(*held))
        assert stage.is_on.wait(PATIENCE_S)
        monkeypatch.setattr(CpuCopier, "copy", copy_late)
        with pager._core.lock:
            page = page_of(near)
            assert page is not None
            pager._core.mover.start_write_back(page, None, Priority.WRITE_BACK)
        waiting = Worker(lambda: add_three(*others))
        wait_until(lambda: len(pager._core.reservations.queue) == 1)
        Worker(lambda: near.add_(1.0)).get()
        may_copy.set()
        stage.may_end.set()
        assert waiting.get().tolist() == [12.0] * 8
        assert near.tolist() == [2.0] * 512
        assert float(holder.get()) == 0.0
        held.clear()
        others.clear()
        assert_at_rest(pager)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_thread_that_waits_for_the_disk_does_not_stop_the_others(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is given up while it waits. What the others use is resident."""
    name = "preadv" if way == "read" else "pwritev"
    call: Any = getattr(os, name)
    is_armed, has_waited = threading.Event(), threading.Event()

    def slow_once(*args: Any) -> Any:
        if is_armed.is_set():
            is_armed.clear()
            time.sleep(SLOW_S)
            has_waited.set()
        return call(*args)

    monkeypatch.setattr(os, name, slow_once)
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        far = [third(float(value)) for value in range(8)]
        near = torch.zeros(1024)
        push_to_nvme(pager, *far)

        def touch() -> list[float]:
            for tensor in far:
                tensor.add_(1.0)  # makes it dirty, and the slab is full
            return [float(tensor[0]) for tensor in far]

        near.add_(1.0)
        page = page_of(near)
        assert page is not None
        pager._core.hold(page)  # however late this thread is, it stays
        is_armed.set()
        waiting = Worker(touch)
        num_steps, longest_s = 0, 0.0
        while waiting.is_alive() and not has_waited.is_set():
            started_s = time.monotonic()
            near.add_(1.0)
            longest_s = max(longest_s, time.monotonic() - started_s)
            num_steps += 1
            time.sleep(0.001)
        assert has_waited.is_set()
        assert waiting.get() == [value + 1.0 for value in range(8)]
        assert longest_s < 0.7 * SLOW_S, "an operation on a resident page waited for the disk"
        assert num_steps > 20
        pager._core.drop(page)
        assert near.tolist() == [num_steps + 1.0] * 1024
        far.clear()
        del near, waiting, page
        assert_at_rest(pager)
    assert_nothing_left(tmp_path)
