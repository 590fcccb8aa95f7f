"""What `bench_policies` measures, as cells of a table: real, simulated, or why not.

[Note: Bounds]
    What a policy never moves stays on the device beside the operands of each operation. A recorded
    iteration says how much that is at its fullest moment if everything else is away whenever nobody
    uses it. A policy of some kinds of pages cannot run alone below that. With somebody who moves
    the others it can: LRU, or while a plan is followed what the trace uses last. Where any of them
    left the device in a measured step, the policy is called `name+lru`.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm_pager.observe.table import format_rows
from tvm_pager.planning import HardwareProfile, Limits, PageKind, Trace, load_policy
from tvm_pager.planning.rules.absences import absences, reachable_bytes
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.simulation.bounds import least_device_bytes
from tvm_pager.simulation.simulator import SimulationOptions
from tvm_pager.simulation.sweep import sweep

__all__ = ["Block", "Cell", "bound_of", "format_cells", "kind_bytes", "simulate_cells"]

_NUM_WARM_UP, _NUM_MEASURED = 6, 3  # simulated iterations
_HEAD = ["policy", "step", "min", "spread", "out", "in", "stall", "peak", "link", "steps"]
_SIMULATED_HEAD = ["simulated", "error", "bytes", "error"]
LANES_OUT, LANES_IN = ("d2h", "d2n"), ("h2d", "n2d")


@dataclass
class Block:
    """One stretch of steps of one policy.

    Attributes:
        round: from 0.
        num_warmup: steps before the measured ones.
        is_settled: whether they were enough; see `bench_policies`.
        steps_s: of the measured steps.
        block_s: all of them, with nothing under way at both ends.
        lane_bytes: moved in them, by lane.
        stall_s: in which operations waited for faults.
        num_faults: operands that were absent.
        other_bytes: that left the device though their kinds are not the policy's.
        peak_bytes: of device memory.
        machine: what the link and a launch gave before and behind it; see `bench_policies`.
    """

    round: int
    num_warmup: int
    is_settled: bool
    steps_s: list[float]
    block_s: float
    lane_bytes: dict[str, int]
    stall_s: float
    num_faults: int
    other_bytes: int
    peak_bytes: int
    machine: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Cell:
    """One policy under one budget.

    Attributes:
        policy: its name.
        bound_bytes: the least device budget for it alone; see [Note: Bounds].
        blocks: what was measured.
        failure: why it did not run to the end.
        notices: what the pager had to say meanwhile.
        num_policy_errors: what the policy did that it may not; LRU has done it instead.
        simulated: what the simulator says; empty: nobody asked, or it refuses.
        refusal: of the simulator.
    """

    policy: str
    bound_bytes: int | None = None
    blocks: list[Block] = field(default_factory=list)
    failure: str = ""
    notices: list[str] = field(default_factory=list)
    num_policy_errors: int = 0
    simulated: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def steps_s(self) -> list[float]:
        """Of all blocks."""
        return [second for block in self.blocks for second in block.steps_s]

    @property
    def had_help(self) -> bool:
        """Whether the pager has moved what the policy does not decide about."""
        return any(block.other_bytes for block in self.blocks)

    def per_step(self, lanes: Sequence[str]) -> float:
        """Bytes of some lanes."""
        total = sum(block.lane_bytes.get(lane, 0) for block in self.blocks for lane in lanes)
        return total / max(1, len(self.steps_s))

    def figures(self) -> dict[str, Any]:
        """Everything, for JSON: seconds, bytes, fractions."""
        result: dict[str, Any] = {
            "policy": self.policy,
            "bound_bytes": self.bound_bytes,
            "had_help": self.had_help,
            "failure": self.failure,
            "notices": self.notices,
            "num_policy_errors": self.num_policy_errors,
            "blocks": [vars(block) for block in self.blocks],
        }
        steps_s = self.steps_s
        if not steps_s:
            return result
        lanes = sorted({lane for block in self.blocks for lane in block.lane_bytes})
        median_s = statistics.median(steps_s)
        result |= {
            "num_steps": len(steps_s),
            "median_s": median_s,
            "min_s": min(steps_s),
            "max_s": max(steps_s),
            "spread": (max(steps_s) - min(steps_s)) / median_s,
            "bytes_per_step": {lane: self.per_step([lane]) for lane in lanes},
            "stall_s_per_step": sum(block.stall_s for block in self.blocks) / len(steps_s),
            "other_bytes_per_step": sum(b.other_bytes for b in self.blocks) / len(steps_s),
            "faults_per_step": sum(block.num_faults for block in self.blocks) / len(steps_s),
            "device_peak_bytes": max(block.peak_bytes for block in self.blocks),
        }
        machine = [seen for block in self.blocks for seen in block.machine if seen]
        if machine:
            result |= {
                "link_bytes_per_s": min(seen["link_bytes_per_s"] for seen in machine),
                "launch_s": max(seen["launch_s"] for seen in machine),
            }
        if self.simulated:
            moved = self.per_step([*LANES_OUT, *LANES_IN])
            moved_simulated = sum(self.simulated["lane_bytes"].values())
            result["simulated"] = self.simulated | {
                "step_error": self.simulated["step_s"] / median_s - 1,
                "bytes_error": moved_simulated / moved - 1 if moved else None,
            }
        if self.refusal:
            result["refusal"] = self.refusal
        return result


def bound_of(policy: str, trace: Trace) -> int:
    """The least device budget with which the policy runs alone; see [Note: Bounds]."""
    kinds = load_policy(policy).kinds
    if kinds is None:
        return least_device_bytes(trace)
    index = TraceIndex(trace)
    return trace.overhead_bytes + reachable_bytes(index, absences(index, kinds))


def kind_bytes(trace: Trace) -> dict[str, int]:
    """Device bytes by kind at the moment that takes most if nothing ever leaves."""
    index = TraceIndex(trace)
    fullest = int(index.resident_bytes.argmax()) if len(trace.ops) else 0
    total: Counter[str] = Counter()
    for page in trace.pages:
        if (page.born or 0) <= fullest and (page.died is None or page.died > fullest):
            total[page.kind.value] += page.frame_bytes
    return {kind.value: total[kind.value] for kind in PageKind if total[kind.value]}


def simulate_cells(
    cells: Sequence[Cell],
    trace: Trace,
    hardware: HardwareProfile,
    limits: Limits,
    *,
    segment_bytes: int,
    num_jobs: int,
) -> None:
    """Fills in what the simulator predicts for cells that were measured. Blocks."""
    wanted = [cell for cell in cells if cell.blocks]
    options = SimulationOptions(
        num_iterations=_NUM_WARM_UP + _NUM_MEASURED,
        num_measured=_NUM_MEASURED,
        segment_bytes=segment_bytes,
        is_strict=False,
        is_awaited=False,  # as nobody waits for a step there
    )
    policies = [cell.policy for cell in wanted]
    outcomes = sweep(trace, hardware, policies, [limits], options, num_jobs=num_jobs)
    for cell, outcome in zip(wanted, outcomes, strict=True):
        result = outcome.result
        cell.refusal = outcome.refusal
        if result is not None:
            cell.simulated = {
                "step_s": result.step_ns / 1e9,
                "stall_s": result.stall_ns / 1e9,
                "lane_bytes": {lane: result.lane_bytes[lane] for lane in (*LANES_OUT, *LANES_IN)},
                "bound_step_s": outcome.bounds.step_ns / 1e9,
                "bound_bytes": outcome.bounds.both_bytes,
            }


def format_cells(cells: Sequence[Cell], budget_bytes: int, *, is_simulated: bool) -> str:
    """One budget's table: seconds and bytes of single steps; what did not run says why."""
    unit, size = ("GB", 1e9) if budget_bytes >= 1e9 else ("MB", 1e6)
    head = [*_HEAD, *(_SIMULATED_HEAD if is_simulated else [])]
    rows = [[unit if name == "bytes" else name for name in head]]
    reasons: dict[int, str] = {}  # by row

    def refuse(cell: Cell, reason: str) -> None:
        reasons[len(rows)] = reason
        rows.append([cell.policy, *[""] * (len(head) - 1)])

    for cell in cells:
        is_short = cell.bound_bytes is not None and cell.bound_bytes > budget_bytes
        if cell.bound_bytes is not None and is_short:
            refuse(cell, f"needs {cell.bound_bytes / size:.4g} {unit}{_kinds_text(cell.policy)}")
        if cell.steps_s:
            is_partial = load_policy(cell.policy).kinds is not None
            rows.append(_row(cell, size, is_helped=is_partial and (is_short or cell.had_help)))
            rows[-1] += _simulated_row(cell, size) if is_simulated else []
        elif not is_short:
            refuse(cell, "failed: see below" if cell.failure else "not reached")
    lines = [
        f"{line}  {reasons[number]}" if number in reasons else line
        for number, line in enumerate(format_rows(rows))
    ]
    return "\n".join([*lines, *_footnotes(cells)])


