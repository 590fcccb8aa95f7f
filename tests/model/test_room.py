"""What was committed always finds room: no access fails for want of it, whatever is under way."""

from __future__ import annotations

import contextlib
import random

import pytest

from tests.model.rig import FRAME, Rig
from tvm_pager.errors import CommitError, TransferError

# In the last ones several pages were on their way up, with frames below, when another had to leave.
SEEDS = [*range(100), 1096, 1408, 1609, 1737, 2399, 2866, 3482]
ACTIONS = [
    "create",
    "read",
    "read",
    "write",
    "write",
    "evict",
    "fetch",
    "fetch",
    "write_back",
    "free",
]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_committed_always_finds_room(seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig(seed, host=FRAME * draw.randrange(2, 10), nvme=FRAME * draw.choice([0, 0, 2, 4]))
    with rig.pager.lock:
        for number in range(60):
            action = draw.choice(ACTIONS)
            if action == "create" or not rig.pages:
                with contextlib.suppress(CommitError):  # refused before anything has happened
                    rig.create(f"page {number}", draw.choice([512, 5000, 9000, 12000]))
                continue
            name = draw.choice(list(rig.pages))
            if action in ("evict", "write_back"):
                # Nobody needs the room, and more may be asked to leave than there is room below.
                with contextlib.suppress(TransferError):
                    getattr(rig, action)(name)
            else:
                getattr(rig, action)(name)
    rig.end()
