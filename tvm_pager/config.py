"""The options of a pager: one frozen, validated value, and the budgets that it comes to.

Owns no state. Imports the standard library, `machine`, `units` and `errors` only.

[Note: Where options come from]
    Keyword arguments beat the environment, which beats the defaults. An option left at its default
    counts as not given. A `PagerConfig` in `config=` is complete, so the environment is not read; a
    dict or a JSON file there ranks between the environment and the keyword arguments. The variable
    of an option is its name in capitals after `TVM_PAGER_`, such as `TVM_PAGER_DEVICE`. Names that
    nobody knows are refused everywhere: an option that silently does nothing is worse than none.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tvm_pager.errors import ConfigError
from tvm_pager.machine import check_swap_directory, free_disk_bytes
from tvm_pager.units import format_bytes, parse_bytes, parse_size

if TYPE_CHECKING:
    from tvm_pager.machine import DeviceMemory, Limit

__all__ = ["ENGINES", "ENVIRONMENT_PREFIX", "MIN_STAGING_BYTES", "PagerConfig", "ResolvedBudgets"]

ENGINES = ("auto", "posix", "kvikio")
ENVIRONMENT_PREFIX = "TVM_PAGER_"
# Between device and NVMe bytes pass through staging buffers, which count as host budget.
MIN_STAGING_BYTES = 256 * 1024
_DEFAULT_HOST_FRACTION = 0.5  # page-locked memory is lost to everyone else, so half at most unasked
# Of the card: CUDA loads kernels, and libraries take workspaces, after the budget is fixed.
_DEFAULT_HEADROOM_BYTES, _DEFAULT_HEADROOM_FRACTION = 512 << 20, 0.02
_SEGMENT_ALIGNMENT_BYTES = 4096  # segments start where direct I/O can
_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class ResolvedBudgets:
    """What the sizes of a `PagerConfig` come to on this machine, checked.

    Attributes:
        device_bytes: budget of the device tier; None where there is no limit and none is known.
        host_bytes: budget of page-locked memory, staging included.
        nvme_directory: absolute path of the swap file's directory, or None without that tier.
        nvme_bytes: size of the swap file as asked for, or None to let the pager decide.
        nvme_free_bytes: free space in that directory when asked; 0 without that tier.
        segment_bytes: pages move in pieces of this size.
        notices: budgets that can be used but may not be what was meant, a sentence each.
    """

    device_bytes: int | None
    host_bytes: int
    nvme_directory: str | None
    nvme_bytes: int | None
    nvme_free_bytes: int
    segment_bytes: int
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PagerConfig:
    """Every option of `tvm_pager.Pager`; see [Note: Where options come from].

    Sizes take the forms of [Note: Byte sizes] in `units` and are kept as bytes (int) or, because
    the whole is known only later, as a fraction (float).

    Attributes:
        device: budget of the device tier; a fraction is one of the memory that is free on it now,
            other processes' share and `headroom` taken off. None: all of that.
        headroom: device memory that stays free where `device` is a fraction or None, for what
            CUDA, its libraries and other programs take later; a fraction is one of the whole card.
            None: 512 MiB or 2 %, whichever is more. Without a card it means nothing.
        host: budget of page-locked memory, staging included; a fraction is one of what the machine
            allows: physical memory, control group (container), ulimit -v and -d. None: half of
            that, or of what of it is free now if that is less.
        nvme: directory for the swap file, or None for two tiers.
        nvme_bytes: size of the swap file; a fraction is one of the directory's free space. None:
            what the pages may need.
        policy: a built-in or installed policy's name, or a class, "path/to/mine.py:Mine".
        torch_device: "cuda", "cuda:1" or "cpu"; None: CUDA if there is a device, else the CPU,
            where CPU tensors under the budget stand in for it.
        engine: who moves bytes to and from NVMe: "posix", "kvikio", or "auto" for the best here.
        segment_bytes: pages move, and lie below the device, in pieces of this size.
        check: 0 nothing; 1 checksums at write-back and fetch; 2 also all invariants after each
            operation.
        strict: whether a policy that fails or decides something illegal raises `PolicyError`,
            instead of being replaced by LRU with a notice.
        profile: a hardware profile (`tvm-pager profile --json FILE`) for policies that plan. None:
            the one that was measured on this machine, or a quick measurement the first time (ten
            seconds); where CPU tensors stand in for a device, assumed figures.

    Raises:
        ConfigError: a value is not usable, whatever the machine.
    """

    device: int | float | str | None = None
    headroom: int | float | str | None = None
    host: int | float | str | None = None
    nvme: str | os.PathLike[str] | None = None
    nvme_bytes: int | float | str | None = None
    policy: str = "lookahead"
    torch_device: str | None = None
    engine: str = "auto"
    segment_bytes: int | str = "32MiB"
    check: int = 0
    strict: bool = False
    profile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Brings each value into its one form, or refuses it by the option's name."""
        for name in ("device", "headroom", "host", "nvme_bytes"):
            self._normalise_size(name)
        if self.device == 0:
            raise ConfigError(
                "device=0: without device memory nothing can run; leave it out for all"
            )
        self._set("segment_bytes", _named("segment_bytes", parse_bytes, self.segment_bytes))
        if self.segment_bytes == 0 or int(self.segment_bytes) % _SEGMENT_ALIGNMENT_BYTES:
            raise ConfigError(
                f"segment_bytes={self.segment_bytes}: a positive multiple of "
                f"{_SEGMENT_ALIGNMENT_BYTES} bytes is needed, such as '32MiB'"
            )
        if self.nvme is not None:
            self._set("nvme", os.path.expanduser(_named("nvme", os.fsdecode, self.nvme)))
        elif self.nvme_bytes is not None:
            raise ConfigError(f"nvme_bytes={self.nvme_bytes} without nvme: give the directory too")
        if self.profile is not None:
            self._set("profile", os.path.expanduser(_named("profile", os.fsdecode, self.profile)))
        for name in ("policy", "torch_device", "nvme", "profile"):
            self._check_text(name)
        if self.engine not in ENGINES:
            raise ConfigError(f"engine={self.engine!r}: known are {', '.join(ENGINES)}")
        if isinstance(self.check, bool) or self.check not in (0, 1, 2):
            raise ConfigError(f"check={self.check!r}: the levels are 0, 1 and 2")
        if not isinstance(self.strict, bool):
            raise ConfigError(f"strict={self.strict!r}: True or False is needed")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Makes a config from option names and values; what is missing keeps its default.

        Raises:
            ConfigError: a name is unknown, or a value is not usable.
        """
        _refuse_unknown(values, "option")
        return cls(**values)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a JSON file that holds one object of option names and values.

        Raises:
            ConfigError: the file cannot be read, is no JSON object, or `from_dict` refuses it.
        """
        return cls.from_dict(_read_json(path))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Makes a config from variables such as TVM_PAGER_DEVICE; empty ones count as not set.

        Raises:
            ConfigError: a variable with the prefix names no option, or its value is not usable.
        """
        return cls(**_read_environment(environ))

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, Any],
        *,
        config: PagerConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        environ: Mapping[str, str],
    ) -> Self:
        """Layers keyword arguments over `config` over the environment over the defaults.

        Args:
            options: the arguments of `Pager`; None, and a value equal to the default, is not given.
            config: as in [Note: Where options come from]; a string is the path of a JSON file.
            environ: normally `os.environ`.

        Raises:
            ConfigError: a name is unknown, or a value is not usable.
        """
        _refuse_unknown(options, "option")
        values: dict[str, Any]
        if isinstance(config, PagerConfig):
            values = config.to_dict()
        else:
            values = _read_environment(environ)
            if config is not None:
                given = config if isinstance(config, Mapping) else _read_json(config)
                _refuse_unknown(given, "option")
                values.update(given)
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, value in options.items():
            # `is` first: what compares oddly (arrays) must reach the validation, not this test.
            is_default = value is defaults[name] or (
                type(value) is type(defaults[name]) and value == defaults[name]
            )
            if value is not None and not is_default:
                values[name] = value
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Gives every option by name, ready for `from_dict` and for JSON."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Self:
        """Gives a copy with some options changed, validated again.

        Raises:
            ConfigError: a name is unknown, or a value is not usable.
        """
        _refuse_unknown(changes, "option")
        return dataclasses.replace(self, **changes)

    def resolve(
        self, device: DeviceMemory | None, host: Limit, free_host: Limit | None = None
    ) -> ResolvedBudgets:
        """Turns the sizes into bytes and checks them, and the swap directory, on this machine.

        Args:
            device: memory of the device, or None where that means nothing.
            host: the most host memory that this process can have.
            free_host: host memory that it could have now; None: not known.

        Raises:
            ConfigError: a fraction of something unknown, no device memory left, a host budget above
                what the machine allows or too small for staging, or a swap directory that cannot or
                should not be used.
        """
        segment_bytes = int(self.segment_bytes)
        device_bytes, notices = self._resolve_device(device)
        host_bytes, more = self._resolve_host(host, free_host or host)
        notices += more
        if self.nvme is None:
            return ResolvedBudgets(device_bytes, host_bytes, None, None, 0, segment_bytes, notices)
        if host_bytes < MIN_STAGING_BYTES:
            raise ConfigError(
                f"host budget of {format_bytes(host_bytes)} with nvme: bytes on their way to NVMe "
                f"pass through host memory, so at least {format_bytes(MIN_STAGING_BYTES)} is needed"
            )
        directory = os.path.abspath(self.nvme)
        check_swap_directory(directory)
        free_bytes = free_disk_bytes(directory)
        nvme_bytes = None
        if self.nvme_bytes is not None:
            nvme_bytes = _resolve("nvme_bytes", self.nvme_bytes, free_bytes)
            if nvme_bytes > free_bytes:
                raise ConfigError(
                    f"swap file of {format_bytes(nvme_bytes)}: {directory} has "
                    f"{format_bytes(free_bytes)} free; give less nvme_bytes or another directory"
                )
        return ResolvedBudgets(
            device_bytes, host_bytes, directory, nvme_bytes, free_bytes, segment_bytes, notices
        )

    def headroom_bytes(self, device: DeviceMemory) -> int:
        """Device memory that stays free; 0 for a budget in bytes, which is taken at its word."""
        if self.headroom is not None:
            return _resolve("headroom", self.headroom, device.total_bytes)
        if isinstance(self.device, int):
            return 0
        share = _resolve("headroom", _DEFAULT_HEADROOM_FRACTION, device.total_bytes)
        return max(share, _DEFAULT_HEADROOM_BYTES)

    def _resolve_device(self, device: DeviceMemory | None) -> tuple[int | None, tuple[str, ...]]:
        if device is None:
            return (None if self.device is None else _resolve("device", self.device, None)), ()
        free = f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free"
        if isinstance(self.device, int):
            if self.device <= device.free_bytes:
                return self.device, ()
            return self.device, (
                f"device budget of {format_bytes(self.device)}: the device has {free} now, so it "
                f"may run out before the budget does; pages then leave early",
            )
        headroom_bytes = self.headroom_bytes(device)
        whole_bytes = max(0, device.free_bytes - headroom_bytes)
        share = 1.0 if self.device is None else self.device
        device_bytes = _resolve("device", share, whole_bytes)
        if device_bytes == 0:
            raise ConfigError(
                f"device budget of 0 B: the device has {free}, and {format_bytes(headroom_bytes)} "
                f"of that stay free as headroom; free some memory there, or give less headroom or "
                f"a budget in bytes"
            )
        return device_bytes, ()

    def _resolve_host(self, limit: Limit, free: Limit) -> tuple[int, tuple[str, ...]]:
        if self.host is None:
            whole_bytes = min(limit.nbytes, free.nbytes)
            return _resolve("host", _DEFAULT_HOST_FRACTION, whole_bytes), ()
        host_bytes = _resolve("host", self.host, limit.nbytes)
        asked = f"host budget of {format_bytes(host_bytes)}"
        if host_bytes > limit.nbytes:
            raise ConfigError(
                f"{asked}: {limit.reason} is {format_bytes(limit.nbytes)}; give less, and keep "
                f"some for the rest of the program, or raise that limit"
            )
        if host_bytes <= free.nbytes:
            return host_bytes, ()
        return host_bytes, (
            f"{asked}: {free.reason} is {format_bytes(free.nbytes)}; page-locking more than that "
            f"makes the kernel kill processes, unless other memory is given back first",
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # for __post_init__ only: the class is frozen

    def _normalise_size(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None:
            self._set(name, _named(name, parse_size, value))

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "policy":
            return
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"{name}={value!r}: a non-empty string without NUL is needed")


def _named(name: str, parse: Any, value: object) -> Any:
    """Parses one option's value, so that an error says which option it was."""
    try:
        return parse(value)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{name}={value!r}: {error}") from None


def _resolve(name: str, size: int | float | str, whole_bytes: int | None) -> int:
    try:
        return parse_bytes(size, whole_bytes=whole_bytes)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _refuse_unknown(values: Mapping[str, Any], what: str) -> None:
    known = [field.name for field in dataclasses.fields(PagerConfig)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError(
            f"unknown {what} {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
        )


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): text.strip()
        for name, text in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX) and text.strip()
    }
    _refuse_unknown(values, f"{ENVIRONMENT_PREFIX}* variable for")
    if "check" in values and values["check"].isdecimal():
        values["check"] = int(values["check"])
    if "strict" in values:
        text = values["strict"].lower()
        if text not in _SWITCH:
            raise ConfigError(f"{ENVIRONMENT_PREFIX}STRICT={text!r}: one of {', '.join(_SWITCH)}")
        values["strict"] = _SWITCH[text]
    return values


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"config file {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: one JSON object of options is needed")
    return values
