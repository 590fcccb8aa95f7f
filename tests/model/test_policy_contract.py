"""Every built-in policy keeps the contract that the test kit checks for anybody's."""

from __future__ import annotations

from typing import Any

from tvm_pager.planning import Eviction, Lineage, Tier, View, available_policies, load_policy
from tvm_pager.policies.lru import LRU
from tvm_pager.testing import pager_machine, policy_contract

for _name in available_policies():
    globals()[f"Test{_name.title().replace('_', '')}"] = policy_contract(load_policy(_name))


class Asking(LRU):
    """Asks all that a view can tell of its pages, and decides by the answers."""

    name = "asking"

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims, freed = [], 0
        for _, page_id in sorted((_answers(view, page_id), page_id) for page_id in self._order):
            if freed < need_bytes and view.evictable(page_id):
                victims.append(Eviction(page_id))
                freed += view.frame_bytes(page_id)
        return victims if freed >= need_bytes else None


def _answers(view: View, page_id: int) -> tuple[Any, ...]:
    lineage, seconds, layer = (
        view.lineage(page_id),
        view.seconds_since_use(page_id),
        view.layer(page_id),
    )
    assert lineage is None or isinstance(lineage, Lineage)
    backlogs = [
        view.backlog_bytes(lane) for lane in ("d2h", "h2d", "d2n", "n2d", "h2n", "n2h", "r2d")
    ]
    assert min(backlogs) >= 0
    return (
        lineage is not None and lineage.is_recomputable,
        -1.0 if seconds is None else seconds,
        view.module(page_id),
        -1 if layer is None else layer,
        (sum(backlogs) + page_id) % 3,
    )


TestAsking = policy_contract(Asking)
TestAskingMachine = pager_machine(Asking)
