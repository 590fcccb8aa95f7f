"""Whatever a policy plans, chooses or raises: bytes stay right and budgets hold.

Programs vary from iteration to iteration, the backend is late and fails, budgets change; the policy
gives random plans, plans for other traces, nonsense, or raises.
"""

from __future__ import annotations

import contextlib
import errno
import random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.model.programs import FRAME, Op, Rig, training
from tests.model.tiny_planner import TinyPlanner
from tvm_pager.errors import BudgetError, CommitError, TransferError
from tvm_pager.memory import Tier
from tvm_pager.planning import (
    Action,
    Clean,
    CreateIn,
    Drop,
    Evict,
    Eviction,
    Fetch,
    Keep,
    MovementPlan,
    Policy,
    RunOnHost,
    Trace,
)
from tvm_pager.transfer.protocol import Lane

REFUSALS = (BudgetError, CommitError, TransferError)


class Hostile(Policy):
    """Decides at random, from what looks right to what makes no sense."""

    name = "hostile"

    def __init__(self, seed: int, sanity: float) -> None:
        self.random = random.Random(seed)
        self.sanity = sanity
        self.tiny = TinyPlanner()
        self.old: list[MovementPlan] = []

    def _is_sane(self) -> bool:
        return self.random.random() < self.sanity

    def plan(self, trace: Trace, hardware: Any, limits: Any) -> Any:
        if not self._is_sane():
            kind = self.random.randrange(5)
            if kind == 0:
                raise RuntimeError("no plan today")
            if kind == 1:
                return self.random.choice(["a plan", 7, MovementPlan(None), object()])  # type: ignore[arg-type]
            if kind == 2 and self.old:
                return self.random.choice(self.old)
            if kind == 3:
                return None
        if self.random.random() < 0.3:
            plan = self.tiny.plan(trace, hardware, limits)
            assert plan is not None
        else:
            actions = [self._action(trace) for _ in range(self.random.randrange(60))]
            pages = range(len(trace.pages) + 3)
            absent = frozenset(n for n in pages if self.random.random() < 0.2)
            plan = MovementPlan(tuple(actions), absent)
        self.old.append(plan)
        return plan

    def feedback(self, report: Any) -> Any:
        return None if self.random.random() < 0.5 else self.plan(report.trace, None, report.limits)

    def _action(self, trace: Trace) -> Any:
        pick = self.random
        if not self._is_sane():
            return pick.choice([None, "go", Evict(-1, 0, 0), Fetch(10**9, 0, 1), Evict(0, 9, 3)])
        num_ops = len(trace.ops)
        earliest = pick.randrange(num_ops + 1)
        deadline = min(num_ops, earliest + pick.choice([0, 1, 3, 10]))
        page = pick.randrange(len(trace.pages))
        below = pick.choice([None, Tier.HOST, Tier.NVME])
        actions: list[Action] = [
            Evict(page, earliest, deadline, below, pick.randrange(3)),
            Evict(page, earliest, deadline),
            Clean(page, earliest, deadline, below),
            Fetch(page, earliest, deadline, pick.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST])),
            Fetch(page, earliest, deadline),
            Keep(page, earliest, deadline),
            Drop(page, earliest, deadline),
            RunOnHost(pick.randrange(num_ops), earliest, deadline),
            CreateIn(page, Tier.HOST, earliest, deadline),
        ]
        return pick.choice(actions)


class HostileVictims(Hostile):
    """Chooses victims too."""

    def __init__(self, seed: int, sanity: float) -> None:
        super().__init__(seed, sanity)
        self.known: list[int] = []

    def on_insert(self, page_id: int) -> None:
        self.known.append(page_id)

    def on_remove(self, page_id: int) -> None:
        self.known.remove(page_id)

    def choose_victims(self, tier: Tier, need_bytes: int, view: Any) -> Any:
        if not self._is_sane():
            return self.random.choice([None, [Eviction(10**9)], "all", 3])
        victims, freed = [], 0
        for page_id in self.random.sample(self.known, len(self.known)):
            view.next_use(page_id)
            if view.evictable(page_id) and freed < need_bytes:
                victims.append(Eviction(page_id))
                freed += view.frame_bytes(page_id)
        return victims if freed >= need_bytes else None


