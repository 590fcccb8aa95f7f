"""Runs every policy for real on one model, in turns, and says what each makes of a step.

    python tools/bench_policies.py --model 3.5b --budgets 36GB,20GB,14GB --host 64GiB --simulate
    python tools/bench_policies.py --model tiny --torch-device cpu --budgets 12MB --host 16MiB \
        --steps 4

For each device budget one model trains under one pager. Round after round each policy takes over
(`Pager.set_policy`), in another order each time, so that clocks and neighbours hit all alike: some
steps until it has settled, then a block of measured ones. Times are the median, the least and
(most - least) / median of single steps; `out` and `in` are GB (1e9 bytes) over the device's border
in a step, `peak` is that of the device's memory (of pages, where CPU tensors stand in for it). A
policy that cannot run says what it needs; see policy_table.py. With `--simulate` the simulator's
prediction for the iteration that was recorded here comes beside each.

[Note: Settled]
    A policy without a trace has settled after two steps. One that follows a trace has when it was
    followed from the beginning of three steps to their ends, by one and the same plan: the second
    report may make `lookahead` plan anew.

Progress goes to standard error, the tables to standard output, at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

import torch

import tvm_pager
from tools.bench_llama import MODELS, Trainer, fix_kernels, synchronise
from tools.block_meters import Clock, Others
from tools.machine_meter import MachineMeter
from tools.policy_table import Block, Cell, bound_of, format_cells, kind_bytes, simulate_cells
from tvm_pager.memory import Tier
from tvm_pager.planning import Limits, Trace, available_policies, load_policy
from tvm_pager.planning.traces.trace_file import save
from tvm_pager.units import format_bytes, parse_bytes

__all__ = ["main"]

_LEAST_WARMUP = 2
_NUM_ALIKE = 3  # see [Note: Settled]
_SLAB_REST_S = 0.5  # without growth: it is there; a region takes a third of that
_ON_DEMAND = object()


class Loop(Trainer):
    """As a user's loop, and no operation comes between an update and the next step."""

    def step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        self.losses = [loss.detach()]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bench:
    """One budget: a model, a pager, and what each policy has shown so far."""

    def __init__(self, args: argparse.Namespace, budget: str, deadline_s: float) -> None:
        self.budget_bytes = parse_bytes(budget)
        self.cells = [Cell(name) for name in args.policies]
        self.trace: Trace | None = None
        self.failure = ""  # why nothing ran
        self.left_out = ""  # what `--max-seconds` has cost
        self._args = args
        self._budget = budget
        self._deadline_s = deadline_s
        self._others = Others()
        self._pager: Any = None
        self._loop: Loop | None = None
        self._machine: MachineMeter | None = None

    def run(self) -> None:
        """Builds, measures, simulates. Blocks.

        Raises:
            PagerError: nobody can run under this budget.
        """
        args = self._args
        # The first policy plans, so that the machine is measured before anything takes memory.
        options = {"policy": "lookahead", "profile": args.profile, "nvme": args.nvme}
        options |= {"host": args.host, "torch_device": args.torch_device}
        _free_memory()
        with contextlib.ExitStack() as stack:
            if args.torch_device != "cpu":
                self._machine = stack.enter_context(MachineMeter())
            pager = tvm_pager.Pager(device=self._budget, sink=self._others, **options)
            self._pager = stack.enter_context(pager)
            self._others.table = self._pager._core.table
            started_s = time.perf_counter()
            try:
                self._loop = Loop(args)
                self._record()
                _say(f"{self._budget}: ready after {time.perf_counter() - started_s:.1f} s")
                self._measure()
            finally:
                self._loop = None
                gc.collect()  # else the pager's end brings everything back
            hardware, limits = self._pager._parts.hardware, self._limits()
            segment_bytes = self._pager._core.table.segment_bytes
        if args.simulate and self.trace is not None:
            _say(f"{self._budget}: simulating")
            simulate_cells(
                self.cells,
                self.trace,
                hardware,
                limits,
                segment_bytes=segment_bytes,
                num_jobs=args.jobs or len(os.sched_getaffinity(0)),
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        trace = self.trace
        return {
            "budget": self._budget,
            "budget_bytes": self.budget_bytes,
            "failure": self.failure,
            "left_out": self.left_out,
            "operations": 0 if trace is None else len(trace.ops),
            "compute_ns": 0 if trace is None else trace.compute_ns,
            "launch_ns": 0 if trace is None else trace.launch_ns,
            "kind_bytes": {} if trace is None else kind_bytes(trace),
            "cells": [cell.figures() for cell in self.cells],
        }

    def table(self) -> str:
        """For people."""
        held = "" if self.trace is None else _trace_text(self.trace)
        if self.failure:
            return f"{self._budget}: {self.failure}"
        lines = [f"{self._budget}{held}"]
        lines.append(format_cells(self.cells, self.budget_bytes, is_simulated=self._args.simulate))
        return "\n".join([*lines, *([self.left_out] if self.left_out else [])])

    # --- measuring -------------------------------------------------------------------------------

    def _record(self) -> None:
        """Takes an iteration down, after the first one has made the optimizer's states."""
        assert self._loop is not None
        self._loop.step()
        self._await_slab()
        self._pager.record()
        for _ in range(3):  # two are recorded; the third makes the boundary behind them
            self._loop.step()
        self.trace = self._pager.trace()
        if self.trace is None:
            return
        for cell in self.cells:
            cell.bound_bytes = bound_of(cell.policy, self.trace)
        if self._args.traces is not None:
            self._args.traces.mkdir(parents=True, exist_ok=True)
            save(self.trace, self._args.traces / f"{self._args.model}-{self._budget}.trace")

    def _await_slab(self) -> None:
        """It grows in the background, at first, and slows down what is recorded meanwhile."""
        backend, before_bytes = self._pager._backend, -1
        while backend.host_mapped_bytes != before_bytes:
            before_bytes = backend.host_mapped_bytes
            time.sleep(_SLAB_REST_S)

    def _measure(self) -> None:
        args = self._args
        num_steps = math.ceil(args.steps / args.rounds)
        round_s = 0.0
        for number in range(args.rounds):
            begun_s = time.monotonic()
            if number and begun_s + round_s > self._deadline_s:
                self._leave_out(number, f"the one before took {round_s:.0f} s")
                return
            shift = number % len(self.cells)
            for place, cell in enumerate([*self.cells[shift:], *self.cells[:shift]]):
                if cell.failure:
                    continue
                if time.monotonic() > self._deadline_s:
                    self._leave_out(number, f"{place} policies of it have run")
                    return
                _say(f"{self._budget}: round {number + 1} of {args.rounds}, {cell.policy}")
                self._run_block(cell, number, num_steps)
            round_s = time.monotonic() - begun_s

    def _leave_out(self, number: int, why: str) -> None:
        num_left = self._args.rounds - number
        self.left_out = (
            f"--max-seconds: {num_left} of {self._args.rounds} rounds were left out or cut short "
            f"({why})"
        )
        _say(f"{self._budget}: {self.left_out}")

    def _run_block(self, cell: Cell, number: int, num_steps: int) -> None:
        assert self._loop is not None
        before = self._pager.stats()
        try:
            self._others.kinds = load_policy(cell.policy).kinds
            self._pager.set_policy(cell.policy)
            num_warmup, is_settled = self._settle()
            block = self._time_steps(num_steps)
            cell.blocks.append(Block(number, num_warmup, is_settled, **block))
        except (tvm_pager.PagerError, MemoryError, torch.OutOfMemoryError) as error:
            cell.failure = f"{type(error).__name__}: {error}"
            self._loop.optimizer.zero_grad()  # what the step has left behind
        after = self._pager.stats()
        cell.num_policy_errors += after.num_policy_errors - before.num_policy_errors
        said = [text for text in after.notices[len(before.notices) :] if text not in cell.notices]
        cell.notices += said

    def _settle(self) -> tuple[int, bool]:
        """Steps until the policy has settled; gives their number, and whether it has."""
        assert self._loop is not None
        seen: list[Any] = []
        for num in range(1, self._args.max_warmup + 1):
            num_evicted = self._pager.stats().num_evictions
            self._loop.step()
            seen.append(self._followed(self._pager.stats().num_evictions - num_evicted))
            alike = seen[-_NUM_ALIKE:]
            if seen[-1] is _ON_DEMAND and num >= _LEAST_WARMUP:
                return num, True
            if len(alike) == _NUM_ALIKE and seen[-1] and all(s is seen[-1] for s in alike):
                return num, True
        return self._args.max_warmup, False

    def _followed(self, num_evictions: int) -> Any:
        """What the step just done was followed by: a plan, a trace, `_ON_DEMAND`; None: not yet."""
        iterations = self._pager._core.iterations
        follower = iterations.follower
        if follower is not None:
            return (follower.known.book or follower.known) if follower.is_over else None
        is_demand = not iterations.planner.wants_traces or not num_evictions
        return _ON_DEMAND if is_demand else None

    def _time_steps(self, num_steps: int) -> dict[str, Any]:
        """Measures one block: from a device at rest to a device at rest."""
        assert self._loop is not None
        machine = [self._look_at_machine()]
        is_cuda = self._pager.torch_device.type == "cuda"
        table = self._pager._core.table
        synchronise()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        table.device_peak_bytes = table.device_used_bytes
        before = self._pager.stats()
        self._others.nbytes = 0
        clock = Clock(is_cuda=is_cuda)
        for _ in range(num_steps):
            self._loop.step()
            clock.tick()
        steps_s, block_s = clock.stop()
        after = self._pager.stats()
        peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else after.device_peak_bytes
        return {
            "steps_s": steps_s,
            "block_s": block_s,
            "lane_bytes": {
                lane: nbytes - before.bytes_by_lane.get(lane, 0)
                for lane, nbytes in after.bytes_by_lane.items()
            },
            "stall_s": after.stall_s - before.stall_s,
            "num_faults": after.num_faults - before.num_faults,
            "other_bytes": self._others.nbytes,
            "peak_bytes": peak_bytes,
            "machine": [*machine, self._look_at_machine()],
        }

    def _look_at_machine(self) -> dict[str, float]:
        """What it gives now, before or after a block; nothing where CPU tensors stand in."""
        if self._machine is None:
            return {}
        core = self._pager._core
        with core.lock:
            core.flight.settle_all()  # else the plan's own copies share the link
        link, launch = self._machine.link_bytes_per_s(), self._machine.launch_s()
        return {"link_bytes_per_s": link, "launch_s": launch}

    def _limits(self) -> Limits:
        """What the simulator has to keep to."""
        core, frames = self._pager._core, self._pager._core.table.frames
        limits: Limits = core.iterations.planner.limits(core.table, core.budget_bytes)
        nvme_bytes = frames[Tier.NVME].capacity_bytes
        return dataclasses.replace(limits, nvme_bytes=nvme_bytes)


def _trace_text(trace: Trace) -> str:
    parts = [f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kind_bytes(trace).items()]
    return (
        f" (at the fullest operation: {', '.join(parts)}; recorded: {len(trace.ops):,} operations, "
        f"{trace.compute_ns / 1e9:.3g} s of the device, {trace.launch_ns / 1e3:.3g} us a launch)"
    )


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures budget by budget; returns 0 if under each of them something ran."""
    args = _parse(argv)
    fix_kernels()
    document: dict[str, Any] = {
        **{name: getattr(args, name) for name in ("model", "batch", "seq", "dtype", "host")},
        "policies": args.policies,
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if args.torch_device != "cpu" else "CPU",
    }
    benches: list[Bench] = []
    end_s = time.monotonic() + args.max_seconds
    for place, budget in enumerate(args.budgets):
        now_s = time.monotonic()
        bench = Bench(args, budget, now_s + (end_s - now_s) / (len(args.budgets) - place))
        try:
            bench.run()
        except (RuntimeError, MemoryError) as error:  # the other budgets still tell something
            bench.failure = f"{type(error).__name__}: {error}"
        benches.append(bench)
        document["budgets"] = [bench.to_dict() for bench in benches]
        if args.json is not None:  # after each one, so that a time limit costs one only
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        f"{args.model}: batch {args.batch} x {args.seq}, {args.dtype}, {document['device_name']}, "
        f"torch {torch.__version__}, host {args.host}\n\n"
        + "\n\n".join(bench.table() for bench in benches)
    )
    return 1 if any(bench.failure for bench in benches) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--model", choices=MODELS, default="3.5b")
    parser.add_argument("--batch", type=int, help="default: 4; tiny: 1")
    parser.add_argument("--seq", type=int, help="default: 2048; tiny: 1024")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--torch-device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--budgets", default="36GB,20GB,14GB", help="of the device, with commas")
    parser.add_argument("--host", default="60GiB", help="page-locked memory")
    parser.add_argument("--nvme", help="directory for a swap file")
    parser.add_argument("--policies", default=",".join(available_policies()), help="with commas")
    parser.add_argument("--steps", type=int, default=20, help="measured, of each policy, at least")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-warmup", type=int, default=24, help="steps before each block")
    parser.add_argument("--max-seconds", type=float, default=500, help="for all measuring")
    parser.add_argument("--profile", help="hardware profile; default: this machine's")
    parser.add_argument("--simulate", action="store_true", help="predict each cell too")
    parser.add_argument("--jobs", type=int, default=0, help="processes of the simulator")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--traces", type=Path, help="directory for the recorded iterations")
    args = parser.parse_args(argv)
    batch, seq = (1, 1024) if args.model == "tiny" else (4, 2048)
    args.batch = batch if args.batch is None else args.batch
    args.seq = seq if args.seq is None else args.seq
    args.budgets = [text for text in args.budgets.split(",") if text]
    args.policies = [text for text in args.policies.split(",") if text]
    for budget in args.budgets:
        parse_bytes(budget)  # a typing error must not cost the minutes before it
    for name in args.policies:
        load_policy(name)
    counts = (args.batch, args.seq, args.steps, args.rounds, args.max_warmup, args.max_seconds)
    if min(counts) <= 0 or not args.budgets or not args.policies:
        parser.error("budgets and policies are needed, and positive numbers")
    return args


if __name__ == "__main__":
    sys.exit(main())
