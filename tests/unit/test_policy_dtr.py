"""DTR by hand: cheap, large and long unused goes first, with a trace and without."""

from __future__ import annotations

import pytest

from tests.unit.small_traces import ENDLESS, Program
from tvm_pager.planning import Drop, Limits, PageKind, PageView, Tier, Trace
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.policies.dtr import DTR
from tvm_pager.testing.machines import example_profile

ACT = PageKind.ACTIVATION


def three(sizes: tuple[int, int, int], costs: tuple[int, int, int]) -> tuple[Program, Trace]:
    """Pages p0, p1, p2, made one after the other, kept during a large operation, and then read."""
    program = Program()
    program.page("w", 1)
    for i in range(3):
        program.op("w", {f"p{i}": (sizes[i], ACT)}, ns=costs[i])
    program.op("w", {"large": (100, ACT)}, ns=1000)
    program.free("large")
    program.op("p0 p1 p2")
    program.free("p0", "p1", "p2")
    return program, program.build()


@pytest.mark.parametrize(
    ("sizes", "costs", "goes"),
    [
        ((10, 10, 10), (50_000, 1000, 50_000), "p1"),  # the cheapest
        ((10, 40, 10), (5000, 5000, 5000), "p1"),  # the largest
        ((10, 10, 10), (5000, 5000, 5000), "p0"),  # unused for longest
    ],
)
def test_the_smallest_h_goes(
    sizes: tuple[int, int, int], costs: tuple[int, int, int], goes: str
) -> None:
    program, trace = three(sizes, costs)
    device_bytes = TraceIndex(trace).peak_bytes - 5 * 512
    plan = DTR().plan(trace, example_profile(), Limits(device_bytes, ENDLESS))
    dropped = [action.page for action in plan.actions if isinstance(action, Drop)]
    assert dropped == [program.numbers[goes]]
    assert plan.prediction is not None
    assert plan.prediction.replay_ns == costs[int(goes[1])]
    assert plan.prediction.lane_bytes == {}


def test_what_cannot_be_computed_again_stays() -> None:
    program = Program()
    program.page("w", 1)
    program.op("w", {"random": (10, ACT)}, is_replayable=False)
    program.op("w", {"large": (100, ACT)})
    program.free("large")
    program.op("random")
    program.free("random")
    trace = program.build()
    plan = DTR().plan(trace, example_profile(), Limits(105 * 512, ENDLESS))
    assert plan.actions == ()
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes[Tier.DEVICE] == 111 * 512


class SizedView:
    """Pages by id: (bytes, last use)."""

    operation_index = 100

    def __init__(self, pages: dict[int, tuple[int, int]]) -> None:
        self.pages = pages

    def page(self, page_id: int) -> PageView:
        nbytes, last_use = self.pages[page_id]
        return PageView(page_id, ACT, nbytes, Tier.DEVICE, False, 0, last_use)

    def evictable(self, page_id: int) -> bool:
        return True

    def frame_bytes(self, page_id: int) -> int:
        return self.pages[page_id][0]

    def next_use(self, page_id: int) -> float | None:
        return None


def test_on_demand_bytes_times_staleness_decide() -> None:
    policy = DTR()
    view = SizedView({1: (1000, 99), 2: (10, 10), 3: (400, 90)})
    for page_id in view.pages:
        policy.on_insert(page_id)
    victims = policy.choose_victims(Tier.DEVICE, 405, view)
    assert victims is not None
    assert [victim.page_id for victim in victims] == [3, 1]
    assert policy.choose_victims(Tier.DEVICE, 2000, view) is None
    policy.on_remove(3)
    victims = policy.choose_victims(Tier.DEVICE, 5, view)
    assert victims is not None
    assert victims[0].page_id == 1
