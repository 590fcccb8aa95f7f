"""Faults in the middle of backward: an error by name, whole state, and right numbers afterwards.

Each program runs in plain torch first; what is compared is bitwise. A fault begins in the middle of
the backward pass of one step. Where it raises, the step is repeated once the fault is over.
"""

from __future__ import annotations

import errno
import functools
import gc
import io
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import tvm_pager
from tests.leaks import open_files
from tests.trials.harness import (
    KIB,
    WIDTH,
    assert_equal,
    assert_nothing_left,
    assert_within_budgets,
    batch,
    frozen,
    mlp,
    push_to_nvme,
    seed_all,
    small_pager,
    spill_folder,
)
from tvm_pager.memory import Tier
from tvm_pager.transfer.device_copy import CpuCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

NUM_STEPS = 4
FAULTY_STEP = 2
FOR_GOOD = 1 << 30


class Setting(NamedTuple):
    """A model's width, and budgets that are far too small for it."""

    width: int
    options: dict[str, Any]


THREE_TIERS = Setting(WIDTH, {"device": 76 * KIB})
TWO_TIERS = Setting(WIDTH, {"device": 76 * KIB, "host": 1024 * KIB, "nvme": False})
# Pages larger than the slab: what does not fit there goes between the device and NVMe.
LARGE_PAGES = Setting(3 * WIDTH, {"device": 896 * KIB, "segment_bytes": 64 * KIB})
WITH_NVME = pytest.mark.parametrize(
    "setting", [THREE_TIERS, LARGE_PAGES], ids=["three tiers", "large pages"]
)


def nothing() -> None:
    """Happens meanwhile."""


class Training:
    """A model on its way through `NUM_STEPS` steps."""

    def __init__(self, width: int) -> None:
        seed_all(0)
        self._width = width
        self.model = mlp(num_layers=8, width=width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self, number: int, in_backward: Callable[[], None] = nothing) -> None:
        """One step; `in_backward` is called in the middle of its backward pass."""
        self.optimizer.zero_grad()
        middle = self.model[:8](batch(number, width=self._width))
        middle.register_hook(lambda gradient: in_backward())
        self.model[8:](middle).square().mean().backward()
        self.optimizer.step()

    def saved(self) -> Any:
        """Weights and optimizer states, by way of a checkpoint file."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        with torch._C._DisableTorchDispatch():
            return frozen(torch.load(file), version=False)


@functools.cache
def expected(width: int) -> list[Any]:
    """What plain torch has before each step, and after the last one."""
    training = Training(width)
    states = [training.saved()]
    for number in range(NUM_STEPS):
        training.step(number)
        states.append(training.saved())
    return states


class Fault:
    """What a test makes fail: system calls on the swap file, or copies."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_struck = 0
        self._num_left = 0
        self._patch = patch

    def start(self, num: int = FOR_GOOD) -> None:
        self._num_left = num

    def stop(self) -> None:
        self._num_left = 0

    def of_calls(self, name: str, code: int) -> None:
        """`os.pwritev` or `os.preadv` fails with an errno; nobody but the pager calls them."""
        call: Any = getattr(os, name)

        def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self._strikes():
                raise OSError(code, os.strerror(code))
            moved: int = call(fd, buffers, offset)
            return moved

        self._patch.setattr(os, name, failing)

    def of_short_reads(self, shorten: Callable[[int], int]) -> None:
        """`os.preadv` gives fewer bytes than asked for, and no error."""
        call: Any = os.preadv

        def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            most = shorten(len(buffers[0])) if self._strikes() else len(buffers[0])
            moved: int = call(fd, [buffers[0][:most]], offset) if most else 0
            return moved

        self._patch.setattr(os, "preadv", short)

    def of_copies(self, *, down: bool) -> None:
        """Copies between device and slab raise, in one direction."""
        copy = CpuCopier.copy

        def failing(copier: CpuCopier, *args: Any, **kwargs: Any) -> None:
            if kwargs["down"] is down and self._strikes():
                raise RuntimeError("an uncorrectable memory error")
            copy(copier, *args, **kwargs)

        self._patch.setattr(CpuCopier, "copy", failing)

    def _strikes(self) -> bool:
        if not self._num_left:
            return False
        self._num_left -= 1
        self.num_struck += 1
        return True


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    fault = Fault(monkeypatch)
    yield fault
    fault.stop()


