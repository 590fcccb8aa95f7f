"""Asks a policy for plans, and keeps what makes no sense away from the pager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.errors import PolicyError
from tvm_pager.memory import Tier
from tvm_pager.paging.plan_book import PlanBook
from tvm_pager.planning import Limits, MovementPlan, Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import PageTable
    from tvm_pager.paging.known_trace import KnownTrace
    from tvm_pager.planning import HardwareProfile, IterationReport

__all__ = ["Planner"]

_LESS, _MORE = 0.99, 1.05  # of the device bytes that a plan was made for: else it is made anew


class Planner:
    """One policy's plans.

    Args:
        policy: of the device tier.
        hardware: gives the profile, at the first plan; None: nothing is planned.
        disk_engine: see `Limits`.
        report: told once of each kind of misbehaviour.
        strict: raise PolicyError instead.

    Attributes:
        wants_traces: whether iterations are recorded and followed: the policy plans, or has asked
            what only a trace tells.
        num_errors: what the policy has done wrong.
        kinds: see `Policy`.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: Callable[[], HardwareProfile] | None,
        disk_engine: str,
        report: Callable[[str], None],
        *,
        strict: bool,
    ) -> None:
        self.wants_traces = type(policy).plan is not Policy.plan
        self.num_errors = 0
        self.kinds = policy.kinds
        self._policy = policy
        self._gives_feedback = type(policy).feedback is not Policy.feedback
        self._hardware = hardware
        self._disk_engine = disk_engine
        self._report = report
        self._strict = strict
        self._reported: set[str] = set()

    def successor(
        self,
        policy: Policy,
        hardware: Callable[[], HardwareProfile] | None,
        disk_engine: str | None,
    ) -> Planner:
        """The same for another policy; None: as here. Errors are counted on."""
        planner = Planner(
            policy,
            hardware or self._hardware,
            disk_engine or self._disk_engine,
            self._report,
            strict=self._strict,
        )
        planner.num_errors = self.num_errors
        return planner

    def limits(self, table: PageTable, device_bytes: int) -> Limits:
        """What holds now. `device_bytes` are for pages and workspaces."""
        frames = table.frames
        return Limits(
            max(0, device_bytes),
            frames[Tier.HOST].capacity_bytes,
            0 if Tier.NVME in table.closed_tiers else frames[Tier.NVME].capacity_bytes,
            disk_engine=self._disk_engine,
        )

    def plan(self, known: KnownTrace, limits: Limits) -> None:
        """Plans the trace, unless there is a plan for such limits. Takes as long as the policy.

        Raises:
            PolicyError: the policy raised or planned something illegal, and `strict` is set.
        """
        if self._hardware is None or not self.wants_traces or _is_near(known.limits, limits):
            return
        known.limits, known.book = limits, None
        try:
            plan = self._policy.plan(known.trace, self._hardware(), limits)
            known.book = self._checked(known, plan)
        except Exception as error:  # whatever a policy does, training goes on
            self._blame(f"raised {error!r} in plan", error)

    def feedback(self, known: KnownTrace, report: IterationReport) -> None:
        """Tells the policy what became of its plan, and takes a better one.

        Raises:
            PolicyError: as `plan`.
        """
        if known.book is None or not self._gives_feedback:
            return
        try:
            plan = self._policy.feedback(report)
            if plan is not None:
                known.book = self._checked(known, plan)
        except Exception as error:  # as above
            self._blame(f"raised {error!r} in feedback", error)

    def _checked(self, known: KnownTrace, plan: object) -> PlanBook | None:
        if plan is None:
            return None
        if not isinstance(plan, MovementPlan):
            raise TypeError(f"a MovementPlan is needed, not {type(plan).__name__}")
        book = PlanBook(known, plan)
        if book.num_illegal:
            self._blame(
                f"planned {book.num_illegal:,} illegal actions, such as {book.first_illegal}", None
            )
        for name in book.num_ignored:
            self._tell_once(
                name, f"policy {self._name()} plans {name}, which is not executed: it is left out"
            )
        return book

    def _blame(self, fault: str, error: Exception | None) -> None:
        if self._strict:
            if isinstance(error, PolicyError):
                raise error
            raise PolicyError(f"policy {self._name()} {fault}") from error
        self.num_errors += 1
        self._tell_once("fault", f"policy {self._name()} {fault}; the pager does without that")

    def _tell_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(text)

    def _name(self) -> str:
        return self._policy.name or type(self._policy).__name__


def _is_near(planned: Limits | None, limits: Limits) -> bool:
    return (
        planned is not None
        and planned.host_bytes == limits.host_bytes
        and planned.nvme_bytes == limits.nvme_bytes
        and planned.device_bytes * _LESS <= limits.device_bytes <= planned.device_bytes * _MORE
    )
