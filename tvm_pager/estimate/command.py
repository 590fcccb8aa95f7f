"""`tvm-pager trace`: records a model by its configuration, without weights and without its device.

Imports neither torch nor numpy before it records. Progress goes to standard error, the table to
standard output.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import ConfigError
from tvm_pager.observe.profile import load_or_measure
from tvm_pager.planning.hardware.profile import HardwareProfile
from tvm_pager.planning.traces.trace_file import save

if TYPE_CHECKING:
    from tvm_pager.observe.profile.dispatch import MakePager
    from tvm_pager.planning import Trace

__all__ = ["add_parser", "run"]


def add_parser(commands: Any, make_pager: MakePager) -> None:
    """Adds the command to the sub-parsers of `argparse`; see `MakePager`."""
    parser = commands.add_parser(
        "trace",
        help="record a model's step from its config.json alone, without memory or a GPU",
        description="Runs training steps (or calls for inference) of a Hugging Face causal "
        "language model on tensors without bytes, and writes what they do to a trace file: "
        "operations, pages, lifetimes, and device times modelled from a hardware profile.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the model's config.json")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument("--seq", type=int, default=2048, metavar="N", help="tokens (default: 2048)")
    parser.add_argument("--out", metavar="FILE", help="trace file to write, such as m.trace.gz")
    parser.add_argument(
        "--dtype", default="bfloat16", metavar="NAME", help="of everything (default: bfloat16)"
    )
    parser.add_argument(
        "--optimizer", default="adamw", choices=("adamw", "sgd", "none"), help="none: inference"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="backward computes activations again"
    )
    parser.add_argument(
        "--profile", metavar="FILE", help="hardware profile (default: this machine's, measured)"
    )
    parser.add_argument(
        "--efficiency", type=float, metavar="X", help="share of the profile's rates that is reached"
    )
    parser.set_defaults(command=lambda arguments: run(arguments, make_pager))


def run(arguments: argparse.Namespace, make_pager: MakePager) -> int:
    """Prints what the trace holds; returns 0.

    Raises:
        ConfigError: an option cannot be used.
        TraceError: the model cannot be traced, or the file not be written.
    """
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and (out.is_dir() or not out.resolve().parent.is_dir()):
        raise ConfigError(f"--out {out}: give the name of a file in a directory that exists")
    started_s = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - started_s:5.1f} s] {line}\n")
        sys.stderr.flush()

    if arguments.profile is not None:
        profile = HardwareProfile.load(arguments.profile)
    else:
        profile = load_or_measure(make_pager, is_quick=True, say=say)
    trace = _record(arguments, profile)
    from tvm_pager.estimate.table import format_trace

    say(f"recorded {len(trace.ops):,} operations")
    sys.stdout.write(format_trace(trace) + "\n")
    if out is not None:
        save(trace, out)
        nbytes = out.stat().st_size
        say(f"wrote {out}, {nbytes / max(1, len(trace.ops)):.1f} bytes an operation")
    return 0


def _record(arguments: argparse.Namespace, profile: HardwareProfile) -> Trace:
    from tvm_pager.estimate.model_program import ModelProgram, read_config
    from tvm_pager.estimate.recording import trace

    program = ModelProgram(
        read_config(arguments.config),
        arguments.batch,
        arguments.seq,
        arguments.dtype,
        None if arguments.optimizer == "none" else arguments.optimizer,
        arguments.checkpointing,
    )
    efficiency = {} if arguments.efficiency is None else {"efficiency": arguments.efficiency}
    facts = {
        "model": f"{Path(arguments.config).name}, {program.config.get('model_type')}",
        "batch": f"{program.batch} x {program.seq} tokens",
        "dtype": program.dtype,
        "optimizer": arguments.optimizer + (", checkpointed" if arguments.checkpointing else ""),
    }
    return trace(program.build, profile, facts=facts, **efficiency)
