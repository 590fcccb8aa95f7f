"""The trace of a program that runs without memory."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tvm_pager.errors import TraceError
from tvm_pager.estimate.eager_masks import eager_masks
from tvm_pager.estimate.fake_log import FakeLog
from tvm_pager.estimate.op_times import DEFAULT_EFFICIENCY, OpTimes
from tvm_pager.estimate.program_hooks import ProgramHooks
from tvm_pager.estimate.steady import Iteration, difference, steady_iteration
from tvm_pager.planning import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tvm_pager.planning import HardwareProfile

__all__ = ["trace"]

_MAX_CALLS = 4


def trace(
    build: Callable[[], Callable[[], object]],
    profile: HardwareProfile,
    *,
    efficiency: float = DEFAULT_EFFICIENCY,
    facts: Mapping[str, str] | None = None,
) -> Trace:
    """Runs a training step, or an inference call, on tensors without bytes, and traces it.

    Everything that the program makes counts as device memory, whatever device it asks for, except
    scalars that torch makes of Python numbers. An iteration ends with its last `optimizer.step()`,
    or without one where the step returns. (For the pager it ends when the model is called again:
    what brings the next batch is its last operations there, and the first ones here.) The step is
    called twice, and the second time is traced, or up to four times until two in a row are alike.

    Takes about 0.2 ms of one core per operation, and the memory of the trace. Not to be called in
    two threads at a time.

    Args:
        build: makes model, optimizer and batch, all of them inside, and returns the step. The step
            must do the same each time and read no values.
        profile: of the device that the times are modelled for.
        efficiency: see `OpTimes`.
        facts: what to note in the trace beside versions and how it was recorded.

    Raises:
        TraceError: the program reads values, uses tensors made outside of `build`, or differs from
            one call of the step to the next.
    """
    updates: list[int] = []
    hooks = ProgramHooks(lambda *known: log.classify(*known), lambda: updates.append(log.tick()))
    log = FakeLog(hooks.place, OpTimes(profile, efficiency))
    try:
        with FakeTensorMode(), hooks, log:
            before, steady = _record(build, log, hooks, updates)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"the program depends on the values of a tensor ({error.func}), and without memory "
            "there are none; leave such lines out (a loss that is printed, masks that are indexed "
            "with), or record on the device"
        ) from error
    ops, pages = steady_iteration(before, steady)
    known_facts = {
        "recorded": "on fake tensors",
        "torch": torch.__version__,
        "times": f"modelled for {profile.device.name}, efficiency {efficiency:g}",
        **(facts or {}),
    }
    launch_ns = round(profile.overheads.dispatched_ns.median)
    return Trace(ops, pages, tuple(hooks.modules), launch_ns, facts=known_facts)


def _record(
    build: Callable[[], Callable[[], object]],
    log: FakeLog,
    hooks: ProgramHooks,
    updates: list[int],
) -> tuple[Iteration, Iteration]:
    """Runs the program until two iterations in a row are alike, and gives them."""
    step = build()
    boundaries = [log.tick()]
    log.is_recording = True
    found: str | None = ""
    with eager_masks():
        for _ in range(_MAX_CALLS):
            hooks.begin_iteration()
            updates.clear()
            step()
            boundaries.append(updates[-1] if updates else log.tick())
            if len(boundaries) > 2:
                before, steady = (
                    Iteration(log.ops, log.pages, *ends) for ends in pairwise(boundaries[-3:])
                )
                found = difference(before, steady)
                if found is None:
                    return before, steady
    raise TraceError(
        f"two iterations in a row differ, also after {_MAX_CALLS} of them: {found}; trace a step "
        "that does the same each time"
    )
