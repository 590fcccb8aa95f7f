"""Measures what this machine can do, and keeps the result: `planning.hardware.HardwareProfile`.

Raw rates on purpose: plain torch copies on streams, plain system calls. Nothing here goes through
the pager's lanes, because the lanes are judged by these figures. The block stores are measured
beside the raw disk, and the pager once, for what its dispatch costs.

    command  -> cache -> measure -> links, disk, host, compute, dispatch
                                        each repeats what it times: rounds

The first two import no torch, so that help and mistakes answer at once.
"""

from __future__ import annotations

from tvm_pager.observe.profile.cache import load_or_measure

__all__ = ["load_or_measure"]
