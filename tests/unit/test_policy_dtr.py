"""DTR by hand: cheap, large and long unused goes first, with a trace and without."""

from __future__ import annotations

import pytest

from tests.unit.blind_view import BlindView
from tests.unit.small_traces import ENDLESS, Program
from tvm_pager.planning import Drop, Limits, Lineage, PageKind, PageView, Tier, Trace
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


class SizedView(BlindView):
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


class TracedView(SizedView):
    """Beside that, by id: (cost in ns, whether it can be computed again, seconds unused)."""

    def __init__(
        self,
        pages: dict[int, tuple[int, int]],
        facts: dict[int, tuple[int, bool, float | None]],
    ) -> None:
        super().__init__(pages)
        self.facts = facts

    def lineage(self, page_id: int) -> Lineage | None:
        if page_id not in self.facts:
            return None
        cost_ns, is_recomputable, _ = self.facts[page_id]
        return Lineage("op", 0, cost_ns, (), is_recomputable)

    def seconds_since_use(self, page_id: int) -> float | None:
        return self.facts[page_id][2] if page_id in self.facts else None


def told(view: SizedView) -> DTR:
    policy = DTR()
    for page_id in view.pages:
        policy.on_insert(page_id)
    return policy


def order(view: SizedView) -> list[int]:
    """The pages in the order in which they would leave."""
    need_bytes = sum(view.frame_bytes(page_id) for page_id in view.pages)
    victims = told(view).choose_victims(Tier.DEVICE, need_bytes, view)
    assert victims is not None
    return [victim.page_id for victim in victims]


@pytest.mark.parametrize(
    ("nbytes", "facts"),
    [
        ((100, 100, 100), ((900, 1.0), (300, 1.0), (600, 1.0))),  # the cheaper, the sooner
        ((100, 300, 200), ((600, 1.0), (600, 1.0), (600, 1.0))),  # the larger
        ((100, 100, 100), ((600, 1.0), (600, 3.0), (600, 2.0))),  # the longer unused
        ((100, 100, 200), ((600, 1.0), (100, 2.0), (200, 1.0))),  # c / (m s): 6, 0.5, 1
    ],
)
def test_on_demand_the_smallest_h_goes_where_a_trace_is_followed(
    nbytes: tuple[int, int, int], facts: tuple[tuple[int, float], ...]
) -> None:
    pages = {i: (size, 50) for i, size in enumerate(nbytes)}
    known = {i: (cost_ns, True, seconds) for i, (cost_ns, seconds) in enumerate(facts)}
    assert order(TracedView(pages, known)) == [1, 2, 0]


def test_on_demand_what_cannot_be_computed_again_goes_last() -> None:
    pages = {0: (10**6, 1), 1: (10, 99), 2: (10**3, 1), 3: (10, 1), 4: (10, 98)}
    # 0 and 2 could not be had again, of 3 nobody knows, and of 4 not how long it was unused.
    facts = {0: (1, False, 9.0), 1: (10**9, True, 0.0), 2: (1, False, 9.0), 4: (1, True, None)}
    assert order(TracedView(pages, facts)) == [1, 0, 2, 3, 4]


def test_on_demand_and_without_a_trace_bytes_times_staleness_decide() -> None:
    view = SizedView({1: (1000, 99), 2: (10, 10), 3: (400, 90)})
    policy = told(view)
    victims = policy.choose_victims(Tier.DEVICE, 405, view)
    assert victims is not None
    assert [victim.page_id for victim in victims] == [3, 1]
    assert policy.choose_victims(Tier.DEVICE, 2000, view) is None
    policy.on_remove(3)
    victims = policy.choose_victims(Tier.DEVICE, 5, view)
    assert victims is not None
    assert victims[0].page_id == 1
