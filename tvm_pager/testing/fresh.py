"""One policy in an interpreter of its own: what it decides, and which heavy modules came with it.

`python -m tvm_pager.testing.fresh NAME` prints a line of JSON. Imports no Hypothesis.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

from tvm_pager.memory import PageKind, Tier
from tvm_pager.planning import Limits, Lineage, PageView, Policy, load_policy
from tvm_pager.testing.machines import example_profile
from tvm_pager.testing.training import training_trace
from tvm_pager.transfer.protocol import Lane

__all__ = ["main"]

_HEAVY = ("torch", "kvikio", "cupy", "transformers")
_NUM_PAGES = 40


class _Seen:
    """Pages of many sizes and kinds, all of which may leave."""

    operation_index = 200

    def page(self, page_id: int) -> PageView:
        kind = list(PageKind)[page_id % len(PageKind)]
        return PageView(page_id, kind, self.frame_bytes(page_id), Tier.DEVICE, False, 0, page_id)

    def evictable(self, page_id: int) -> bool:
        return True

    def frame_bytes(self, page_id: int) -> int:
        return 512 * (1 + page_id * 7 % 5)

    def next_use(self, page_id: int) -> float | None:
        return math.inf if page_id % 9 == 0 else float(page_id * 11 % 17)

    def lineage(self, page_id: int) -> Lineage | None:
        inputs = (page_id // 2, None if page_id % 4 == 3 else page_id // 3)
        cost_ns = page_id * 13 % 7 * 1000
        return Lineage("test::make", page_id, cost_ns, inputs, None not in inputs)

    def seconds_since_use(self, page_id: int) -> float | None:
        return (self.operation_index - page_id) * 1e-6

    def module(self, page_id: int) -> str:
        return f"layers.{page_id % 3}"

    def layer(self, page_id: int) -> int | None:
        return page_id % 3

    def backlog_bytes(self, lane: str) -> int:
        return len(Lane(lane).value) << 20


def main(arguments: Sequence[str]) -> int:
    """Runs the policy and prints what came out; returns 0."""
    make = load_policy(arguments[0])
    result = {"victims": _victims(make()), "plan": _plan(make())}
    result["heavy"] = [module for module in _HEAVY if module in sys.modules]
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _victims(policy: Policy) -> list[str]:
    if type(policy).choose_victims is Policy.choose_victims:
        return []
    view, answers = _Seen(), []
    pages = [
        page_id
        for page_id in range(_NUM_PAGES)
        if policy.kinds is None or view.page(page_id).kind in policy.kinds
    ]
    for page_id in pages:
        policy.on_insert(page_id)
    for page_id in pages[::3]:
        policy.on_access(page_id)
    while pages:
        need_bytes = min(1024, sum(map(view.frame_bytes, pages)))
        victims = policy.choose_victims(Tier.DEVICE, need_bytes, view)
        answers.append(repr(victims))
        gone = {victim.page_id for victim in victims or ()} & set(pages)
        if not gone:
            break
        for page_id in sorted(gone):
            pages.remove(page_id)
            policy.on_remove(page_id)
    return answers


def _plan(policy: Policy) -> str:
    if type(policy).plan is Policy.plan:
        return ""
    trace = training_trace(num_layers=3)
    most = sum(page.frame_bytes for page in trace.pages)
    return repr(policy.plan(trace, example_profile(), Limits(most // 3, most * 4)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