class Caught(NamedTuple):
    """An error without its traceback, which would hold what the step had made."""

    kind: type
    text: str
    code: int | None


def train_through(
    fault: Fault, num: int, setting: Setting, tmp_path: Path
) -> tuple[Caught | None, Any]:
    """Trains while `num` operations fail; gives the error, if there was one, and the statistics."""
    wanted, caught = expected(setting.width), None
    with small_pager(tmp_path, **setting.options) as pager:
        training = Training(setting.width)
        for number in range(NUM_STEPS):
            start = functools.partial(fault.start, num) if number == FAULTY_STEP else nothing
            try:
                training.step(number, start)
            except tvm_pager.PagerError as error:
                assert number == FAULTY_STEP
                caught = Caught(type(error), str(error), getattr(error, "errno", None))
                fault.stop()
                pager.check_invariants()
                assert_equal(wanted[number], training.saved(), "after the fault")
                training.step(number)
            fault.stop()
            assert_equal(wanted[number + 1], training.saved(), f"after step {number}")
        assert_within_budgets(stats := pager.stats())
        del training
        gc.collect()
        pager.check_invariants()
        assert pager.stats().num_pages == 0
    assert_nothing_left(tmp_path)
    assert fault.num_struck > 0, "nothing failed: the trial shows nothing"
    return caught, stats


def assert_named(error: Caught | None, lane: str, *parts: str) -> None:
    """Which page, where it was going, how much that needs, what is free, and what to do."""
    assert error is not None
    assert error.kind is tvm_pager.TransferError
    assert re.search(r"Page \d+ \(\w+, \d+ B", error.text), error.text
    assert re.search(rf"over {lane}.* needed; HOST .* free of .*", error.text), error.text
    for part in (*parts, "try the step again"):
        assert part in error.text


HOW_OFTEN = pytest.mark.parametrize("num", [1, FOR_GOOD], ids=["once", "to the end of backward"])


@HOW_OFTEN
@pytest.mark.parametrize("lane", ["d2h", "h2d"])
def test_a_failed_copy_in_backward_is_raised_by_name_and_the_step_can_be_repeated(
    lane: str, num: int, fault: Fault, tmp_path: Path
) -> None:
    fault.of_copies(down=lane == "d2h")
    error, stats = train_through(fault, num, TWO_TIERS, tmp_path)
    assert stats.num_failures > 0
    if lane == "h2d" or num > 1:  # one failed write-back: another page goes instead
        assert_named(error, lane, "memory error")


@HOW_OFTEN
@pytest.mark.parametrize("lane", ["d2n", "n2d", "h2n"])
def test_failed_io_in_backward_is_raised_by_name_and_the_step_can_be_repeated(
    lane: str, num: int, fault: Fault, tmp_path: Path
) -> None:
    """A disk that times out is not taken for a broken one: it goes on being used."""
    fault.of_calls("preadv" if lane == "n2d" else "pwritev", errno.ETIMEDOUT)
    setting = LARGE_PAGES if lane == "d2n" else THREE_TIERS
    error, stats = train_through(fault, num, setting, tmp_path)
    assert stats.num_failures > 0
    assert stats.bytes_by_lane[lane] > 0
    if lane == "n2d" or num > 1:
        assert_named(error, ".*n2d" if lane == "n2d" else ".*2n", "check the disk")
        assert error is not None
        assert error.code == errno.ETIMEDOUT