def varied(pick: random.Random) -> list[Op]:
    """A program like the last one, or not."""
    kind = pick.randrange(8)
    program = training(pick.choice([6, 6, 6, 4]), pick.choice([3000, 3000, 5000, 700]))
    if kind == 0:
        program = program[: pick.randrange(2, 8)]
        made = {name for op in program for name in op.creates}
        program.append(Op("end", (), (), {}, tuple(made)))
    elif kind == 1:
        place = pick.randrange(len(program))
        program[place:place] = [
            Op(f"extra{i}", (f"w{i}",), (f"w{i}",), {"t": 900}, ("t",)) for i in range(6)
        ]
    elif kind == 2:
        pick.shuffle(program[-6:])
        program[-6:] = pick.sample(program[-6:], 4)
    return program


def run(rig: Rig, program: list[Op], pick: random.Random) -> None:
    for op in program:
        op = Op(op.name, tuple(n for n in op.reads if n in rig.pages), (), op.creates, op.frees)
        if pick.random() < 0.5:
            op.writes = tuple(n for n in op.reads if pick.random() < 0.5)
        for name in op.creates:
            rig.free(name)
        # An operation that failed for a while is tried again, as a program would in the end.
        for _ in range(50):
            with contextlib.suppress(*REFUSALS):
                rig.run(op)
                break
        else:
            raise AssertionError(f"{op} is refused over and over")
    rig.boundary()


@pytest.mark.parametrize("policy", [Hostile, HostileVictims])
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sanity=st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.0]),
    device_blocks=st.integers(46, 90),
    host_frames=st.sampled_from([0, 8, 64]),
    max_delay=st.sampled_from([0, 3, 40]),
    in_order=st.booleans(),
    fails=st.booleans(),
)
def test_bytes_stay_right_and_budgets_hold(
    policy: type[Hostile],
    seed: int,
    sanity: float,
    device_blocks: int,
    host_frames: int,
    max_delay: int,
    in_order: bool,
    fails: bool,
) -> None:
    pick = random.Random(seed)
    rig = Rig(
        lambda: policy(seed, sanity),
        device=device_blocks * 512,
        host=host_frames * FRAME,
        nvme=96 * FRAME,
        seed=seed,
        max_delay=max_delay,
        in_order=in_order,
        strict=False,
    )
    rig.weights()
    steady = training()
    for number in range(9):
        run(rig, steady if pick.random() < 0.7 else varied(pick), pick)
        if fails and pick.random() < 0.5:
            rig.backend.fail_next(
                pick.randrange(3), lane=pick.choice(list(Lane)), code=errno.EAGAIN
            )
        if pick.random() < 0.2:
            with rig.pager.lock, contextlib.suppress(*REFUSALS):
                rig.pager.budgets.set_device(pick.randrange(46, 90) * 512)
        if pick.random() < 0.1:
            with contextlib.suppress(TransferError):
                rig.pager.evict_all()
        rig.pager.check_invariants()
        if rig.pager.iterations.is_planned:
            event(f"planned in iteration {number}")
    for lane in Lane:  # what was asked to fail, and has not
        rig.backend._failures[lane].clear()
    rig.end()
    assert len([text for text in rig.notices if text.startswith("plans: ")]) <= 1


@pytest.mark.parametrize("in_order", [False, True])
def test_a_planned_program_gives_the_bytes_of_an_unplanned_one(in_order: bool) -> None:
    for seed in range(20):
        rig = Rig(TinyPlanner, device=60 * 512, seed=seed, max_delay=20, in_order=in_order)
        rig.weights()
        for _ in range(8):
            rig.iterate(training())  # which compares
        assert rig.pager.iterations.outcomes.counts["complete"] >= 4
        rig.end()
