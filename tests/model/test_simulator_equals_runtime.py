"""The simulator and the runtime on the CPU stand-in decide the same, event by event.

A small model trains with the pager; one iteration is recorded and fed to the simulator under the
same budgets. Both begin with everything evicted. Copies ahead of need are off where bytes are
compared: whether a write overtakes one is a matter of time, and the stand-in has its own.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest
import torch

import tvm_pager
from tests.machines import make_hardware
from tvm_pager.events import Event, EventKind
from tvm_pager.paging import DemandPager
from tvm_pager.paging.recorder import Recorder
from tvm_pager.planning import (
    Evict,
    Eviction,
    Fetch,
    HardwareProfile,
    Limits,
    MovementPlan,
    PageKind,
    Policy,
    Tier,
    Trace,
    View,
    load_policy,
)
from tvm_pager.policies.lru import LRU
from tvm_pager.simulation.feeder import Feeder
from tvm_pager.simulation.program import Program
from tvm_pager.transfer.virtual_backend import VirtualBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tvm_pager.paging.recorder import Recording

HOST_BYTES = 64 << 20
LANES = ("d2h", "h2d")


class Log:
    """What happened to which page, in order."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events = list(events)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def pages(self, kind: EventKind, label: Callable[[int], object]) -> list[object]:
        return [
            (label(event.page_id), event.nbytes, event.detail)
            for event in self.events
            if event.kind is kind
        ]

    def num_bytes(self) -> dict[str, int]:
        return {
            lane: sum(event.nbytes for event in self.events if event.lane == lane) for lane in LANES
        }


class Training:
    """Two layers of a transformer and an optimizer; `step` is an iteration."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.batch = torch.randn(4, 16, 32)

    def step(self) -> None:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Real:
    """An iteration of the runtime, recorded, and what happened when it came again."""

    def __init__(self, device: int, policy: str, ahead_bytes: int | None) -> None:
        options = {"device": device, "host": HOST_BYTES, "policy": policy, "strict": True}
        with tvm_pager.Pager(torch_device="cpu", **options) as pager:
            log = Log()
            core = pager._core
            _listen(pager._counters, log)
            if ahead_bytes is not None:
                core.evictor.ahead_bytes = ahead_bytes
            training = Training()
            for _ in range(2):  # then each signature's operation has run, and is measured no more
                training.step()
            self.recording = _record(pager, training)
            pager.evict_all()
            self.first_id = core.table.num_created
            log.events.clear()
            training.step()
            _end_copies(core)
            self.log = Log(log.events)

    def label(self, page_id: int) -> object:
        """The page's number if it was there before, else that of its birth."""
        if page_id >= self.first_id:
            return "born", page_id - self.first_id
        return "old", self.recording.numbers[page_id]


class Simulated:
    """The same iteration in the simulator, begun with everything evicted."""

    def __init__(
        self, recording: Recording, device: int, policy: str, ahead_bytes: int | None
    ) -> None:
        self.log = Log()
        # As on the stand-in a copy has ended when the host goes on, so it keeps no dead page.
        backend = VirtualBackend(make_hardware(link_bytes_per_ns=1e6), HOST_BYTES)
        self.pager = DemandPager(
            backend,
            device,
            load_policy(policy),
            sink=self.log,
            strict=True,
            clock=backend.clock,
            write_behind_bytes=device // 16 if ahead_bytes is None else ahead_bytes,
        )
        program = Program(recording.trace, compute_factor=0.0)
        feeder = Feeder(self.pager, backend, program, launch_ns=1)
        self.numbers = {
            page.id: number for number, page in enumerate(feeder.pages) if page is not None
        }
        self.pager.evict_all()
        self.first_id = self.pager.table.num_created
        self.log.events.clear()
        feeder.run_iteration()
        _end_copies(self.pager)

    def label(self, page_id: int) -> object:
        if page_id >= self.first_id:
            return "born", page_id - self.first_id
        return "old", self.numbers[page_id]


def _pass_boundary(pager: tvm_pager.Pager) -> None:
    pager._core.drain()  # as the next operation would, which is a boundary by itself
    pager.step()


def _end_copies(pager: DemandPager) -> None:
    with pager.lock:
        pager.flight.settle_all()


