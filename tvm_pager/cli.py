"""The command line: `run` pages an unmodified script, `verify` compares it with a plain run.

`demo` does both with a model of its own.

Nothing here imports torch before a command needs it, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from tvm_pager import __version__
from tvm_pager.config import ENGINES
from tvm_pager.demo import DemoOptions, run_demo
from tvm_pager.errors import PagerError
from tvm_pager.estimate import command as trace_command
from tvm_pager.observe.profile import command as profile_command
from tvm_pager.observe.table import format_stats
from tvm_pager.observe.timeline import Timeline
from tvm_pager.script import Script, join_threads, report
from tvm_pager.simulation import command as simulate_command
from tvm_pager.verify import VerifyOptions, run_verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.api import Pager

__all__ = ["main"]

_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130
_PROGRAM = "tvm-pager"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Raises:
        SystemExit: after `--help` and `--version`, on a usage error, and when the script that
            `run` runs raises it; its code is then the script's own.
    """
    arguments = _build_parser().parse_args(argv)
    try:
        exit_code: int = arguments.command(arguments)
    except PagerError as error:
        return _fail(error)
    except KeyboardInterrupt:
        sys.stderr.write(f"{_PROGRAM}: interrupted\n")
        return _EXIT_INTERRUPTED
    return exit_code


def _fail(error: Exception) -> int:
    sys.stderr.write(f"{_PROGRAM}: error: {' '.join(str(error).split())}\n")
    return _EXIT_USAGE


