"""`tvm-pager simulate`: policies and budgets on a trace, without the machine.

Progress goes to standard error, the table to standard output.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import ConfigError
from tvm_pager.observe.timeline import Timeline
from tvm_pager.planning import HardwareProfile, Limits, load_policy
from tvm_pager.planning.traces.trace_file import load
from tvm_pager.simulation.plot import check_plotting, save_plot
from tvm_pager.simulation.table import format_outcomes, write_csv
from tvm_pager.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from tvm_pager.planning import Trace
    from tvm_pager.simulation.sweep import Outcome
    from tvm_pager.transfer.virtual_lane import Chunk

__all__ = ["add_parser", "run"]

_NUM_WARM_UP = 5  # two are recorded before a plan is followed, and then it settles


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of `argparse`."""
    parser = commands.add_parser(
        "simulate",
        help="say how fast a recorded program would be under other policies and budgets",
        description="Runs the pager on a virtual clock, fed with a trace, at the rates of a "
        "hardware profile: step time, stalls, bytes by lane and peaks of a steady iteration, "
        "beside what no policy could beat. A cell that cannot run says what it would need.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", help="a recorded iteration")
    parser.add_argument("--policy", default="lru", metavar="A,B,...", help="by name (default: lru)")
    parser.add_argument(
        "--device", required=True, metavar="SIZE,...", help='device budgets, such as "8GiB,16GiB"'
    )
    parser.add_argument(
        "--host", metavar="SIZE", help="page-locked memory, staging not counted (default: enough)"
    )
    parser.add_argument("--nvme", metavar="SIZE", help="size of the swap file (default: none)")
    parser.add_argument(
        "--engine", default="raw", metavar="NAME", help="which of the profile's disks"
    )
    parser.add_argument(
        "--profile", required=True, metavar="FILE.json", help="of `tvm-pager profile --json`"
    )
    parser.add_argument(
        "--iterations", type=int, default=3, metavar="N", help="measured, after a warm-up"
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="the host runs on at the end of an iteration, as a loop does that reads no loss",
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes")
    parser.add_argument("--csv", metavar="FILE", help="write the figures there too")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them; needs matplotlib")
    parser.add_argument(
        "--timeline",
        metavar="FILE.json",
        help="of one policy and budget: what happened when, for ui.perfetto.dev",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulates and prints; returns 0, or 1 if no cell could run.

    Raises:
        ConfigError: an option cannot be used.
        PagerError: a policy is unknown or broken.
        TraceError: the trace cannot be read.
    """
    policies = [name.strip() for name in arguments.policy.split(",") if name.strip()]
    for name in policies:
        load_policy(name)
    devices = [parse_bytes(size) for size in arguments.device.split(",") if size.strip()]
    if not policies or not devices or arguments.iterations < 1:
        raise ConfigError("at least one policy, one device budget and one iteration are needed")
    if arguments.timeline is not None and len(policies) * len(devices) > 1:
        raise ConfigError("--timeline shows one policy under one device budget; name one of each")
    if arguments.plot is not None:
        check_plotting()
    for option in ("csv", "plot", "timeline"):
        _check_directory(option, getattr(arguments, option))
    hardware = HardwareProfile.load(arguments.profile)
    trace = load(arguments.trace)
    budgets = _budgets(arguments, trace, devices)
    started_s = time.monotonic()
    outcomes = _simulate(arguments, trace, hardware, policies, budgets)
    took_s = time.monotonic() - started_s
    _print(arguments, trace, budgets, outcomes, took_s)
    return 0 if any(outcome.result is not None for outcome in outcomes) else 1


def _budgets(arguments: argparse.Namespace, trace: Trace, devices: list[int]) -> list[Limits]:
    if arguments.host is None:
        host_bytes = 4 * sum(-(-page.nbytes // 4096) * 4096 for page in trace.pages)
    else:
        host_bytes = parse_bytes(arguments.host)
    nvme_bytes = 0 if arguments.nvme is None else parse_bytes(arguments.nvme)
    return [
        Limits(device, host_bytes, nvme_bytes, disk_engine=arguments.engine) for device in devices
    ]


def _simulate(
    arguments: argparse.Namespace,
    trace: Trace,
    hardware: HardwareProfile,
    policies: list[str],
    budgets: list[Limits],
) -> list[Outcome]:
    from tvm_pager.simulation.simulator import SimulationOptions
    from tvm_pager.simulation.sweep import sweep  # numpy comes with it

    num = arguments.iterations
    options: dict[str, Any] = {
        "num_iterations": num + _NUM_WARM_UP,
        "num_measured": num,
        "is_awaited": not arguments.no_wait,
    }
    if arguments.timeline is None:
        jobs = arguments.jobs or _num_cores()
        plain = SimulationOptions(**options)
        return sweep(trace, hardware, policies, budgets, plain, num_jobs=jobs)
    with Timeline(arguments.timeline, title="tvm_pager (simulated)", has_moves=False) as timeline:

        def on_copy(chunk: Chunk, begin_ns: int, end_ns: int) -> None:
            transfer = chunk.ticket.transfer
            details = {"page": transfer.page_id, "bytes": chunk.nbytes}
            lane = transfer.lane.value
            timeline.add(lane, f"page {transfer.page_id}", begin_ns, end_ns, details)

        def on_kernel(name: str, begin_ns: int, end_ns: int) -> None:
            timeline.add("operations", name, begin_ns, end_ns)

        shown = SimulationOptions(**options, sink=timeline, on_kernel=on_kernel, on_copy=on_copy)
        return sweep(trace, hardware, policies, budgets, shown)


def _print(
    arguments: argparse.Namespace,
    trace: Trace,
    budgets: list[Limits],
    outcomes: list[Outcome],
    took_s: float,
) -> None:
    limits = budgets[0]
    nvme = f", NVMe {format_bytes(limits.nvme_bytes)}" if limits.nvme_bytes else ""
    host = "enough DRAM" if arguments.host is None else f"DRAM {format_bytes(limits.host_bytes)}"
    facts = "; ".join(f"{name} {value}" for name, value in trace.facts.items())
    title = f"{Path(arguments.trace).name}, {host}{nvme}"
    sys.stdout.write(
        f"{title}: {len(trace.ops):,} operations, {format_seconds(trace.compute_ns / 1e9)} of "
        f"kernels{f' ({facts})' if facts else ''}\n{format_outcomes(outcomes)}\n"
    )
    for notice in {text for o in outcomes if o.result is not None for text in o.result.notices}:
        sys.stdout.write(f"notice: {notice}\n")
    num_operations = sum(o.result.num_operations for o in outcomes if o.result is not None)
    sys.stderr.write(
        f"{num_operations:,} operations simulated in {format_seconds(took_s)}, bounds included\n"
    )
    if arguments.csv is not None:
        try:
            with open(arguments.csv, "w", encoding="utf-8") as file:
                write_csv(outcomes, file)
        except OSError as error:
            raise ConfigError(f"--csv {arguments.csv}: {error.strerror}") from error
    if arguments.plot is not None:
        save_plot(outcomes, arguments.plot, title)


def _check_directory(option: str, path: str | None) -> None:
    if path is None:
        return
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"--{option} {path}: there is no such directory")
    if Path(path).is_dir():
        raise ConfigError(f"--{option} {path}: a directory; give a file's name")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
