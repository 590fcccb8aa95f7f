"""What a policy sees of a page where a trace is followed, and where none is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.machines import make_hardware
from tests.model.programs import Recording, Rig, training
from tests.unit import small_traces
from tvm_pager.memory import Page, PageKind, PageState, Tier
from tvm_pager.paging import DemandPager
from tvm_pager.planning import Lineage, Policy, Trace, load_policy
from tvm_pager.simulation.feeder import Feeder
from tvm_pager.simulation.program import Program
from tvm_pager.testing.training import training_trace
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.virtual_backend import VirtualBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm_pager.planning import View

ACT = PageKind.ACTIVATION
# A gradient is handed on, weights are updated in place, layers have modules.
TRAINING = training_trace(3, num_small_ops=1)


class Followed:
    """A program whose fifth iteration is followed, operation by operation."""

    def __init__(self, trace: Trace, device: int = 1 << 40) -> None:
        self.trace = trace
        self._program = Program(trace)
        backend = VirtualBackend(make_hardware(), 1 << 40)
        self.pager = DemandPager(
            backend, device, Recording, strict=True, clock=backend.clock, hardware=make_hardware
        )
        self._feeder = Feeder(self.pager, backend, self._program, launch_ns=1)
        for _ in range(4):
            self.pager.evict_all()  # so that it is worth following
            self._feeder.run_iteration()
        assert self.pager.iterations.follower is not None
        self.view: View = self.pager.view

    def steps(self) -> Iterator[int]:
        """Runs an operation, and gives its index."""
        for index, step in enumerate(self._program.steps):
            with self.pager.lock:
                self._feeder._run_steps([step])
            assert self.pager.iterations.follower is not None
            assert self.pager.iterations.follower.index == index + 1
            yield index

    def alive(self) -> dict[int, Page]:
        """The pages that are alive, by number."""
        return {
            number: page
            for number, page in enumerate(self._feeder.pages)
            if page is not None and page.state is not PageState.DEAD
        }


def is_written(trace: Trace, number: int, begin: int, end: int) -> bool:
    return any(number in op.writes for op in trace.ops[begin:end])


def lineage(followed: Followed, number: int, index: int) -> Lineage | None:
    """By looking through the whole trace."""
    trace, alive = followed.trace, followed.alive()
    born = trace.pages[number].born
    if born is None:
        return None
    op = trace.ops[born]
    inputs = tuple(alive[n].id if n in alive else None for n in op.reads)
    is_same = not any(is_written(trace, n, born, index + 1) for n in (*op.reads, number))
    is_recomputable = op.is_replayable and is_same and None not in inputs
    return Lineage(op.name, born, op.compute_ns, inputs, is_recomputable)


def unused_ns(trace: Trace, number: int, index: int) -> int | None:
    """By going back through this iteration and the two before."""
    waited, page = 0, trace.pages[number]
    for op in range(index, index - 3 * len(trace.ops), -1):
        entry = trace.ops[op]
        if number in (*entry.reads, *entry.creates):
            return waited
        waited += entry.compute_ns if op != index else 0
        if op % len(trace.ops) == 0:
            number = next((n for n, p in enumerate(trace.pages) if p.becomes == number), -1)
            if number < 0 or page.born is not None:
                return None
    return None


# --- followed ------------------------------------------------------------------------------------


def test_lineage_says_what_made_a_page_and_whether_it_could_do_so_again() -> None:
    followed = Followed(TRAINING)
    answers = set()
    for index in followed.steps():
        for number, page in followed.alive().items():
            expected = lineage(followed, number, index)
            assert followed.view.lineage(page.id) == expected, (number, index)
            answers.add(expected and expected.is_recomputable)
    assert answers == {None, True, False}


@pytest.mark.parametrize(
    ("what", "until"),
    [
        ("nothing", 4),
        ("operand is written", 2),  # by operation 2: not while that runs, nor later
        ("operand dies", 3),  # right after operation 2
        ("page is written", 0),  # by operation 2, but pages that are written are never made again
        ("random numbers", 0),
    ],
)
def test_what_forbids_to_compute_a_page_again(what: str, until: int) -> None:
    written = {"operand is written": "x", "page is written": "a"}.get(what, "")
    dies = what == "operand dies"
    program = small_traces.Program()
    program.page("w", 4)
    program.op("w", {"x": (4, ACT)})
    made = program.op("w x", {"a": (4, ACT)}, is_replayable=what != "random numbers")
    program.op(writes=written)
    if dies:
        program.free("x")
    program.op("a" if dies else "x a")
    program.op(writes="w")
    followed = Followed(program.build())
    for index in followed.steps():
        if made <= index < 4:
            page = followed.alive()[program.numbers["a"]]
            found = followed.view.lineage(page.id)
            assert found is not None
            assert found.op == made
            assert found.is_recomputable == (index < until)
            assert (None in found.inputs) == (dies and index >= until)


def test_seconds_since_use_go_back_through_the_boundary() -> None:
    followed = Followed(TRAINING)
    for index in followed.steps():
        for number, page in followed.alive().items():
            expected = unused_ns(TRAINING, number, index)
            found = followed.view.seconds_since_use(page.id)
            assert expected is not None
            assert found == pytest.approx(expected / 1e9, abs=1e-12), (number, index)


def test_before_the_first_operation_a_page_is_as_old_as_the_iteration_before_left_it() -> None:
    followed = Followed(TRAINING)
    weight = followed.alive()[0]
    after = max(i for i, op in enumerate(TRAINING.ops) if 0 in op.reads)
    expected = sum(op.compute_ns for op in TRAINING.ops[after + 1 :])
    assert followed.view.seconds_since_use(weight.id) == pytest.approx(expected / 1e9)


def test_nobody_knows_how_long_a_page_was_unused_that_the_trace_does_not_name() -> None:
    program = small_traces.Program()
    program.page("w", 4)
    program.page("other", 4)
    program.op("w", {"a": (4, ACT)})
    followed = Followed(program.build())
    for _ in followed.steps():
        other = followed.alive()[program.numbers["other"]]
        assert followed.view.seconds_since_use(other.id) is None
        assert followed.view.module(other.id) == ""
        assert followed.view.layer(other.id) is None


def test_where_a_trace_has_no_times_nobody_knows_how_long_a_page_was_unused() -> None:
    program = small_traces.Program()
    program.page("w", 4)
    program.op("w", {"a": (4, ACT)}, ns=0)
    program.op("w", ns=0)
    followed = Followed(program.build())
    for _ in followed.steps():
        assert {followed.view.seconds_since_use(p.id) for p in followed.alive().values()} == {None}


def test_module_and_layer_are_those_that_made_a_page_or_use_it_first() -> None:
    followed = Followed(TRAINING)
    pages, modules = TRAINING.pages, TRAINING.modules
    found = set()
    for _ in followed.steps():
        for number, page in followed.alive().items():
            made_in = next(
                (p.born for p in pages if p.becomes == number and p.born is not None),
                pages[number].born,
            )
            if made_in is None:
                made_in = next(i for i, op in enumerate(TRAINING.ops) if number in op.reads)
            module = TRAINING.ops[made_in].module
            expected = modules[module] if module >= 0 else ""
            assert followed.view.module(page.id) == expected, number
            layer = followed.view.layer(page.id)
            if expected:
                found.add((expected, layer))
    assert len(found) == len(modules) == len({layer for _, layer in found})


def test_there_is_no_layer_where_the_trace_shows_none() -> None:
    program = small_traces.Program()
    program.page("w", 4)
    program.op("w", {"a": (4, ACT)})
    followed = Followed(program.build())
    for _ in followed.steps():
        assert {followed.view.layer(page.id) for page in followed.alive().values()} == {None}


def test_answers_follow_a_trace_that_is_recorded_anew() -> None:
    rig = Rig(Recording)
    rig.weights()
    for nbytes in (1000, 1000, 1000, 1000, 2500, 2500, 2500):
        for op in training(nbytes=nbytes):
            rig.run(op)
            follower = rig.pager.iterations.follower
            for page in rig.pages.values():
                found = rig.pager.view.lineage(page.id)
                if found is not None:
                    assert follower is not None
                    assert found.name == follower.known.trace.ops[found.op].name
        rig.boundary()
    follower = rig.pager.iterations.follower
    assert follower is not None
    assert follower.known.facts is follower.known.facts
    assert follower.known.facts.trace is follower.known.trace
    rig.end()


# --- not followed --------------------------------------------------------------------------------


def test_where_nothing_is_followed_nobody_knows_anything() -> None:
    rig: Any = Rig()
    rig.weights()
    view = rig.pager.view
    for page_id in (rig.pages["w0"].id, 10**9):
        assert view.next_use(page_id) is None
        assert view.lineage(page_id) is None
        assert view.seconds_since_use(page_id) is None
        assert view.module(page_id) == ""
        assert view.layer(page_id) is None
    for lane in Lane:
        assert view.backlog_bytes(lane.value) >= 0
    rig.end()


def test_pages_that_the_trace_does_not_know_have_no_answers_either() -> None:
    followed = Followed(TRAINING)
    for _ in followed.steps():
        assert followed.view.lineage(10**9) is None
        assert followed.view.seconds_since_use(10**9) is None
        assert followed.view.module(10**9) == ""
        assert followed.view.layer(10**9) is None


@pytest.mark.parametrize(
    "question", ["next_use", "lineage", "seconds_since_use", "module", "layer"]
)
def test_who_asks_has_iterations_followed(question: str) -> None:
    answers = []

    class Curious(load_policy("lru")):  # type: ignore[misc]
        def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> Any:
            answers.extend(getattr(view, question)(page_id) for page_id in self._order)
            return super().choose_victims(tier, need_bytes, view)

    rig = Rig(Curious, device=56 * 512)
    rig.weights()
    for _ in range(8):
        rig.iterate(training())
    assert rig.pager.iterations.outcomes.counts["complete"] >= 4
    assert answers
    # The program has no modules.
    assert any(answer not in (None, "") for answer in answers) == (question != "module")
    rig.end()


# --- lanes ---------------------------------------------------------------------------------------


class Virtual:
    """A pager on a virtual clock, with pages of a MiB on the device."""

    def __init__(self, make_policy: type[Policy], num_pages: int = 3) -> None:
        program = small_traces.Program()
        for i in range(num_pages):
            program.page(f"w{i}", 2048)
        program.op(" ".join(f"w{i}" for i in range(num_pages)))
        self.backend = VirtualBackend(make_hardware(), 1 << 30)
        self.pager = DemandPager(
            self.backend, 1 << 30, make_policy, strict=True, clock=self.backend.clock
        )
        feeder = Feeder(self.pager, self.backend, Program(program.build()), launch_ns=1)
        self.pages = [page for page in feeder.pages if page is not None]


def test_backlog_counts_what_is_queued_and_what_is_under_way() -> None:
    machine = Virtual(load_policy("lru"))
    pager, view = machine.pager, machine.pager.view
    with pager.lock:
        for count, page in enumerate(machine.pages):
            assert view.backlog_bytes("d2h") == count << 20
            pager.mover.start_write_back(page)
        assert [view.backlog_bytes(lane.value) for lane in Lane if lane is not Lane.D2H] == [0] * 6
        before = machine.backend.host_ns
        assert view.backlog_bytes("d2h") == 3 << 20
        assert machine.backend.host_ns == before  # it has waited for nothing
        machine.pages[0].tickets[0].wait()  # its copy is over, though nobody has settled it
        assert view.backlog_bytes("d2h") == 2 << 20
        pager.flight.settle_all()
        assert view.backlog_bytes("d2h") == 0
        pager.mover.evict(machine.pages[0])
        pager.mover.start_fetch(machine.pages[0])
        assert (view.backlog_bytes("d2h"), view.backlog_bytes("h2d")) == (0, 1 << 20)
        pager.flight.settle(machine.pages[0])
        assert not pager.iterations.planner.wants_traces  # lanes need no trace


def test_backlog_counts_copies_that_pages_have_left_to_the_stream() -> None:
    """Scenario: memory is released, or used again, in stream order, before its copy has ended."""
    machine = Virtual(load_policy("lru"))
    pager, view, page = machine.pager, machine.pager.view, machine.pages[0]
    with pager.lock:
        pager.mover.evict(page)
        assert page.state is PageState.LEAVING
        assert view.backlog_bytes("d2h") == 1 << 20
        pager.mover.start_fetch(page)  # which waits for the copy down
        assert (view.backlog_bytes("d2h"), view.backlog_bytes("h2d")) == (1 << 20, 1 << 20)
        pager.flight.arrive(page)
        assert page.state is PageState.RESIDENT
        assert (view.backlog_bytes("d2h"), view.backlog_bytes("h2d")) == (1 << 20, 1 << 20)
        page.readers[-1].wait()
        assert (view.backlog_bytes("d2h"), view.backlog_bytes("h2d")) == (0, 0)


def test_a_lane_that_does_not_exist_is_refused_by_name() -> None:
    machine = Virtual(load_policy("lru"))
    with pytest.raises(ValueError, match="no lane 'down'; there are d2h, h2d, h2n"):
        machine.pager.view.backlog_bytes("down")
