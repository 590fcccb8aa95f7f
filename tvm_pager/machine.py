"""What this machine allows: the limits on memory that budgets have to respect.

Owns no state. Imports the standard library and `errors` only. Everything is read from files below a
root, so that a test can show it a machine that it has made up; the root is "/" otherwise.

[Note: Limits on host memory]
    The least of these counts, because page-locked memory can be neither reclaimed nor swapped out:
    the physical memory; memory.max and memory.high of the process's control group and of all its
    parents (version 1: memory.limit_in_bytes, and hierarchical_memory_limit, which also knows
    parents that a container does not see); and what the process may still map (ulimit -v, -d).
    Going over a group's limit is not an error that can be caught: the kernel kills, or stalls, the
    process. The limit on locked memory (ulimit -l) is reported only: it counts what mlock() locks,
    and CUDA's driver locks memory by itself.

[Note: Where a control group is]
    /proc/self/cgroup names the group, /proc/self/mountinfo the mount and which part of the tree it
    shows. In a container the two often do not fit together: a namespace calls its own group "/",
    and without one the name is the host's while the mount shows the group itself at its top. So
    the name is taken relative to what the mount shows, and where that makes no sense the top of the
    mount is read: in a container that is the container's group.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tvm_pager.errors import ConfigError

__all__ = [
    "DeviceMemory",
    "Limit",
    "available_host_bytes",
    "check_swap_directory",
    "free_disk_bytes",
    "host_limit_bytes",
    "host_limits",
    "page_lock_limit",
]

_ROOT = Path("/")
_KIB = 1024
_NO_LIMIT_BYTES = 1 << 62  # version 1 writes "no limit" as a number a little below 2**63
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes spaces in a path


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of bytes, and what sets it, in words that fit before "is 15.00 GiB"."""

    nbytes: int
    reason: str


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes: what this process could have of it now, and all of it."""

    free_bytes: int
    total_bytes: int


class _Source(NamedTuple):
    """One limit, and how much of it is left now."""

    limit: Limit
    left: Limit


class _Names(NamedTuple):
    """How one version of control groups calls things."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]  # in memory.stat: page cache, which gives way to page-locked bytes


_V1 = _Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def host_limit_bytes(root: Path = _ROOT) -> Limit:
    """The most host memory that this process can ever have; see [Note: Limits on host memory].

    Raises:
        ConfigError: /proc cannot be read.
    """
    return min(host_limits(root), key=lambda limit: limit.nbytes)


def host_limits(root: Path = _ROOT) -> list[Limit]:
    """Every limit on host memory that is set here, the physical memory first.

    Raises:
        ConfigError: /proc cannot be read.
    """
    return [source.limit for source in _sources(root)]


def available_host_bytes(root: Path = _ROOT) -> Limit:
    """The host memory that this process could have now, page cache included.

    Raises:
        ConfigError: /proc cannot be read.
    """
    return min((source.left for source in _sources(root)), key=lambda limit: limit.nbytes)


def page_lock_limit(root: Path = _ROOT) -> Limit | None:
    """The limit on what mlock() may lock, or None; see [Note: Limits on host memory]."""
    nbytes = _read_ulimits(root).get("Max locked memory")
    return None if nbytes is None else Limit(nbytes, "the locked memory limit (ulimit -l)")


def _sources(root: Path) -> Iterator[_Source]:
    memory = _read_numbers(root / "proc/meminfo", _KIB)
    if "MemTotal" not in memory:
        raise ConfigError(
            f"host memory: {root / 'proc/meminfo'} says no MemTotal, so no host budget can be "
            f"checked; mount /proc"
        )
    physical = Limit(memory["MemTotal"], "the physical memory")
    available = memory.get("MemAvailable")
    yield _Source(
        physical,
        physical if available is None else Limit(available, "the memory that is available now"),
    )
    ulimits, status = _read_ulimits(root), _read_numbers(root / "proc/self/status", _KIB)
    for name, used, words in (
        ("Max address space", "VmSize", "the address space that is left (ulimit -v)"),
        ("Max data size", "VmData", "the private memory that is left (ulimit -d)"),
    ):
        if name in ulimits:
            limit = Limit(max(0, ulimits[name] - status.get(used, 0)), words)
            yield _Source(limit, limit)
    for directory, shown, names in _group_directories(root):
        yield from _group_sources(directory, shown, names)


