"""The command line: `run` pages an unmodified script, `demo` shows that the numbers agree.

Nothing here imports torch before a command needs it, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import concurrent.futures.thread
import io
import os
import runpy
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tvm_pager import __version__
from tvm_pager.config import ENGINES
from tvm_pager.demo import DemoOptions, run_demo
from tvm_pager.errors import ConfigError, PagerError
from tvm_pager.observe.table import format_stats

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
    _add_demo(commands)
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
        "--policy", default="lru", metavar="NAME", help="replacement policy (default: lru)"
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
    _add_budgets(parser)
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
    parser.add_argument("--no-table", action="store_true", help="print no table at exit")
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, like python -m"
    )
    parser.add_argument("script", help="path of the script, or with -m the name of a module")
    # Everything behind the script is the script's, whatever it looks like.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(command=_run)


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
    parser.set_defaults(command=_demo)


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


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.is_module and not os.path.exists(arguments.script):
        raise ConfigError(f"{arguments.script}: no such script; with -m a module's name is meant")
    from tvm_pager.api import Pager  # torch comes with it

    names = "device host nvme nvme_bytes policy torch_device engine segment_bytes check strict"
    options = {name: getattr(arguments, name) for name in names.split()}
    given = {name: value for name, value in options.items() if value is not None}
    pager = Pager(config=arguments.config, **given)
    threads_before = set(threading.enumerate())
    with pager:
        try:
            exit_code = _run_as_main(arguments)
        finally:
            _join_threads(threads_before)
            if not arguments.no_table:
                _print_table(pager)
    return exit_code


def _run_as_main(arguments: argparse.Namespace) -> int:
    """Runs script or module as `__main__`; an exception is reported as python would report it."""
    sys.argv = [arguments.script, *arguments.arguments]
    is_plain_file = not arguments.is_module and Path(arguments.script).is_file()
    first_path = os.getcwd()
    if not arguments.is_module:
        path = Path(arguments.script).resolve()  # python follows links here
        first_path = str(path if path.is_dir() else path.parent)
    if not sys.flags.safe_path:
        # In the place of this program's own directory, which the script must not see.
        sys.path[0] = first_path
    try:
        if arguments.is_module:
            runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        elif is_plain_file and not _is_archive(arguments.script):
            _run_file(arguments.script)
        else:  # a directory or an archive with a __main__.py
            runpy.run_path(arguments.script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        return _EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else _EXIT_FAILED
    return 0


def _is_archive(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _run_file(path: str) -> None:
    """Runs one source file in a new `__main__`, which stays: pickle and exit handlers need it."""
    path = os.path.abspath(path)  # as python shows it in `__file__` and tracebacks
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _report(error: BaseException) -> None:
    """Hands an exception to the hook that python would use, without the frames of this program."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _join_threads(known: set[threading.Thread]) -> None:
    """Waits for the script's threads, as python does at its end: they may still use pages."""
    # Workers of a pool end only when python tells them to, which is later: no waiting for those.
    pooled = getattr(concurrent.futures.thread, "_threads_queues", ())
    for thread in threading.enumerate():
        is_ours = thread.name.startswith("tvm_pager") or thread in known
        if not (thread.daemon or is_ours or thread in pooled):
            thread.join()


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
