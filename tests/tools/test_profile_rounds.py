"""How the profile measures: rounds, shared windows, page-locked buffers, streams and events."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.profile_rig import KIB, TINY
from tvm_pager.errors import TransferError
from tvm_pager.observe.profile import compute, copies, rounds
from tvm_pager.observe.profile.copies import D2H, H2D, CudaCopies, open_slab
from tvm_pager.observe.profile.effort import FULL, QUICK, share_of
from tvm_pager.observe.profile.rounds import Span, bytes_within, overlap_rates, rate, repeat
from tvm_pager.transfer.slab import HostSlab

MIB = 1 << 20

# --- windows -------------------------------------------------------------------------------------


def test_a_span_counts_with_the_part_that_lies_in_the_window() -> None:
    spans = [Span(0.0, 2.0, 100), Span(2.0, 4.0, 300)]
    assert bytes_within(spans, 0.0, 4.0) == 400
    assert bytes_within(spans, 1.0, 3.0) == 50 + 150
    assert bytes_within(spans, 5.0, 6.0) == 0
    assert bytes_within([Span(1.0, 1.0, 7)], 0.0, 2.0) == 7  # too short for the clock


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 50), st.integers(1, 99)), min_size=1))
def test_windows_that_tile_the_time_share_all_bytes(cuts: list[tuple[float, float, int]]) -> None:
    spans = [Span(start, start + length, nbytes) for start, length, nbytes in cuts]
    parts = [bytes_within(spans, a, b) for a, b in itertools.pairwise((0.0, 10.0, 35.0, 100.0))]
    assert sum(parts) == pytest.approx(sum(span.nbytes for span in spans))


def test_what_one_side_does_alone_does_not_count_as_duplex() -> None:
    # Both at 100 bytes/s until 2 s; then the second has the link to itself.
    first = [Span(0.0, 1.0, 100), Span(1.0, 2.0, 100)]
    second = [*first, Span(2.0, 3.0, 900)]
    assert overlap_rates([first, second]) == [100.0, 100.0]


def test_a_thread_that_overruns_the_round_counts_until_its_end() -> None:
    assert overlap_rates([[Span(0.0, 4.0, 400)]], end_s=1.0) == [100.0]


def test_sides_that_never_met_give_what_each_did() -> None:
    assert overlap_rates([[Span(0.0, 1.0, 10)], [Span(2.0, 4.0, 10)]]) == [10.0, 5.0]


# --- rounds --------------------------------------------------------------------------------------


class FakeClock:
    """Calls take `call_s` seconds, the first one a second more."""

    def __init__(self, call_s: float) -> None:
        self.call_s = call_s
        self.now_s = 0.0
        self.calls: list[int] = []

    def __call__(self, num_calls: int) -> float:
        seconds = num_calls * self.call_s + (0 if self.calls else 1.0)
        self.calls.append(num_calls)
        self.now_s += seconds
        return seconds

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize("call_s", [1e-7, 1e-5, 1e-3, 0.02])
def test_rounds_are_filled_and_the_warm_up_does_not_count(
    monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    clock = FakeClock(call_s)
    monkeypatch.setattr(rounds, "time", clock)
    figure = rate(clock, 8.0, FULL)
    assert figure.low == pytest.approx(8.0 / call_s)
    assert figure.high == pytest.approx(8.0 / call_s)
    counted = clock.calls[-FULL.num_rounds :]
    assert all(FULL.round_s / 2 <= num * call_s <= 2 * FULL.round_s for num in counted)
    assert clock.now_s < 1.0 + 8 * FULL.round_s


def test_a_call_that_takes_far_too_long_gets_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(10.0)
    monkeypatch.setattr(rounds, "time", clock)
    assert rate(clock, 1.0, FULL).median == pytest.approx(0.1)
    assert clock.calls == [1, 1, 1]


def test_a_clock_that_stands_still_ends_all_the_same() -> None:
    assert rate(lambda _: 0.0, 1.0, TINY).median > 0


def test_each_value_of_a_round_gets_its_own_figure() -> None:
    values = iter([[1.0, 5.0], [3.0, 4.0], [2.0, 6.0]])
    first, second = repeat(lambda: next(values), 3, 100.0)
    assert (first.median, first.low, first.high) == (2.0, 1.0, 3.0)
    assert (second.median, second.low, second.high) == (5.0, 4.0, 6.0)


# --- sizes ---------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.sampled_from([1, 4096, 16384]))
def test_nothing_takes_more_than_a_quarter_of_what_is_free(
    wanted: int, free: int, granularity: int
) -> None:
    nbytes = share_of(wanted, free, granularity)
    assert nbytes % granularity == 0
    assert nbytes <= max(granularity, min(wanted, free / 4))


def test_threads_are_measured_from_one_to_all() -> None:
    assert FULL.thread_counts(16) == [1, 2, 4, 8, 16]
    assert FULL.thread_counts(6) == [1, 2, 4, 6]
    assert QUICK.thread_counts(16) == [1, 16]
    assert FULL.thread_counts(1) == QUICK.thread_counts(1) == [1]


class Locker:
    """Locks up to a limit, as `ulimit -l` does, and counts what stays locked."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.locked: dict[int, int] = {}

    def lock(self, address: int, nbytes: int) -> None:
        if sum(self.locked.values()) + nbytes > self.limit_bytes:
            raise TransferError("the system refuses")
        self.locked[address] = nbytes

    def unlock(self, address: int, nbytes: int) -> None:
        assert self.locked.pop(address) == nbytes