def _listen(counters: object, log: Log) -> None:
    count = counters.emit
    counters.emit = lambda event: (count(event), log.emit(event))


def _record(pager: tvm_pager.Pager, training: Training) -> Recording:
    """Records an iteration that begins with everything evicted, after one that lets it settle."""
    found: list[Recording] = []
    finish = Recorder.finish

    def keep(recorder: Recorder, *args: Any) -> Recording:
        found.append(finish(recorder, *args))
        return found[-1]

    pager._core.iterations.record()
    with mock.patch.object(Recorder, "finish", keep):
        for _ in range(2):
            _pass_boundary(pager)
            pager.evict_all()
            training.step()
        _pass_boundary(pager)
    assert found[-1].trace.ops
    return found[-1]


@pytest.mark.parametrize("policy", ["lru", "clock"])
@pytest.mark.parametrize("device", [200_000, 230_000, 260_000])
def test_the_simulator_decides_as_the_runtime_does(policy: str, device: int) -> None:
    real = Real(device, policy, ahead_bytes=0)
    simulated = Simulated(real.recording, device, policy, ahead_bytes=0)
    for kind in (EventKind.FAULT, EventKind.FETCH, EventKind.EVICT, EventKind.WRITE_BACK):
        expected = real.log.pages(kind, real.label)
        found = simulated.log.pages(kind, simulated.label)
        if kind is EventKind.WRITE_BACK:  # told when it is over, which is a matter of time
            expected, found = sorted(expected), sorted(found)
        assert found == expected
        assert expected
    assert simulated.log.num_bytes() == real.log.num_bytes()


@pytest.mark.parametrize("device", [200_000, 260_000])
def test_copies_ahead_of_need_change_no_decision(device: int) -> None:
    real = Real(device, "lru", ahead_bytes=None)
    simulated = Simulated(real.recording, device, "lru", ahead_bytes=None)
    for kind in (EventKind.FAULT, EventKind.FETCH):
        assert simulated.log.pages(kind, simulated.label) == real.log.pages(kind, real.label)
    ours, theirs = (
        [page for page, _, _ in run.log.pages(EventKind.EVICT, run.label)]
        for run in (simulated, real)
    )
    assert ours == theirs


class Swing(Policy):
    """Sends away what is not used for long, and has it back two operations before its use."""

    name = "swing"

    def plan(self, trace: Trace, hardware: HardwareProfile, limits: Limits) -> MovementPlan:
        actions: list[Evict | Fetch] = []
        uses: list[list[int]] = [[] for _ in trace.pages]
        for index, op in enumerate(trace.ops):
            for number in (*op.reads, *op.creates):
                uses[number].append(index)
        for number, its_uses in enumerate(uses):
            for before, after in itertools.pairwise(its_uses):
                if after - before > 60:
                    actions.append(Evict(number, before + 1, before + 1))
                    actions.append(Fetch(number, after - 2, after))
        return MovementPlan(tuple(actions))


class Noting(LRU):
    """LRU that writes down what a trace tells of each page, whenever it decides."""

    name = "noting"
    answers: ClassVar[list[tuple[Any, ...]]] = []

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        for page_id in self._order:
            lineage, seconds = view.lineage(page_id), view.seconds_since_use(page_id)
            place = view.next_use(page_id), view.module(page_id), view.layer(page_id)
            self.answers.append((page_id, lineage, seconds, *place, view.page(page_id).kind))
        return super().choose_victims(tier, need_bytes, view)


class Passing(LRU):
    """Sends away activations and temporaries, the last used first; LRU has the rest."""

    name = "passing"
    kinds = frozenset({PageKind.ACTIVATION, PageKind.TEMPORARY})

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims, freed = [], 0
        for page_id in reversed(self._order):
            if freed < need_bytes and view.evictable(page_id):
                victims.append(Eviction(page_id))
                freed += view.frame_bytes(page_id)
        return victims if freed >= need_bytes else None


def _followed(pager: DemandPager, log: Log, step: Callable[[], None]) -> tuple[Log, Callable]:
    """What happens in a step that is followed, and how to name its pages."""
    follower = pager.iterations.follower
    assert follower is not None
    numbers = {page_id: follower.number_of(page_id) for page_id in pager.table.pages}
    first_id = pager.table.num_created
    log.events.clear()
    Noting.answers.clear()
    step()
    _end_copies(pager)

    def label(page_id: int) -> object:
        return numbers[page_id] if page_id < first_id else ("born", page_id - first_id)

    return Log(log.events), label


