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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BUDGET_BYTES = 76 * KIB
THIRD_BYTES = 24 * KIB  # three of them fit, and nothing beside them
PATIENCE_S = 30.0
NUM_THREADS = 4


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
        held = third(0.0)
        first = [third(value) for value in (1.0, 2.0, 3.0)]
        second = [third(value) for value in (10.0, 20.0, 30.0)]
        pager.evict_all()
        holder = Worker(lambda: hold(held))
        assert stage.is_on.wait(PATIENCE_S)
        assert float(first[0][0] + second[0][0]) == 11.0  # both there, beside `held`
        queue = pager._core.reservations.queue
        workers = []
        for operands in (first, second):
            workers.append(Worker(lambda operands=operands: add_three(*operands)))
            wait_until(lambda: len(queue) == len(workers))
        stage.may_end.set()
        assert workers[0].get().tolist() == [6.0] * 8
        assert workers[1].get().tolist() == [60.0] * 8
        assert stage.order == [1.0, 10.0]
        holder.get()
        del operands, first, second, held, holder, workers
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
        del operands, workers
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
        del operands, healthy, worker
        assert_at_rest(pager)
        assert pager.stats().num_pages == 0
    assert_nothing_left(tmp_path)


# --- waiting ---


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_thread_that_waits_for_the_disk_does_not_stop_the_others(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is given up while it waits. What the others use is resident."""
    name = "preadv" if way == "read" else "pwritev"
    call: Any = getattr(os, name)
    num_slow = 0

    def slow(*args: Any) -> Any:
        nonlocal num_slow
        if num_slow > 0:
            num_slow -= 1
            time.sleep(1.5)
        return call(*args)

    monkeypatch.setattr(os, name, slow)
    with small_pager(tmp_path, device=BUDGET_BYTES) as pager:
        far = [third(float(value)) for value in range(8)]
        near = torch.zeros(1024)
        push_to_nvme(pager, *far)

        def touch() -> list[float]:
            for tensor in far:
                tensor.add_(1.0)  # makes it dirty, and the slab is full
            return [float(tensor[0]) for tensor in far]

        near.add_(1.0)
        num_slow = 1
        waiting = Worker(touch)
        num_steps, longest_s = 0, 0.0
        while waiting.is_alive() and num_slow:
            started_s = time.monotonic()
            near.add_(1.0)
            longest_s = max(longest_s, time.monotonic() - started_s)
            num_steps += 1
            time.sleep(0.001)
        assert not num_slow, "nothing was slow"
        assert waiting.get() == [value + 1.0 for value in range(8)]
        assert longest_s < 1.0, "an operation on a resident page waited for the disk"
        assert num_steps > 20
        assert near.tolist() == [num_steps + 1.0] * 1024
        del far, near, waiting
        assert_at_rest(pager)
    assert_nothing_left(tmp_path)