class _Parser(argparse.ArgumentParser):
    """Says a usage error in one line, under the program's own name also for a subcommand."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USAGE, f"{_PROGRAM}: error: {message} (see {self.prog} --help)\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM, description="Tensor virtual memory for PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_verify(commands)
    _add_demo(commands)
    profile_command.add_parser(commands, _plain_pager)
    trace_command.add_parser(commands, _plain_pager)
    simulate_command.add_parser(commands)
    return parser


def _add_budgets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="SIZE", help='budget of device memory, such as "4GiB" or "50%%"'
    )
    parser.add_argument(
        "--host", metavar="SIZE", help='budget of page-locked memory, such as "16GiB"'
    )
    parser.add_argument("--nvme", metavar="DIR", help="directory of the swap file")
    parser.add_argument(
        "--policy",
        default="lookahead",
        metavar="NAME",
        help="or path/to/mine.py:Class (default: %(default)s)",
    )
    parser.add_argument(
        "--torch-device", metavar="NAME", help='"cuda", "cuda:1" or "cpu" (default: cuda if any)'
    )


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run an unmodified script with its tensors paged",
        description="Runs a script as python would, with its tensors paged.",
        allow_abbrev=False,
    )
    _add_pager_options(parser)
    parser.add_argument("--no-table", action="store_true", help="print no table at exit")
    parser.add_argument(
        "--timeline", metavar="FILE.json", help="what happened when, for ui.perfetto.dev"
    )
    _add_script(parser)
    parser.set_defaults(command=_run)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="run your script plain and paged, and name the first tensor that differs",
        description="Runs an unmodified script twice for some steps, plain and paged, each in a "
        "process of its own, and compares the bits of forward outputs, losses, buffers, gradients, "
        "weights and optimizer states at each step. A step is one optimizer.step(), or without an "
        "optimizer one call of a model. Exit code 0: equal; 1: different; 2: not compared (usage, "
        "the script fails by itself, or the budgets are too small).",
        allow_abbrev=False,
    )
    _add_pager_options(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--seed", type=int, metavar="N", help="seed random, numpy and torch first")
    parser.add_argument(
        "--no-deterministic", action="store_true", help="let torch choose its fastest kernels"
    )
    parser.add_argument(
        "--no-self-check", action="store_true", help="after a difference, do not run plain again"
    )
    parser.add_argument(
        "--trace", action="store_true", help="after a difference, look for the operation"
    )
    parser.add_argument(
        "--max-elements", type=int, default=3, metavar="N", help="differing elements to show"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the script prints")
    _add_script(parser)
    parser.set_defaults(command=_verify)


def _add_pager_options(parser: argparse.ArgumentParser) -> None:
    """Every option of `Pager`; `_pager_options` reads them back."""
    _add_budgets(parser)
    parser.add_argument(
        "--headroom", metavar="SIZE", help="device memory left free without a budget in bytes"
    )
    parser.add_argument("--nvme-bytes", metavar="SIZE", help="size of the swap file")
    parser.add_argument("--engine", default="auto", choices=ENGINES, help="who moves bytes to NVMe")
    parser.add_argument("--segment-bytes", metavar="SIZE", help="size of the pieces that move")
    parser.add_argument(
        "--check", type=int, choices=(0, 1, 2), help="0 no checks, 1 checksums, 2 invariants too"
    )
    parser.add_argument(
        "--strict", action="store_true", help="a policy's mistake is an error, not a notice"
    )
    parser.add_argument(
        "--config", metavar="FILE.json", help="options by name; those given here win"
    )


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, like python -m"
    )
    parser.add_argument("script", help="path of the script, or with -m the name of a module")
    # Everything behind the script is the script's, whatever it looks like.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train and ask a small model plainly and paged, and compare every bit",
        description="Fine-tunes SmolLM2-135M on real text and generates, in plain torch and then "
        "paged within a third of the memory, and compares every bit. Exit code 0 means equal. "
        "Percentages are of the memory that the plain run needs.",
        allow_abbrev=False,
    )
    _add_budgets(parser)
    defaults = DemoOptions()
    parser.add_argument("--steps", type=int, default=defaults.num_steps, metavar="N")
    parser.add_argument("--batch", type=int, default=defaults.batch, metavar="N")
    parser.add_argument("--seq", type=int, default=defaults.seq, metavar="N", help="tokens each")
    parser.add_argument(
        "--tokens", type=int, default=defaults.num_tokens, metavar="N", help="tokens to generate"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for tests
    # Its few steps are over before a plan can be followed.
    parser.set_defaults(command=_demo, policy="lru")


def _demo(arguments: argparse.Namespace) -> int:
    options = DemoOptions(
        device=arguments.device,
        host=arguments.host,
        nvme=arguments.nvme,
        num_steps=arguments.steps,
        batch=arguments.batch,
        seq=arguments.seq,
        num_tokens=arguments.tokens,
        torch_device=arguments.torch_device,
        seed=arguments.seed,
        policy=arguments.policy,
        json_file=arguments.json,
        is_tiny=arguments.tiny,
    )
    return run_demo(options)


def _verify(arguments: argparse.Namespace) -> int:
    options = VerifyOptions(
        script=Script(arguments.script, arguments.arguments, arguments.is_module),
        pager=_pager_options(arguments),
        config=arguments.config,
        num_steps=arguments.steps,
        seed=arguments.seed,
        is_deterministic=not arguments.no_deterministic,
        has_self_check=not arguments.no_self_check,
        has_trace=arguments.trace,
        max_elements=arguments.max_elements,
        shows_output=arguments.verbose,
    )
    return run_verify(options)


def _run(arguments: argparse.Namespace) -> int:
    script = Script(arguments.script, arguments.arguments, arguments.is_module)
    from tvm_pager.api import Pager  # torch comes with it

    with contextlib.ExitStack() as stack:
        timeline = None
        if arguments.timeline is not None:
            timeline = stack.enter_context(Timeline(arguments.timeline))
        pager = Pager(config=arguments.config, sink=timeline, **_pager_options(arguments))
        return _run_paged(script, stack.enter_context(pager), arguments)


def _run_paged(script: Script, pager: Pager, arguments: argparse.Namespace) -> int:
    threads_before = set(threading.enumerate())
    handlers_before = atexit._ncallbacks()
    try:
        exit_code = _run_script(script)
    finally:
        join_threads(threads_before)
        if not arguments.no_table:
            _print_table(pager)
        # The process is about to end, and reading everything back would be for nobody; unless the
        # script has left a handler for the exit, which may save what it trained.
        pager.close(restore=atexit._ncallbacks() > handlers_before)
    return exit_code


def _plain_pager(*, torch_device: str, host: str, policy: str) -> Pager:
    from tvm_pager.pager import plain_pager  # torch comes with it

    return plain_pager(torch_device=torch_device, host=host, policy=policy)


def _pager_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `Pager` that were given, by name."""
    names = "device headroom host nvme nvme_bytes policy torch_device engine segment_bytes check"
    names += " strict"
    options = {name: getattr(arguments, name) for name in names.split()}
    return {name: value for name, value in options.items() if value is not None}


def _run_script(script: Script) -> int:
    """Runs the script; an exception is reported as python would report it."""
    try:
        script.run()
    except SystemExit:
        raise
    except BaseException as error:
        report(error)
        return _EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else _EXIT_FAILED
    return 0


def _print_table(pager: Pager) -> None:
    sys.stdout.flush()
    try:
        table = format_stats(pager.stats())
    except (
        PagerError
    ) as error:  # the script closed it, or the disk failed: the script's fate matters more
        table = f"tvm_pager: no table: {error}"
    sys.stderr.write(table + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