@WITH_NVME
def test_a_read_that_stops_short_goes_on_where_it_stopped(
    setting: Setting, fault: Fault, tmp_path: Path
) -> None:
    """The system may do so at any time: neither an error nor the bytes of some other page."""
    fault.of_short_reads(lambda nbytes: max(4096, nbytes // 2 // 512 * 512))
    error, stats = train_through(fault, FOR_GOOD, setting, tmp_path)
    assert error is None
    assert stats.num_failures == 0


@WITH_NVME
def test_a_read_that_gives_nothing_is_an_error_by_name(
    setting: Setting, fault: Fault, tmp_path: Path
) -> None:
    fault.of_short_reads(lambda nbytes: 0)
    error, stats = train_through(fault, 1, setting, tmp_path)
    assert stats.num_failures == 1
    assert_named(error, ".*n2d", "stopped short", "check the disk")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@WITH_NVME
def test_a_disk_that_fails_for_good_in_backward_leaves_a_state_that_can_be_saved(
    setting: Setting, code: int, fault: Fault, tmp_path: Path
) -> None:
    """It refuses writes. What was computed before is whole, and can be saved elsewhere."""
    wanted = expected(setting.width)[FAULTY_STEP]
    fault.of_calls("pwritev", code)
    with small_pager(tmp_path, **setting.options) as pager:
        training = Training(setting.width)
        for number in range(FAULTY_STEP):
            training.step(number)
        with pytest.raises(tvm_pager.PagerError) as caught:
            training.step(FAULTY_STEP, fault.start)
        text = str(caught.value)
        assert os.strerror(code) in text
        assert re.search("free space there|check the disk", text), text
        del caught
        training.optimizer.zero_grad()
        gc.collect()
        pager.check_invariants()
        for _ in range(2):
            assert_equal(wanted, training.saved(), "after the fault")
        with pytest.raises(tvm_pager.PagerError, match=os.strerror(code)) as caught:
            training.step(FAULTY_STEP)
        del caught
        training.optimizer.zero_grad()
        assert_equal(wanted, training.saved(), "after another try")
        assert Tier.NVME in pager._core.table.closed_tiers
        pager.check_invariants()
        assert_within_budgets(pager.stats())
        del training
    assert_nothing_left(tmp_path)


def flip_bits(tmp_path: Path, old: bytes) -> int:
    """Flips a bit wherever `old` lies in the swap file; gives how often that is."""
    folder = str(spill_folder(tmp_path))
    descriptor = next(int(fd) for fd, name in open_files() if name.startswith(folder))
    path = f"/proc/self/fd/{descriptor}"
    with open(path, "rb") as file:
        data = file.read()
    found = [match.start() for match in re.finditer(re.escape(old), data)]
    with open(path, "r+b") as file:
        for at in found:
            file.seek(at)
            file.write(bytes([old[0] ^ 4]))
    return len(found)


def test_bits_that_flip_on_the_disk_are_noticed_and_the_page_is_named(tmp_path: Path) -> None:
    """Check level 1. The page stays unreadable, the others are right, and so is the next run."""
    wanted = expected(WIDTH)[1]
    with small_pager(tmp_path, **THREE_TIERS.options, check=1) as pager:
        training = Training(WIDTH)
        training.step(0)
        broken, *others = training.model.parameters()
        push_to_nvme(pager, *training.model.parameters())
        assert flip_bits(tmp_path, wanted[0]["0.weight"]["data"][:64]) == 1
        for _ in range(2):
            with pytest.raises(
                tvm_pager.TransferError, match=r"Page \d+ \(param, 16384 B"
            ) as caught:
                broken.sum()
            assert "checksum" in str(caught.value)
            del caught
        for parameter, name in zip(others, list(wanted[0])[1:], strict=True):
            assert_equal(wanted[0][name]["data"], frozen(parameter)["data"], name)
        pager.check_invariants()
        del training, broken, others, parameter
    assert_nothing_left(tmp_path)
    with small_pager(tmp_path, **THREE_TIERS.options) as pager:
        training = Training(WIDTH)
        training.step(0)
        assert_equal(wanted, training.saved())
        assert pager.stats().num_failures == 0
        del training
