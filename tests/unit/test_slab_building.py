"""A slab that is built in the background: nobody waits for more than one region, nothing twice."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.interpreter import run_program
from tests.unit.lane_steps import until
from tests.unit.locker import PATIENCE_S, RecordingLocker, Turnstile
from tvm_pager.errors import TransferError
from tvm_pager.transfer import slab_builder
from tvm_pager.transfer.slab import HostSlab

if TYPE_CHECKING:
    from tvm_pager.transfer.region import Region

REGION_BYTES = 16384
NUM_REGIONS = 6
TOTAL_BYTES = NUM_REGIONS * REGION_BYTES


def make_slab(locker: RecordingLocker, nbytes: int = TOTAL_BYTES) -> HostSlab:
    return HostSlab(nbytes, region_bytes=REGION_BYTES, page_lock=True, locker=locker)


def builders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tvm_pager-slab"]


def wait_for_builders() -> None:
    for thread in builders():
        thread.join(PATIENCE_S)
    assert not builders()


def test_all_regions_are_built_in_order_by_one_daemon_thread() -> None:
    seen: list[tuple[str, bool]] = []

    def note(call: int) -> None:
        thread = threading.current_thread()
        seen.append((thread.name, thread.daemon))

    locker = RecordingLocker(before=note)
    calls: list[tuple[int, int]] = []
    with closing(make_slab(locker)) as slab:
        slab.build_in_background(1 << 40, lambda *numbers: calls.append(numbers))
        wait_for_builders()
        assert slab.mapped_bytes == slab.locked_bytes == locker.locked_bytes == TOTAL_BYTES
        assert list(locker.locked) == [at for at, _ in slab.addresses(0, TOTAL_BYTES)]
        assert set(seen) == {("tvm_pager-slab", True)}
        assert calls[0] == (0, TOTAL_BYTES)
        assert calls[-1] == (TOTAL_BYTES, TOTAL_BYTES)
        assert calls == sorted(calls)
        assert slab.error is None
    assert not locker.locked


def test_only_what_was_asked_for_is_built() -> None:
    locker = RecordingLocker()
    calls: list[tuple[int, int]] = []
    with closing(make_slab(locker)) as slab:
        slab.build_in_background(REGION_BYTES + 1, lambda *numbers: calls.append(numbers))
        wait_for_builders()
        assert slab.mapped_bytes == 2 * REGION_BYTES
        assert calls[-1] == (REGION_BYTES + 1, REGION_BYTES + 1)


def test_progress_is_told_a_few_times_a_second_however_many_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 100 + next(ticks) / 100)  # a region takes 10 ms
    monkeypatch.setattr(slab_builder, "time", clock)
    calls: list[tuple[int, int]] = []
    with closing(make_slab(RecordingLocker(), 400 * REGION_BYTES)) as slab:
        slab.build_in_background(1 << 40, lambda *numbers: calls.append(numbers))
        wait_for_builders()
        assert slab.mapped_bytes == 400 * REGION_BYTES
    assert len(calls) == 4 * 4 + 1, "four times in each of four seconds, and at the end"


def test_a_progress_callback_that_raises_does_not_stop_the_build(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def fail(done_bytes: int, total_bytes: int) -> None:
        calls.append(done_bytes)
        raise ZeroDivisionError

    with closing(make_slab(RecordingLocker())) as slab:
        slab.build_in_background(TOTAL_BYTES, fail)
        wait_for_builders()
        assert slab.mapped_bytes == TOTAL_BYTES
    assert calls == [0]
    assert "progress callback failed" in caplog.text


def test_a_fault_does_not_wait_for_the_queue() -> None:
    """The builder is stuck in the first region; the fifth is mapped at once, by its own thread."""
    gate = Turnstile(0)
    locker = RecordingLocker(before=gate)
    with closing(make_slab(locker)) as slab:
        slab.build_in_background(TOTAL_BYTES)
        assert gate.arrived.wait(PATIENCE_S)
        assert len(slab.view(4 * REGION_BYTES, 10)) == 1
        assert len(slab.buffers(4 * REGION_BYTES + 5, 10)) == 1
        assert slab.locked_bytes == slab.ready_bytes(TOTAL_BYTES) == REGION_BYTES
        gate.opened.set()
        wait_for_builders()
        assert slab.locked_bytes == locker.locked_bytes == TOTAL_BYTES
        assert locker.num_calls == NUM_REGIONS, "the builder leaves out what is there"


def test_a_fault_on_the_region_under_way_waits_for_that_one_and_does_not_repeat_it() -> None:
    gate = Turnstile(0, 1)
    locker = RecordingLocker(before=gate)
    with closing(make_slab(locker)) as slab, ThreadPoolExecutor(3) as pool:
        slab.build_in_background(TOTAL_BYTES)
        assert gate.arrived.wait(PATIENCE_S)
        faults = {offset: pool.submit(slab.addresses, offset, 16) for offset in (0, 64, 4096)}
        time.sleep(0.05)
        assert not any(fault.done() for fault in faults.values())
        assert locker.num_calls == 1
        gate.opened.set()
        starts = {fault.result(PATIENCE_S)[0][0] - offset for offset, fault in faults.items()}
        assert len(starts) == 1
        wait_for_builders()
        assert locker.num_calls == NUM_REGIONS


def test_many_threads_at_once_lock_each_region_once() -> None:
    locker = RecordingLocker(before=lambda call: time.sleep(0.001))
    with closing(make_slab(locker, 40 * REGION_BYTES)) as slab, ThreadPoolExecutor(8) as pool:
        slab.build_in_background(1 << 40)
        offsets = [(number * 7919) % 40 * REGION_BYTES for number in range(200)]
        for views in pool.map(lambda offset: slab.view(offset, REGION_BYTES), offsets):
            assert [len(view) for view in views] == [REGION_BYTES]
        wait_for_builders()
        assert locker.num_calls == 40
        assert slab.locked_bytes == slab.mapped_bytes == locker.locked_bytes == 40 * REGION_BYTES


def test_close_waits_for_the_region_under_way_and_no_further() -> None:
    gate = Turnstile(1)
    locker = RecordingLocker(before=gate)
    slab = make_slab(locker)
    slab.build_in_background(TOTAL_BYTES)
    assert gate.arrived.wait(PATIENCE_S)
    closer = threading.Thread(target=slab.close)
    closer.start()
    until(lambda: slab._is_closed)
    closer.join(0.05)
    assert closer.is_alive(), "the memory being locked cannot be let go of"
    gate.opened.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert not builders()
    assert locker.num_calls == 2
    assert not locker.locked
    assert slab.mapped_bytes == slab.locked_bytes == 0
    with pytest.raises(TransferError, match="closed"):
        slab.build_in_background(1)


def test_close_waits_for_a_callback_that_is_running() -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait(done_bytes: int, total_bytes: int) -> None:
        entered.set()
        assert leave.wait(PATIENCE_S)

    slab = make_slab(RecordingLocker())
    slab.build_in_background(TOTAL_BYTES, wait)
    assert entered.wait(PATIENCE_S)
    closer = threading.Thread(target=slab.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    leave.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert not builders()


def test_a_fault_that_begins_as_the_slab_closes_maps_nothing() -> None:
    """Scenario: a thread has claimed a region, and not begun; close() finds nothing to unlock."""
    locker = RecordingLocker()
    slab = make_slab(locker)
    claimed, go_on = threading.Event(), threading.Event()
    map_region = slab._map

    def wait_and_map(region: Region) -> bool:
        claimed.set()
        assert go_on.wait(PATIENCE_S)
        return map_region(region)

    slab._map = wait_and_map  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        fault = pool.submit(slab.view, 0, 16)
        assert claimed.wait(PATIENCE_S)
        slab.close()
        go_on.set()
        with pytest.raises(TransferError, match="closed"):
            fault.result(PATIENCE_S)
    assert locker.num_calls == 0
    assert slab.mapped_bytes == 0


def test_a_slab_may_be_closed_by_its_own_progress_callback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    locker = RecordingLocker()
    slab = make_slab(locker)
    slab.build_in_background(TOTAL_BYTES, lambda *_: slab.close())
    wait_for_builders()
    assert locker.num_calls == 0
    assert slab.error is None
    assert not caplog.records


def test_a_slab_that_nobody_holds_ends_its_build() -> None:
    gate = Turnstile(1)
    locker = RecordingLocker(before=gate)
    slab = make_slab(locker)
    reference = weakref.ref(slab)
    slab.build_in_background(TOTAL_BYTES)
    assert gate.arrived.wait(PATIENCE_S)
    del slab
    gate.opened.set()
    wait_for_builders()
    gc.collect()
    assert reference() is None
    assert locker.num_calls == 2


def test_a_build_under_way_can_be_extended() -> None:
    gate = Turnstile(0)
    calls: list[tuple[int, int]] = []
    with closing(make_slab(RecordingLocker(before=gate))) as slab:
        slab.build_in_background(REGION_BYTES, lambda *numbers: calls.append(numbers))
        assert gate.arrived.wait(PATIENCE_S)
        slab.grow_capacity(2 * TOTAL_BYTES)
        slab.build_in_background(TOTAL_BYTES + REGION_BYTES)
        assert len(builders()) == 1
        gate.opened.set()
        wait_for_builders()
        assert slab.mapped_bytes == TOTAL_BYTES + REGION_BYTES
        assert calls[-1] == (TOTAL_BYTES + REGION_BYTES, TOTAL_BYTES + REGION_BYTES)


def test_a_build_can_be_extended_in_its_last_moment() -> None:
    with closing(make_slab(RecordingLocker())) as slab:

        def extend(done_bytes: int, total_bytes: int) -> None:
            if done_bytes == total_bytes == REGION_BYTES:
                slab.build_in_background(TOTAL_BYTES)

        slab.build_in_background(REGION_BYTES, extend)
        wait_for_builders()
        assert slab.mapped_bytes == TOTAL_BYTES


# --- failures ------------------------------------------------------------------------------------


def test_an_error_ends_the_build_and_is_kept_and_later_accesses_try_again() -> None:
    locker = RecordingLocker(limit_bytes=2 * REGION_BYTES)
    with closing(make_slab(locker)) as slab:
        slab.build_in_background(TOTAL_BYTES)
        wait_for_builders()
        assert isinstance(slab.error, TransferError)
        assert "96.00 KiB" in str(slab.error)
        assert "too much: 16384 bytes" in str(slab.error)
        assert slab.error.__traceback__ is None, "it would keep the slab alive"
        assert slab.mapped_bytes == slab.locked_bytes == locker.locked_bytes == 2 * REGION_BYTES
        assert len(slab.view(0, 2 * REGION_BYTES)) == 2
        with pytest.raises(TransferError, match="too much: 16384 bytes"):
            slab.view(2 * REGION_BYTES, 1)
        locker.limit_bytes = TOTAL_BYTES
        slab.view(2 * REGION_BYTES, 1)
        slab.build_in_background(TOTAL_BYTES)
        wait_for_builders()
        assert slab.error is None
        assert slab.locked_bytes == TOTAL_BYTES


def test_an_error_of_another_kind_becomes_one_with_numbers_and_remedy() -> None:
    def fail(call: int) -> None:
        raise MemoryError("no more")

    with closing(make_slab(RecordingLocker(before=fail))) as slab:
        slab.build_in_background(TOTAL_BYTES)
        wait_for_builders()
        text = str(slab.error)
        assert "96.00 KiB" in text
        assert "MemoryError: no more; give a smaller host budget" in text


def test_who_waited_for_a_region_that_failed_tries_itself() -> None:
    gate = Turnstile(0)

    def fail_first(call: int) -> None:
        gate(call)
        if call == 0:
            raise TransferError("only once")

    locker = RecordingLocker(before=fail_first)
    with closing(make_slab(locker)) as slab, ThreadPoolExecutor(1) as pool:
        slab.build_in_background(TOTAL_BYTES)
        assert gate.arrived.wait(PATIENCE_S)
        fault = pool.submit(slab.view, 0, 16)
        time.sleep(0.02)
        gate.opened.set()
        assert len(fault.result(PATIENCE_S)) == 1
        wait_for_builders()
        assert slab.locked_bytes == locker.locked_bytes == REGION_BYTES


# --- the process ---------------------------------------------------------------------------------

_BUSY = """
import os
from tests.unit.locker import RecordingLocker, Turnstile
from tvm_pager.errors import TransferError
from tvm_pager.transfer.slab import HostSlab
gate = Turnstile(1)
slab = HostSlab(6 * 16384, region_bytes=16384, page_lock=True, locker=RecordingLocker(before=gate))
slab.build_in_background(6 * 16384)
assert gate.arrived.wait(30)
"""


def test_a_child_forked_during_a_build_has_no_slab_and_can_close_it() -> None:
    program = """
import signal
with slab._lock, slab._builder._lock:  # as another thread of the parent might
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a lock that nobody gives back
        try:
            slab.view(0, 16)
        except TransferError:
            slab.close()
            os._exit(17)
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
gate.opened.set()
assert len(slab.view(0, 6 * 16384)) == 6
slab.close()
"""
    run = run_program(_BUSY + program)
    assert run.returncode == 0, run.stderr


def test_no_build_is_under_way_when_the_interpreter_goes() -> None:
    program = """
import atexit, threading, time
builders = lambda: [t.name for t in threading.enumerate() if t.name == "tvm_pager-slab"]
atexit.register(lambda: print("last", builders()))  # before the slab's handler: runs after it
from tests.unit.locker import RecordingLocker
from tvm_pager.transfer.slab import HostSlab
locker = RecordingLocker(before=lambda call: time.sleep(0.05))
slab = HostSlab(1 << 30, region_bytes=16384, page_lock=True, locker=locker)
slab.build_in_background(1 << 30)
print("at work", builders())
"""
    run = run_program(program)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "at work ['tvm_pager-slab']\nlast []\n"