def _followed_by_the_runtime(policy: type[Policy], device: int) -> tuple[Trace, Log, Callable]:
    """The trace of an iteration, and a step that is followed by it."""
    log = Log()
    name = f"{__name__}:{policy.__name__}"
    options = {"device": device, "host": HOST_BYTES, "policy": name, "strict": True}
    with tvm_pager.Pager(torch_device="cpu", **options) as pager:
        _listen(pager._counters, log)
        core = pager._core
        core.evictor.ahead_bytes = 0
        training = Training()
        training.step()
        pager.evict_all()  # so that it is worth recording
        for _ in range(4):
            _pass_boundary(pager)
            training.step()
        _pass_boundary(pager)
        assert core.iterations.is_planned == (policy is Swing)
        trace = core.iterations.follower.known.trace
        return trace, *_followed(core, log, training.step)


def _followed_by_the_simulator(
    policy: type[Policy], device: int, trace: Trace
) -> tuple[Trace, Log, Callable]:
    """The same in the simulator, which records the trace for itself."""
    log = Log()
    backend = VirtualBackend(make_hardware(), HOST_BYTES)
    simulated = DemandPager(
        backend,
        device,
        policy,
        sink=log,
        strict=True,
        clock=backend.clock,
        hardware=make_hardware,
    )
    feeder = Feeder(simulated, backend, Program(trace), launch_ns=1)
    simulated.evict_all()
    for _ in range(4):
        feeder.run_iteration()
    known = simulated.iterations.follower.known.trace
    return known, *_followed(simulated, log, feeder.run_iteration)


def _moved(log: Log, label: Callable[[int], object]) -> tuple[list[object], list[object]]:
    """Evictions in order, and fetches, which are told when they are over, whenever that is."""
    fetched = sorted(log.pages(EventKind.FETCH, label), key=str)
    return log.pages(EventKind.EVICT, label), fetched


def test_a_plan_is_followed_as_by_the_runtime() -> None:
    """Both record two iterations, plan, and follow: the same trace, the same movement."""
    trace, log, label = _followed_by_the_runtime(Swing, 400_000)
    expected = _moved(log, label)
    known, log, label = _followed_by_the_simulator(Swing, 400_000, trace)
    assert [op[:4] for op in known.ops] == [op[:4] for op in trace.ops]
    assert known.pages == trace.pages
    assert _moved(log, label) == expected
    assert all(expected)


def test_a_policy_for_some_kinds_decides_about_the_same_pages_as_in_the_runtime() -> None:
    """Pages are born without a kind; the trace that is followed says what they are."""
    trace, log, label = _followed_by_the_runtime(Passing, 260_000)
    expected = _moved(log, label)
    _, log, label = _followed_by_the_simulator(Passing, 260_000, trace)
    assert _moved(log, label) == expected
    _, log, label = _followed_by_the_runtime(Noting, 260_000)
    assert _moved(log, label) != expected, "LRU has decided about all of them"


def _told(label: Callable[[int], object]) -> list[tuple[object, ...]]:
    """What `Noting` was answered, by names of pages that hold in both."""
    told: list[tuple[object, ...]] = []
    for page_id, lineage, *rest in Noting.answers:
        if lineage is not None:
            lineage = lineage._replace(
                inputs=tuple(other if other is None else label(other) for other in lineage.inputs)
            )
        told.append((label(page_id), lineage, *rest))
    return told


def test_a_view_tells_the_same_as_in_the_runtime() -> None:
    trace, _, label = _followed_by_the_runtime(Noting, 260_000)
    expected = _told(label)
    assert _told(_followed_by_the_simulator(Noting, 260_000, trace)[2]) == expected
    _, lineages, seconds, next_uses, modules, layers, kinds = zip(*expected, strict=True)
    found = [lineage.is_recomputable for lineage in lineages if lineage is not None]
    assert set(found) == {True, False}
    for answers in (seconds, next_uses, modules, layers):
        assert len(set(answers)) > 1
    assert {PageKind.PARAM, PageKind.OPT_STATE, PageKind.GRAD, PageKind.ACTIVATION} <= set(kinds)