def test_buffers_shrink_until_the_system_locks_them_and_nothing_stays_locked() -> None:
    locker = Locker(5 * MIB)
    with open_slab(16 * MIB, page_lock=True, locker=locker) as slab:
        assert slab.region_bytes == 2 * MIB
        assert sum(locker.locked.values()) == 4 * MIB
    assert not locker.locked
    with pytest.raises(KeyboardInterrupt), open_slab(2 * MIB, page_lock=True, locker=locker):
        raise KeyboardInterrupt
    assert not locker.locked
    with (
        pytest.raises(TransferError, match="refuses"),
        open_slab(2 * MIB, page_lock=True, locker=Locker(MIB)),
    ):
        pytest.fail("not reached")


# --- CUDA ----------------------------------------------------------------------------------------


class FakeCuda:
    """The calls of `torch.cuda` that are used here, on CPU tensors, with a clock of one queue.

    Each recorded event takes a millisecond; what ran on which stream is in `log`.
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.now_ms = 0.0
        outer = self

        class Stream:
            def __init__(self, device: object = None) -> None:
                self.is_synchronised = False

            def wait_event(self, event: Any) -> None:
                outer.log.append(("wait", self, event))

            def synchronize(self) -> None:
                self.is_synchronised = True

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at_ms: float | None = None

            def record(self, stream: Any = None) -> None:
                outer.now_ms += 1.0
                self.at_ms, self.stream = outer.now_ms, stream

            def synchronize(self) -> None:
                assert self.at_ms is not None

            def elapsed_time(self, end: Any) -> float:
                assert self.at_ms is not None
                assert end.stream.is_synchronised or end.stream is self.stream
                return float(end.at_ms - self.at_ms)

        self.Stream, self.Event = Stream, Event

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(("begin", stream))
        yield
        self.log.append(("end", stream))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "Event", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    current = fake.Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    return fake


def make_cuda_copies() -> tuple[HostSlab, CudaCopies]:
    slab = HostSlab(2 * 64 * KIB, region_bytes=64 * KIB, page_lock=False)
    return slab, CudaCopies(torch.device("cpu"), slab, 64 * KIB)


@pytest.mark.parametrize("num_chunks", [1, 7, 8, 100, 1000])
@pytest.mark.parametrize("sides", [(H2D,), (D2H,), (H2D, D2H)])
def test_streams_copy_every_chunk_and_events_account_for_all_bytes(
    cuda: FakeCuda, sides: tuple[int, ...], num_chunks: int
) -> None:
    slab, rig = make_cuda_copies()
    with contextlib.closing(slab):
        spans = rig.run(sides, 4 * KIB, num_chunks)
        assert len(spans) == len(sides)
        for side in spans:
            assert side[0].start_s == 0.0
            assert all(a.end_s == b.start_s for a, b in itertools.pairwise(side))
            assert sum(span.nbytes for span in side) == num_chunks * 4 * KIB
            assert len(side) <= 2 * copies._MAX_MARKS
        waits = [entry for entry in cuda.log if entry[0] == "wait"]
        assert len(waits) == len(sides) - 1  # the second side starts no earlier than the first


def test_copies_move_the_bytes_of_their_side(cuda: FakeCuda) -> None:
    slab, rig = make_cuda_copies()
    with contextlib.closing(slab):
        (host_source,), (host_target,) = slab.view(0, 64 * KIB), slab.view(64 * KIB, 64 * KIB)
        host_source.fill_(3)
        device_target, device_source = rig._buffers._device_buffers
        device_source.fill_(5)
        rig.run((H2D,), 4 * KIB, 16)
        assert bool((device_target == 3).all())
        assert int(host_target.sum()) == 0
        rig.run((D2H,), 16 * KIB, 4)
        assert bool((host_target == 5).all())
        assert rig.time_empty(H2D, 3) > 0
        assert rig.time_empty(D2H, 3) > 0


def test_device_work_is_timed_by_events_in_milliseconds(cuda: FakeCuda) -> None:
    calls: list[int] = []
    seconds = compute.time_calls(torch.device("cuda"), lambda: calls.append(1), 5)
    assert (len(calls), seconds) == (5, 1e-3)
