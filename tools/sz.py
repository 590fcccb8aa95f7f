"""File sizes: lines per Python file, and a failure above the hard limit.

A file above the soft limit (400 lines) is a warning, above the hard one (450) an error: one noun
per file keeps a reader's task small. Standard library only.

    python tools/sz.py            # table of all files, the longest first
    python tools/sz.py --top 10   # the ten longest
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tvm_pager", "policies", "tests", "tools")
SOFT_LIMIT = 400  # lines
HARD_LIMIT = 450  # lines


class FileSize(NamedTuple):
    """One file, relative to the root it was found under."""

    path: Path
    num_lines: int


def measure(root: Path, folders: Sequence[str] = FOLDERS) -> list[FileSize]:
    """Lists the Python files under `folders`, the longest first; links are not followed."""
    sizes = [
        FileSize(path.relative_to(root), len(path.read_text(encoding="utf-8").splitlines()))
        for folder in folders
        for path in _python_files(root / folder)
    ]
    return sorted(sizes, key=lambda size: (-size.num_lines, size.path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; gives 1 if a file is above the hard limit, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--top", type=int, help="print that many files at most")
    options = parser.parse_args(arguments)
    sizes = measure(options.root)
    for size in sizes[: options.top]:
        print(f"{size.num_lines:6}  {size.path}")
    print(f"{sum(size.num_lines for size in sizes):6}  lines in {len(sizes)} files")
    for size in sizes:
        if size.num_lines > HARD_LIMIT:
            print(
                f"error: {size.path} has {size.num_lines} lines, the limit is {HARD_LIMIT}: split"
            )
        elif size.num_lines > SOFT_LIMIT:
            print(f"warning: {size.path} has {size.num_lines} lines, more than {SOFT_LIMIT}")
    return int(any(size.num_lines > HARD_LIMIT for size in sizes))


def _python_files(folder: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(folder):  # does not enter links: policies counts once
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


if __name__ == "__main__":
    sys.exit(main())