def _kinds_text(policy: str) -> str:
    kinds = load_policy(policy).kinds
    if kinds is None:
        return ""
    return f": moves {', '.join(kind.value for kind in PageKind if kind in kinds)} only"


def _row(cell: Cell, size: float, *, is_helped: bool) -> list[str]:
    figures = cell.figures()
    return [
        f"{cell.policy}+lru" if is_helped else cell.policy,
        f"{figures['median_s']:.4f}",
        f"{figures['min_s']:.4f}",
        f"{figures['spread']:.0%}",
        f"{cell.per_step(LANES_OUT) / size:.4g}",
        f"{cell.per_step(LANES_IN) / size:.4g}",
        f"{figures['stall_s_per_step']:.3f}",
        f"{figures['device_peak_bytes'] / size:.5g}",
        f"{figures['link_bytes_per_s'] / 1e9:.3g}" if "link_bytes_per_s" in figures else "-",
        f"{figures['num_steps']}",
    ]


def _simulated_row(cell: Cell, size: float) -> list[str]:
    simulated = cell.figures().get("simulated")
    if simulated is None:
        return ["refused", "", "", ""]
    error = simulated["bytes_error"]
    return [
        f"{simulated['step_s']:.4f}",
        f"{simulated['step_error']:+.1%}",
        f"{sum(simulated['lane_bytes'].values()) / size:.4g}",
        "" if error is None else f"{error:+.1%}",
    ]


def _footnotes(cells: Sequence[Cell]) -> list[str]:
    texts = [f"{cell.policy}: {cell.failure}" for cell in cells if cell.failure]
    texts += [f"{cell.policy}, simulated: {cell.refusal}" for cell in cells if cell.refusal]
    for cell in cells:
        unsettled = [block for block in cell.blocks if not block.is_settled]
        if unsettled:
            texts.append(
                f"{cell.policy}: {len(unsettled)} of {len(cell.blocks)} blocks were measured "
                f"{unsettled[0].num_warmup} steps after the switch, before it had settled"
            )
        if cell.num_policy_errors:
            texts.append(f"{cell.policy}: {cell.num_policy_errors} errors, LRU has done it instead")
        texts += [f"{cell.policy}: {notice}" for notice in cell.notices]
    return [line for text in texts for line in textwrap.wrap(text, 118, subsequent_indent="  ")]
