"""`tvm-pager profile`: measures the machine, or shows what was measured. Imports no torch.

Progress and notices go to standard error, the table to standard output.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import ConfigError
from tvm_pager.observe.profile.cache import load_or_measure
from tvm_pager.observe.profile.table import format_profile

if TYPE_CHECKING:
    from tvm_pager.observe.profile.dispatch import MakePager

__all__ = ["add_parser", "run"]


def add_parser(commands: Any, make_pager: MakePager) -> None:
    """Adds the command to the sub-parsers of `argparse`; see `MakePager`."""
    parser = commands.add_parser(
        "profile",
        help="measure what this machine can do",
        description="Measures links, disk, host and device, each alone, in at most a minute, and "
        "keeps the figures for the planner in the user's cache directory. Shows the kept ones "
        "where there are any.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--torch-device", metavar="NAME", help='"cuda", "cuda:1" or "cpu" (default: cuda if any)'
    )
    parser.add_argument("--nvme", metavar="DIR", help="directory on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="rough figures, in ten seconds")
    parser.add_argument("--json", metavar="FILE", help="write the profile there too")
    parser.add_argument("--refresh", action="store_true", help="measure again, whatever is kept")
    parser.set_defaults(command=lambda arguments: run(arguments, make_pager))


def run(arguments: argparse.Namespace, make_pager: MakePager) -> int:
    """Prints the profile; returns 0.

    Raises:
        ConfigError: an option cannot be used.
        PagerError: the measurement failed.
    """
    json_file = None if arguments.json is None else Path(arguments.json)
    if json_file is not None:
        if not json_file.resolve().parent.is_dir():
            raise ConfigError(f"--json {json_file}: there is no such directory")
        if json_file.is_dir():
            raise ConfigError(f"--json {json_file}: a directory; give a file's name")
    if arguments.nvme is not None and not Path(arguments.nvme).is_dir():
        raise ConfigError(f"--nvme {arguments.nvme}: not a directory; create it or name another")
    started_s = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - started_s:5.1f} s] {line}\n")
        sys.stderr.flush()

    profile = load_or_measure(
        make_pager,
        torch_device=arguments.torch_device,
        nvme=arguments.nvme,
        is_quick=arguments.quick,
        is_refresh=arguments.refresh,
        say=say,
    )
    sys.stdout.write(format_profile(profile) + "\n")
    if json_file is not None:
        try:
            json_file.write_text(profile.to_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: {error.strerror}") from error
    return 0
