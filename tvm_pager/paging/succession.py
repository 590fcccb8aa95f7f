"""Another policy takes over while the pager runs.

[Note: What is kept]
    Pages stay where they are, and transfers go on. The new policy is told of the residents of its
    tier, those that were used last come last; LRU so begins in the right order. Traces are kept,
    plans are not: the present iteration goes on by demand, and the next one is planned by the new
    policy if its trace is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.errors import PagerError, PolicyError
from tvm_pager.memory import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.paging.pager import DemandPager
    from tvm_pager.planning import HardwareProfile, Policy

__all__ = ["change_policy"]

_REFUSAL = (
    "set_policy while an operation runs, in this thread or another: call it between operations, "
    "best where an iteration ends"
)


def change_policy(
    pager: DemandPager,
    make_policy: Callable[[], Policy],
    *,
    hardware: Callable[[], HardwareProfile] | None = None,
    disk_engine: str | None = None,
) -> None:
    """Lets another policy decide from now on; see [Note: What is kept]. O(pages).

    Waits for the lock, and for no transfer.

    Args:
        pager: whose policy changes.
        make_policy: as in `DemandPager`.
        hardware: likewise; None: as before.
        disk_engine: likewise.

    Raises:
        PagerError: an operation is running.
        PolicyError: the policy cannot be made, or raises when it is told of the pages. Nothing has
            changed.
    """
    # Whoever comes back here inside the pager holds its lock already: a sink, a policy, an operator
    # that is written in Python.
    if pager.lock._is_owned():  # type: ignore[attr-defined]
        raise PagerError(_REFUSAL)
    with pager.lock:
        if pager.num_transient_pins or pager.reservations.queue:
            raise PagerError(_REFUSAL)
        pager.drain()
        given = {tier: _made(make_policy) for tier in (Tier.DEVICE, Tier.HOST)}
        successors = {tier: _taught(pager, tier, policy) for tier, policy in given.items()}
        for tier, policy in successors.items():
            pager.policies[tier].policy = policy
        pager.evictor.forget_chosen()
        planner = pager.iterations.planner
        pager.iterations.succeed(planner.successor(given[Tier.DEVICE], hardware, disk_engine))


def _made(make_policy: Callable[[], Policy]) -> Policy:
    try:
        return make_policy()
    except Exception as error:
        name = getattr(make_policy, "name", "") or getattr(make_policy, "__name__", "")
        raise PolicyError(f"policy {name} cannot be made: it raised {error!r}") from error


def _taught(pager: DemandPager, tier: Tier, policy: Policy) -> Policy:
    try:
        return pager.policies[tier].taught(policy)
    except PolicyError:
        raise
    except Exception as error:
        name = policy.name or type(policy).__name__
        raise PolicyError(f"policy {name} raised {error!r} in on_insert") from error
