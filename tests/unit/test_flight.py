"""Transfers in flight: what looking at them costs, and what dead pages leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.programs import FRAME, Rig
from tvm_pager.memory import Tier
from tvm_pager.transfer.ram_ticket import RamTicket

if TYPE_CHECKING:
    import pytest


def dying(num: int) -> Rig:
    """A rig whose pages have died while they were being written back, and take long."""
    rig = Rig(device=1 << 20, host=256 * FRAME, max_delay=20_000)
    for index in range(num):
        rig.create(f"p{index}", 3000)
    with rig.pager.lock:
        for index in range(num):
            rig.pager.mover.start_write_back(rig.pages[f"p{index}"])
    for index in range(num):
        rig.free(f"p{index}")
    with rig.pager.lock:
        rig.pager.drain()
    return rig


def test_looking_what_has_ended_does_not_ask_every_copy_of_a_dead_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = dying(100)
    assert len(rig.pager.table.zombies) > 90
    num_asked = 0
    done = RamTicket.done

    def counted(ticket: RamTicket) -> bool:
        nonlocal num_asked
        num_asked += 1
        return done(ticket)

    monkeypatch.setattr(RamTicket, "done", counted)
    num_left = len(rig.pager.table.zombies)
    with rig.pager.lock:
        rig.pager.flight.reap()
    assert num_asked <= 2 + 3 * (num_left - len(rig.pager.table.zombies))


def test_frames_of_dead_pages_come_back_when_their_copies_have_ended() -> None:
    rig = dying(20)
    with rig.pager.lock:
        rig.pager.flight.settle_all()
    assert rig.pager.table.zombies == []
    assert rig.pager.table.frames[Tier.HOST].used_bytes == 0
    rig.end()
