"""What tests of the hardware profile share: an effort so small that its figures mean nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from tvm_pager.observe.profile.effort import Effort

KIB = 1 << 10
TINY = Effort(
    is_quick=False,
    num_rounds=2,
    round_s=0.001,
    num_disk_rounds=2,
    disk_round_s=0.002,
    link_bytes=256 * KIB,
    stand_in_link_bytes=256 * KIB,
    link_round_bytes=1024 * KIB,
    link_chunks=(4 * KIB, 64 * KIB),
    disk_bytes=1024 * KIB,
    disk_chunks=(4 * KIB, 16 * KIB),
    engine_chunks=(16 * KIB,),
    num_disk_threads=2,
    matmul_size=32,
    stand_in_matmul_size=32,
    buffer_bytes=64 * KIB,
    device_buffer_bytes=64 * KIB,
    num_params=1024,
    num_device_params=1024,
    num_calls=20,
    dispatch_round_s=0.05,
    is_every_thread_count=False,
)
QUICK_TINY = dataclasses.replace(TINY, is_quick=True)


def no_pager(**_: Any) -> Any:
    """For where the cost of dispatch does not matter: a pager's first opening takes seconds."""
    return contextlib.nullcontext()