def _group_sources(directory: Path, shown: PurePosixPath, names: _Names) -> Iterator[_Source]:
    statistics = _read_numbers(directory / "memory.stat", 1)
    limits = {name: _read_number(directory / name) for name in names.limits}
    if names is _V1:
        limits["hierarchical_memory_limit"] = statistics.get("hierarchical_memory_limit")
    used = (_read_number(directory / names.usage) or 0) - sum(
        statistics.get(name, 0) for name in names.reclaimable
    )
    for name, nbytes in limits.items():
        if nbytes is not None and nbytes < _NO_LIMIT_BYTES:
            words = f"{name} of the control group {shown}"
            left = max(0, nbytes - max(0, used))
            yield _Source(Limit(nbytes, words), Limit(left, f"what {words} leaves now"))


def _group_directories(root: Path) -> Iterator[tuple[Path, PurePosixPath, _Names]]:
    """The directories of the process's control groups and their parents, the innermost first.

    Each with the path that people know it by; see [Note: Where a control group is].
    """
    groups: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, group = line.partition(":")[2].partition(":")
        for controller in controllers.split(","):
            groups[controller] = group
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        where, what = mount.split(" "), filesystem.split(" ")
        if len(where) < 5 or len(what) < 3:
            continue
        if what[0] == "cgroup2":
            controller, names = "", _V2
        elif what[0] == "cgroup" and "memory" in what[2].split(","):
            controller, names = "memory", _V1
        else:
            continue
        top, point = PurePosixPath(_unescape(where[3])), PurePosixPath(_unescape(where[4]))
        inner = PurePosixPath(groups.get(controller, top))
        is_below = inner.is_relative_to(top) and ".." not in inner.parts
        shown = point / inner.relative_to(top) if is_below else point
        for path in (shown, *shown.parents):
            yield root / path.relative_to(path.anchor), path, names
            if path == point:
                break


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _read_ulimits(root: Path) -> dict[str, int]:
    """The soft limits of this process that are numbers; columns are 26 and 21 characters wide."""
    limits = {}
    for line in _read(root / "proc/self/limits").splitlines():
        value = line[26:47].strip()
        if value.isdecimal():
            limits[line[:26].strip()] = int(value)
    return limits


def _read_numbers(path: Path, unit_bytes: int) -> dict[str, int]:
    """Lines of a name (with or without a colon) and a number, such as those of /proc/meminfo."""
    numbers = {}
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            numbers[words[0].rstrip(":")] = int(words[1]) * unit_bytes
    return numbers


def _read_number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or a word such as "max"."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_swap_directory(directory: str) -> None:
    """Refuses a swap directory that is absent, not writable, or open to everyone's tampering.

    Raises:
        ConfigError: with the reason and the remedy.
    """
    try:
        mode = os.stat(directory).st_mode
    except OSError as error:
        raise ConfigError(
            f"nvme={directory!r}: {error.strerror or error}; create it (mkdir -p) or name another"
        ) from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"nvme={directory!r} is not a directory; name the one to put the file in")
    # The effective user is the one that open() will be judged by.
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(
            f"nvme={directory!r} is not writable for user {os.geteuid()}; change its owner or "
            f"mode, or name another directory"
        )
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"nvme={directory!r} has mode {stat.S_IMODE(mode):04o}: others could replace the swap "
            f"file; chmod o-w or chmod +t it, or name another directory"
        )


def free_disk_bytes(directory: str) -> int:
    """What an unprivileged process may still write there."""
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize
