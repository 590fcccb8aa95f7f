r"""Runs what a document shows, and compares what it prints.

    python tools/run_docs.py docs/policies.md            # runs, says what differs
    python tools/run_docs.py docs/policies.md --write    # and puts new output into the document

Blocks run in order, in one temporary directory. A comment before a block says what it is:

    <!-- file: mine.py -->      written to that file
    <!-- not run: reason -->    shown only

Without one, a `python` block is run by a fresh interpreter. In a `console` block each line that
begins with "$ " is a command of the shell (a "\" at its end continues it), and the others are what
it prints: "..." stands for anything, also for several lines; numbers may be off by a tenth; spaces
do not count. A command whose output is not shown may print what it likes. Other blocks are not
looked at. The exit code is 0 if everything is as shown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.1  # of a number
_TIMEOUT_S = 300.0  # per command
_COMMENT = re.compile(r"<!-- (file|not run): (.+) -->")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


class Block(NamedTuple):
    """A fenced block: lines `begin` to `end` of the document, the fences left out."""

    language: str
    lines: list[str]
    begin: int  # counted from 0
    file: str | None = None
    is_shown_only: bool = False


class Command(NamedTuple):
    """One command of a console block."""

    text: str
    output: list[str]
    begin: int  # line of the document where the output begins


class Difference(NamedTuple):
    """Something that is not as shown."""

    line: int  # of the document, counted from 1
    what: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown document, in order."""
    lines = text.splitlines()
    index, comment = 0, None
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.startswith("```"):
            begin = index
            while not lines[index].startswith("```"):
                index += 1
            kind, value = comment or ("", "")
            yield Block(
                line[3:].strip(),
                lines[begin:index],
                begin,
                value if kind == "file" else None,
                kind == "not run",
            )
            index += 1
        elif not line.strip():
            continue
        found = _COMMENT.fullmatch(line)
        comment = found.groups() if found else None


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block."""
    index, lines = 0, block.lines
    while index < len(lines):
        if not lines[index].startswith("$ "):
            raise ValueError(f"line {block.begin + index + 1}: output without a command before it")
        text = lines[index][2:]
        while text.endswith("\\"):
            index += 1
            text = text[:-1] + lines[index].lstrip("> ")
        index += 1
        begin = index
        while index < len(lines) and not lines[index].startswith("$ "):
            index += 1
        yield Command(text, lines[begin:index], block.begin + begin)


def matches(expected: Sequence[str], actual: str) -> bool:
    """Whether the output is as shown; see the module's docstring."""
    wanted = _squeezed("\n".join(expected))
    pattern = ""
    for part in re.split(r"(\.\.\.|\d[\d,]*(?:\.\d+)?)", wanted):
        if part == "...":
            pattern += ".*?"
        elif _NUMBER.fullmatch(part):
            pattern += r"(\d[\d,]*(?:\.\d+)?)"
        else:
            pattern += re.escape(part)
    found = re.fullmatch(pattern, _squeezed(actual), re.DOTALL)
    if found is None:
        return False
    numbers = zip(_NUMBER.findall(wanted.replace("...", " ")), found.groups(), strict=True)
    return all(abs(_value(a) - _value(b)) <= TOLERANCE * _value(a) for a, b in numbers)


def run(document: Path, directory: Path, *, write: bool = False) -> list[Difference]:
    """Runs all blocks of a document in a directory, and leaves there what they made.

    Args:
        document: in Markdown.
        directory: exists; a folder `.bin` is made in it.
        write: put what is printed into the document where it differs, unless "..." stands there.
    """
    text = document.read_text(encoding="utf-8")
    environment = _environment(directory)
    differences: list[Difference] = []
    new: list[tuple[Command, list[str]]] = []
    for block in blocks(text):
        if block.is_shown_only:
            continue
        if block.file is not None:
            path = directory / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(block.lines) + "\n", encoding="utf-8")
        elif block.language == "python":
            output, code = _execute([sys.executable, "-"], directory, environment, block.lines)
            if code:
                differences.append(Difference(block.begin, f"the block fails:\n{output}"))
        elif block.language == "console":
            for command in commands(block):
                output, code = _execute(["bash", "-c", command.text], directory, environment)
                if command.output and not matches(command.output, output):
                    what = f"$ {command.text}\nprints (exit code {code}):\n{output}"
                    differences.append(Difference(command.begin, what))
                    new.append((command, output.rstrip("\n").split("\n")))
                elif code and not command.output:
                    what = f"$ {command.text}\nends with exit code {code}:\n{output}"
                    differences.append(Difference(command.begin, what))
    if write:
        _replace(document, text, new)
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs documents and prints what differs; gives 1 if something does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("documents", nargs="+", type=Path, metavar="FILE.md")
    parser.add_argument("--write", action="store_true", help="put the output into the document")
    options = parser.parse_args(arguments)
    found = 0
    for document in options.documents:
        with tempfile.TemporaryDirectory() as directory:
            for line, what in run(document, Path(directory), write=options.write):
                print(f"{document}:{line}: {what}")
                found += 1
    return int(found > 0)


def _execute(
    arguments: list[str],
    directory: Path,
    environment: dict[str, str],
    lines: Sequence[str] | None = None,
) -> tuple[str, int]:
    """What a terminal would show of it, and its exit code."""
    result = subprocess.run(
        arguments,
        cwd=directory,
        env=environment,
        input="" if lines is None else "\n".join(lines) + "\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return result.stdout, result.returncode


def _environment(directory: Path) -> dict[str, str]:
    """Commands find this checkout and this interpreter, installed or not."""
    folder = directory / ".bin"
    folder.mkdir()
    for name, module in (("tvm-pager", "-m tvm_pager.cli"), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",  # what is said first comes first
    }


def _replace(document: Path, text: str, new: Sequence[tuple[Command, list[str]]]) -> None:
    lines = text.splitlines()
    for command, output in reversed(new):
        if not any("..." in line for line in command.output):
            lines[command.begin : command.begin + len(command.output)] = output
    document.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _squeezed(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.strip().splitlines())
    return "\n".join(line for line in lines if line)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


if __name__ == "__main__":
    sys.exit(main())
