"""Pages that others hold: a hold may end at any moment while room is made, and none is missed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.model.rig import Rig
from tvm_pager.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import Page

NBYTES = 40 * 512  # two of them do not fit
MOMENTS = range(12)


@dataclass
class Work:
    """Work of others that is asked whether it is done, and does something at one of these times."""

    pages: list[Page]
    at: int
    then: Callable[[], None] = lambda: None
    ends: bool = True
    is_awaitable: bool = True
    ends_at_boundary: bool = False
    written: list[Page] = field(default_factory=list)
    num_asked: int = 0

    def done(self) -> bool:
        self.num_asked += 1
        if self.num_asked == self.at + 1:
            self.then()
        return self.ends and self.num_asked > self.at


def held_at(moment: int) -> tuple[Rig, Page]:
    rig = Rig(seed=moment)
    return rig, rig.create("held", NBYTES)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_work_that_ends_while_room_is_made_makes_room(moment: int) -> None:
    rig, page = held_at(moment)
    work = Work([page], moment)
    with rig.pager.lock:
        rig.pager.holds.add(work)
        rig.create("fresh", NBYTES)
    assert work.num_asked > moment
    assert not page.is_on_device
    rig.read("fresh")
    rig.end()


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_alias_that_dies_while_room_is_made_makes_room(moment: int) -> None:
    """The collector may find it whenever Python runs; here, where another work is looked at."""
    rig, page = held_at(moment)
    small = rig.create("small", 512)
    exports = rig.pager.dead_exports
    with rig.pager.lock:
        rig.pager.hold(page)
        work = Work([small], moment, lambda: exports.append(page), ends=False, is_awaitable=False)
        rig.pager.holds.add(work)
        try:
            rig.create("fresh", NBYTES)
            assert not page.is_on_device
        except BudgetError:
            assert work.num_asked <= moment, "the alias was dead by then"
            work.then = lambda: None
            exports.append(page)
        rig.free("small")
    rig.end()


def test_a_work_that_may_need_an_answer_is_not_waited_for() -> None:
    rig, page = held_at(0)
    work = Work([page], 1000, is_awaitable=False)
    with rig.pager.lock:
        rig.pager.holds.add(work)
        with pytest.raises(BudgetError, match="needs"):
            rig.create("fresh", NBYTES)
        work.at = 0
    rig.end()
