"""Which machine and software this is, and the key that its profile is kept under."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tvm_pager.errors import ConfigError

__all__ = [
    "Identity",
    "cpu_name",
    "identify",
    "num_cores",
    "num_numa_nodes",
]

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CPU_FILE = Path("/proc/cpuinfo")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal for figures to be used again."""

    torch_device: str
    device_names: tuple[str, ...]
    driver: str | None
    torch_version: str
    cuda_version: str | None
    cpu_name: str
    num_cores: int
    nvme_device: str | None

    @property
    def key(self) -> str:
        """A short name that differs as soon as one of the fields does."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def identify(device: torch.device, nvme: str | os.PathLike[str] | None) -> Identity:
    """Says which machine this is. Starts CUDA if there is any.

    Raises:
        ConfigError: there is no such directory.
    """
    num_devices = torch.cuda.device_count() if device.type == "cuda" else 0
    return Identity(
        torch_device=str(device),
        device_names=tuple(torch.cuda.get_device_name(index) for index in range(num_devices)),
        driver=_driver() if num_devices else None,
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        cpu_name=cpu_name(),
        num_cores=num_cores(),
        nvme_device=None if nvme is None else _device_of(nvme),
    )


def num_cores() -> int:
    """Logical processors that this process may use."""
    return len(os.sched_getaffinity(0))


def num_numa_nodes(nodes: Path = _NODES) -> int | None:
    """Memory nodes of the machine; None where the system does not say."""
    try:
        found = [entry for entry in nodes.iterdir() if re.fullmatch(r"node\d+", entry.name)]
    except OSError:
        return None
    return len(found) or None


def cpu_name(file: Path = _CPU_FILE) -> str:
    """What the processor calls itself, or the architecture where it does not say."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", file.read_text("utf-8", "replace"), re.M)
        if match:
            return match[1].strip()
    return platform.machine()


def _driver() -> str | None:
    """Version of NVIDIA's kernel module; else the CUDA version that the driver speaks."""
    with contextlib.suppress(OSError):
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text("utf-8", "replace"))
        if match:
            return match[0]
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if ask is None else f"CUDA {ask()}"


def _device_of(directory: str | os.PathLike[str]) -> str:
    try:
        number = os.stat(directory).st_dev
    except OSError as error:
        raise ConfigError(
            f"--nvme {os.fspath(directory)}: {error.strerror}; create it or name another"
        ) from error
    return f"{os.major(number)}:{os.minor(number)}"
