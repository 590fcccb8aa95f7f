"""The profile of this machine: from the user's cache directory, or measured and put there.

[Note: Where profiles lie]
    `$XDG_CACHE_HOME/tvm_pager`, or `~/.cache/tvm_pager`: one file `profile-<key>.json` per machine,
    software and disk (see `Identity`), and `profile-<key>-quick.json` for quick ones. A
    full profile also serves who asks for a quick one, never the other way round. Files are
    replaced whole. Of several processes that find none (one for each GPU of a job) one measures and
    the others wait for what it finds: two at a time would share the links, and keep half of their
    rates for good. A lock on the folder itself sees to it, and ends with its process.

Imports no torch before something is measured or its version is asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_pager.errors import ConfigError
from tvm_pager.observe.profile.effort import FULL, QUICK, Effort
from tvm_pager.planning.hardware.profile import HardwareProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tvm_pager.observe.profile.dispatch import MakePager

__all__ = ["cache_directory", "load_or_measure"]

_log = logging.getLogger("tvm_pager")
_SECONDS = {True: "about ten seconds", False: "up to a minute"}  # is_quick


def load_or_measure(
    make_pager: MakePager,
    *,
    torch_device: str | None = None,
    nvme: str | os.PathLike[str] | None = None,
    is_quick: bool = False,
    is_refresh: bool = False,
    may_measure: bool = True,
    effort: Effort | None = None,
    directory: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    announce: Callable[[str], None] = lambda _: None,
) -> HardwareProfile:
    """Gives this machine's profile, measuring it if there is none that can be used.

    A file that is broken or of another version is measured again and replaced, with one notice in
    the log. Blocks: milliseconds, or as `measure`, for other processes' measurements too.

    Args:
        make_pager: `tvm_pager.Pager`.
        torch_device: as in `Pager`.
        nvme: directory whose disk belongs to the profile, or None.
        is_quick: rough figures will do.
        is_refresh: measure in any case.
        may_measure: False: a profile that is not there is an error.
        effort: how much to measure, instead of what `is_quick` means.
        directory: where profiles lie; None for the user's cache directory.
        say: told of progress, a line each.
        announce: told once, before something is measured.

    Raises:
        ConfigError: the device or the directory cannot be used, or nothing may be measured.
        PagerError: see `measure`.
    """
    from tvm_pager.observe.profile.identity import identify
    from tvm_pager.observe.profile.measure import measure
    from tvm_pager.runtime.device import resolve_device

    device = resolve_device(torch_device)
    identity = identify(device, nvme)
    directory = cache_directory(os.environ) if directory is None else directory
    full, quick = (_file(directory, identity.key, is_quick) for is_quick in (False, True))
    places = () if is_refresh else (full, quick) if is_quick else (full,)
    profile = _kept(places, identity.key, say)
    if profile is not None:
        return profile
    if not may_measure:
        raise ConfigError(
            "there is no hardware profile of this machine, and it is not measured while a pager "
            "that is open takes its memory: run `tvm-pager profile`, or give Pager(profile=FILE)"
        )
    effort = effort or (QUICK if is_quick else FULL)
    with _alone(directory, say) as has_waited:
        profile = _kept(places, identity.key, say) if has_waited else None
        if profile is None:
            announce(
                f"the links and rates of this machine are measured, once, in "
                f"{_SECONDS[effort.is_quick]}, and kept in {directory}"
            )
            profile = measure(device, nvme, identity, effort, make_pager, say)
            _write(profile, quick if effort.is_quick else full)
    return profile


def cache_directory(environ: Mapping[str, str]) -> Path:
    """The folder of [Note: Where profiles lie]; relative paths in the variable do not count."""
    given = environ.get("XDG_CACHE_HOME", "")
    base = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return Path(base) / "tvm_pager"


def _file(directory: Path, key: str, is_quick: bool) -> Path:
    return directory / f"profile-{key}{'-quick' if is_quick else ''}.json"


def _kept(places: tuple[Path, ...], key: str, say: Callable[[str], None]) -> HardwareProfile | None:
    """The first usable profile; None: there is none."""
    for path in places:
        profile = _read(path, key)
        if profile is not None:
            say(f"measured {profile.machine.measured_at}, kept in {path}")
            return profile
    return None


@contextlib.contextmanager
def _alone(directory: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Keeps other processes, and threads, from measuring meanwhile, where the folder allows it.

    Gives whether it had to wait for one of them.
    """
    has_waited = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            missing = [path for path in (directory, *directory.parents) if not path.exists()]
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.callback(_remove_if_empty, missing)  # if nothing is found to be kept
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                has_waited = True
                say("another process measures this machine; waiting for what it finds")
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield has_waited


def _remove_if_empty(folders: list[Path]) -> None:
    """The innermost comes first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _read(path: Path, key: str) -> HardwareProfile | None:
    if not os.path.lexists(path):
        return None
    try:
        profile = HardwareProfile.load(path)
        if profile.machine.key != key:
            raise ConfigError(f"hardware profile {path}: of another machine")
    except ConfigError as error:
        _log.warning("%s (measured again now)", error)
        return None
    return profile


def _write(profile: HardwareProfile, path: Path) -> None:
    """Keeps a profile; where that fails the next caller measures again, and a notice says so."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        profile.save(path)
    except (ConfigError, OSError) as error:
        _log.warning("the hardware profile is not kept: %s", error)
