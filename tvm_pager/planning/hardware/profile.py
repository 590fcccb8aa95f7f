"""The hardware profile: what a machine can do, as numbers that planner and simulator compute with.

Pure values. `tvm_pager/observe/profile/` measures them, docs/performance.md says what each means.

[Note: Files]
    One JSON object with a version. The version changes when a field comes, goes or changes its
    meaning; files of another version are refused, not converted: measuring takes a minute. Floats
    are written so that they come back exactly.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tvm_pager.errors import ConfigError
from tvm_pager.planning.hardware.decoding import decode
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate  # noqa: TC001  # read by `decode`
from tvm_pager.planning.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PROFILE_VERSION",
    "DeviceRates",
    "DiskRates",
    "HardwareProfile",
    "HostRates",
    "MachineFacts",
    "MatmulRates",
    "Overheads",
]

PROFILE_VERSION = 1
_REMEDY = "measure it with `tvm-pager profile --refresh`"


@dataclass(frozen=True, slots=True)
class DiskRates:
    """One way to one disk.

    Attributes:
        engine: "raw" (system calls and nothing else), or the block store: "posix", "kvikio".
        io: "direct", or "buffered" where the file system refuses direct I/O.
        num_threads: chunks in flight at a time; latencies are what a chunk adds at that depth.
        read: from the disk to host memory. Duplex means: while as many threads write.
        write: from host memory to the disk; likewise.
        duplex_total_bytes_per_s: both together.
    """

    engine: str
    io: str
    num_threads: int
    read: LinkRate
    write: LinkRate
    duplex_total_bytes_per_s: Figure

    def __post_init__(self) -> None:
        _check_counts(self, "num_threads")


@dataclass(frozen=True, slots=True)
class HostRates:
    """The host's memory and processors. Curves are by number of threads.

    Attributes:
        cpu_name: what the processor calls itself.
        num_cores: logical processors that this process may use.
        num_numa_nodes: None where the system does not say.
        physical_bytes: memory of the machine, or of the container if that is less.
        available_bytes: what of it was free when measuring began.
        memcpy_bytes_per_s: copies within host memory; bytes are counted once.
        adamw_params_per_s: torch's fused AdamW, everything in fp32.
        bf16_to_fp32_per_s: casts; elements/s.
        fp32_to_bf16_per_s: casts; elements/s.
    """

    cpu_name: str
    num_cores: int
    num_numa_nodes: int | None
    physical_bytes: int
    available_bytes: int
    memcpy_bytes_per_s: Curve
    adamw_params_per_s: Curve
    bf16_to_fp32_per_s: Curve
    fp32_to_bf16_per_s: Curve

    def __post_init__(self) -> None:
        _check_counts(self, "num_cores", "physical_bytes", "available_bytes")


@dataclass(frozen=True, slots=True)
class MatmulRates:
    """Square matrix products by dtype, in floating point operations/s (2 n^3 each)."""

    fp32: Figure
    tf32: Figure | None  # None where the device has no such mode
    bf16: Figure
    fp16: Figure


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The device.

    Attributes:
        name: of the device model; of the processor for a stand-in.
        is_stand_in: CPU tensors stood in for a device; nothing here says what a GPU would do.
        total_bytes: of device memory.
        free_bytes: of it when measuring began.
        matmul_flop_per_s: by dtype.
        copy_bytes_per_s: copies within device memory; bytes are counted once.
        adamw_params_per_s: torch's fused AdamW, everything in fp32.
    """

    name: str
    is_stand_in: bool
    total_bytes: int
    free_bytes: int
    matmul_flop_per_s: MatmulRates
    copy_bytes_per_s: Figure
    adamw_params_per_s: Figure

    def __post_init__(self) -> None:
        _check_counts(self, "total_bytes", "free_bytes")


@dataclass(frozen=True, slots=True)
class Overheads:
    """What the launching thread pays, in nanoseconds a call.

    Attributes:
        launch_ns: issuing a plain eager operation on 64 elements.
        dispatched_ns: the same on resident pages.
        empty_h2d_ns: a copy of one byte to the device, issued and waited for.
        empty_d2h_ns: and from it.
    """

    launch_ns: Figure
    dispatched_ns: Figure
    empty_h2d_ns: Figure
    empty_d2h_ns: Figure


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Which machine and which software the figures belong to, and how they came about."""

    key: str  # equal keys: the figures can be used again
    device_names: tuple[str, ...]  # every visible GPU; empty without any
    driver: str | None
    torch_version: str
    cuda_version: str | None
    python_version: str
    kernel: str
    nvme_device: str | None  # the device that the directory lies on, as major:minor
    measured_at: str  # UTC, ISO 8601
    measure_s: float
    is_quick: bool


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Everything that was measured on one machine; see [Note: Files] for its JSON form.

    Attributes:
        machine: which machine, when, how long.
        device: the device's memory and arithmetic.
        host: the host's.
        overheads: of single calls.
        h2d: page-locked host memory to device.
        d2h: device to page-locked host memory.
        duplex_total_bytes_per_s: both directions together, by chunk size.
        disks: one entry per engine; empty if no directory was given.
        notices: what people should know of this measurement.
    """

    machine: MachineFacts
    device: DeviceRates
    host: HostRates
    overheads: Overheads
    h2d: LinkRate
    d2h: LinkRate
    duplex_total_bytes_per_s: Curve
    disks: tuple[DiskRates, ...] = ()
    notices: tuple[str, ...] = ()

    def disk(self, engine: str) -> DiskRates:
        """The rates of one engine: "raw", "posix" or "kvikio".

        Raises:
            ConfigError: it was not measured.
        """
        for disk in self.disks:
            if disk.engine == engine:
                return disk
        known = ", ".join(disk.engine for disk in self.disks) or "none"
        raise ConfigError(
            f"the hardware profile has no disk engine {engine!r}, measured were: {known}; measure "
            f"with `tvm-pager profile --nvme DIR`"
        )

    def to_json(self) -> str:
        """The profile as JSON text, with a newline at the end."""
        return json.dumps({"version": PROFILE_VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_json` wrote and `json.loads` read.

        Raises:
            ConfigError: another version, or a field is missing, unknown, or impossible.
        """
        version = values.get("version")
        if version != PROFILE_VERSION or isinstance(version, bool):
            raise ConfigError(f"version {version}, but {PROFILE_VERSION} is needed; {_REMEDY}")
        fields = {name: value for name, value in values.items() if name != "version"}
        try:
            profile: Self = decode(cls, fields)
        except ValueError as error:
            raise ConfigError(f"{error}; {_REMEDY}") from error
        return profile

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the text of a profile.

        Raises:
            ConfigError: it is no JSON object, or `from_dict` refuses it.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON ({error}); {_REMEDY}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"one JSON object is needed; {_REMEDY}")
        return cls.from_dict(values)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a profile from a file.

        Raises:
            ConfigError: the file cannot be read, or holds no profile of this version.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read())
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"hardware profile {path}: {reason}; {_REMEDY}") from error
        except ValueError as error:  # bytes that are no UTF-8 too
            raise ConfigError(f"hardware profile {path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file of mode 0600, which holds all of it or is the old one.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            write_whole(path, self.to_json().encode())
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"hardware profile {path} cannot be written: {reason}") from error


def _check_counts(owner: Any, *names: str) -> None:
    for name in names:
        if getattr(owner, name) < 1:
            raise ValueError(f"{name}={getattr(owner, name)} must be at least 1")
