"""Policies that each break one rule of the contract, and are right otherwise."""

from __future__ import annotations

import datetime
import os
import random
import time
from typing import Any

from tvm_pager.planning import (
    CreateIn,
    Evict,
    Eviction,
    Fetch,
    IterationReport,
    Limits,
    MovementPlan,
    Policy,
    RunOnHost,
    Tier,
    Trace,
    View,
)
from tvm_pager.policies.lru import LRU

now = time.monotonic


class Fine(LRU):
    name = "fine"


class ClockReader(LRU):
    def on_access(self, page_id: int) -> None:
        if now() > 0:
            super().on_access(page_id)


class DateReader(LRU):
    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        datetime.datetime.now(datetime.UTC)
        return super().choose_victims(tier, need_bytes, view)


class Printer(LRU):
    def on_insert(self, page_id: int) -> None:
        print(page_id)  # noqa: T201  # that is what is to be noticed
        super().on_insert(page_id)


class Reader(LRU):
    def on_remove(self, page_id: int) -> None:
        with open(os.devnull) as file:
            file.read()
        super().on_remove(page_id)


class Gambler(LRU):
    """Not seeded."""

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        for page_id in random.sample(list(self._order), len(self._order)):
            self._order.move_to_end(page_id)
        return super().choose_victims(tier, need_bytes, view)


class HashSeeded(LRU):
    """The order of a set of strings."""

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        for text in {f"page {page_id}" for page_id in self._order}:
            self._order.move_to_end(int(text[5:]))
        return super().choose_victims(tier, need_bytes, view)


class Spendthrift(LRU):
    """Forgets pages before it finds that there is not enough."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()

    def on_access(self, page_id: int) -> None:
        self.used.add(page_id)

    def on_remove(self, page_id: int) -> None:
        super().on_remove(page_id)
        self.used.discard(page_id)

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        for page_id in self.used:
            self._order.move_to_end(page_id)
        self.used.clear()
        if len(self._order) > 2 and super().choose_victims(tier, need_bytes, view) is None:
            self._order.move_to_end(next(iter(self._order)))
            return None
        return super().choose_victims(tier, need_bytes, view)


class Hoarder(LRU):
    """Keeps the view."""

    view: Any = None

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        self.view = view
        return super().choose_victims(tier, need_bytes, view)


class LateLooker(Hoarder):
    """Uses it later."""

    def on_access(self, page_id: int) -> None:
        super().on_access(page_id)
        if self.view is not None:
            self.view.page(page_id)


class TooFew(LRU):
    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims = super().choose_victims(tier, need_bytes, view)
        return victims[:-1] if victims else victims


class Unwilling(LRU):
    """Gives up although enough could leave."""

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims = super().choose_victims(tier, need_bytes, view)
        return victims if victims is None or len(victims) < 2 else None


class Ruthless(LRU):
    """Ignores pins."""

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        if sum(map(view.frame_bytes, self._order)) < need_bytes:
            return None
        return [Eviction(page_id) for page_id in self._order]


class Upward(LRU):
    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims = super().choose_victims(tier, need_bytes, view)
        return None if victims is None else [Eviction(v.page_id, Tier.HOST) for v in victims]


class Twice(LRU):
    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims = super().choose_victims(tier, need_bytes, view)
        return victims and victims + victims[:1]


class Forgetful(LRU):
    """Names pages that are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[Eviction] = []

    def on_remove(self, page_id: int) -> None:
        super().on_remove(page_id)
        self.gone.append(Eviction(page_id))

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims = super().choose_victims(tier, need_bytes, view)
        return victims and self.gone[:1] + victims


class Numbers(LRU):
    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> Any:
        victims = super().choose_victims(tier, need_bytes, view)
        return victims and [victim.page_id for victim in victims]


class Raising(LRU):
    def on_remove(self, page_id: int) -> None:
        if page_id == 2:
            raise KeyError(page_id)
        super().on_remove(page_id)


class TorchUser(LRU):
    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = torch


# --- by plan -------------------------------------------------------------------------------------


class NoPlan(Policy):
    name = "no_plan"

    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        return None


class OverBudget(NoPlan):
    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        return MovementPlan(())


class Beyond(NoPlan):
    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        return MovementPlan((Evict(0, 0, len(trace.ops) + 1),)) if trace.pages else None


class InUse(NoPlan):
    """Evicts before the use, and fetches after it."""

    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        for index, op in enumerate(trace.ops):
            for page in op.reads:
                if trace.pages[page].becomes == page:
                    return MovementPlan(
                        (Evict(page, index, index), Fetch(page, index + 1, len(trace.ops)))
                    )
        return None


class NotBack(NoPlan):
    """The iteration does not end as it begins."""

    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        last = len(trace.ops)
        for number, page in enumerate(trace.pages):
            if page.becomes == number:
                return MovementPlan((Evict(number, last, last),))
        return None


class PlanRaises(NoPlan):
    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        return MovementPlan((), frozenset(range(trace.pages[0].nbytes, 0)))  # if there is a page


class PlanOfNumbers(NoPlan):
    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> Any:
        return [1, 2]


class Fickle(NoPlan):
    count = 0

    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        Fickle.count += 1
        return MovementPlan((), frozenset(n for n in range(Fickle.count % 2)))


class Slow(NoPlan):
    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        if len(trace.ops) > 20_000:
            end_s = time.thread_time() + 0.2
            while time.thread_time() < end_s:
                pass
        return None


class PlanReadsClock(NoPlan):
    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        time.perf_counter_ns()
        return None


class OnHost(NoPlan):
    """What nobody executes yet is no fault."""

    def plan(self, trace: Trace, hardware: Any, limits: Limits) -> MovementPlan | None:
        if not trace.pages or not trace.ops:
            return None
        born = [n for n, page in enumerate(trace.pages) if page.born is not None]
        last = len(trace.ops)
        return MovementPlan(
            (RunOnHost(0, 0, last), *(CreateIn(n, Tier.HOST, 0, last) for n in born))
        )


class FeedbackRaises(NoPlan):
    def feedback(self, report: IterationReport) -> MovementPlan | None:
        if report.late_fetches:
            raise ZeroDivisionError
        return None


class FeedbackFickle(NoPlan):
    def feedback(self, report: IterationReport) -> MovementPlan | None:
        Fickle.count += 1
        return MovementPlan((), frozenset(n for n in range(Fickle.count % 2)))
