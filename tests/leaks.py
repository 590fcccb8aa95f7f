"""What pagers leave behind: threads, and files that are open or have a name."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

FILE_DESCRIPTORS = Path("/proc/self/fd")

_blamed: set[threading.Thread] = set()  # left by an earlier test, which has failed for it


def pager_threads() -> list[threading.Thread]:
    """Lists the live threads that belong to a pager, by the name that each of them gets."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("tvm_pager")]


def open_files() -> set[tuple[str, str]]:
    """Lists the open files of this process as (descriptor, name), unlinked ones included."""
    found = set()
    for link in FILE_DESCRIPTORS.iterdir() if FILE_DESCRIPTORS.exists() else ():
        try:
            found.add((link.name, os.readlink(link)))
        except OSError:  # closed since, as the descriptor of this very listing is
            continue
    return found


def pager_files() -> set[tuple[str, str]]:
    """Those of `open_files` that are named as a pager's or have no name at all.

    A swap file opened with O_TMPFILE shows as "/dir/#inode (deleted)". Only the last component
    counts: the checkout itself may lie in a folder called tvm_pager.
    """
    found = set()
    for descriptor, target in open_files():
        name = os.path.basename(target)
        is_nameless = name.startswith("#") and name.endswith(" (deleted)")
        if not target.startswith("/memfd:") and ("tvm_pager" in name or is_nameless):
            found.add((descriptor, target))
    return found


def left_behind(folder: Path) -> list[str]:
    """Lists the threads, and the files in the swap directory `folder`, of pagers that are closed.

    A thread is listed once: the tests after the one that left it are not at fault.
    """
    gc.collect()
    threads = [thread for thread in pager_threads() if thread not in _blamed]
    _blamed.update(threads)
    left = [f"thread {thread.name}" for thread in threads]
    if folder.exists():
        left += [f"file {name}" for name in sorted(os.listdir(folder))]
        left += [f"open {target}" for _, target in open_files() if target.startswith(str(folder))]
    return left
