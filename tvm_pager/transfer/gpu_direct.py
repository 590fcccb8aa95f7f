"""Whether the disk and the device can reach each other without host memory: GPUDirect Storage.

[Note: Asking safely]
    cuFile has been seen to crash in virtual machines and to spin for ever without a driver, so it
    is asked in a child process with a time limit, and only where the kernel shows a part that it
    needs: the nvidia-fs module, or a cuFile configuration that names PCI peer-to-peer. What it says
    is not believed either: both routes are measured when the pager opens its swap file.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["is_offered"]

_MODULE = Path("/proc/driver/nvidia-fs/version")
_CONFIGURATIONS = ("CUFILE_ENV_PATH_JSON", Path("/etc/cufile.json"))
_QUESTION = "import kvikio.cufile_driver as driver; print(bool(driver.get('is_gds_available')))"
_LIMIT_S = 20.0


@functools.cache
def is_offered() -> tuple[bool, str]:
    """Whether cuFile says that it can do it here, and if not, why. The first call may take 2 s."""
    if not _MODULE.exists() and not _names_peer_to_peer():
        return False, "neither nvidia-fs nor PCI peer-to-peer is set up"
    environment = os.environ | {"KVIKIO_COMPAT_MODE": "AUTO"}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _QUESTION],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"asking cuFile failed ({error})"
    if answer.returncode:
        return (
            False,
            f"asking cuFile ended with {answer.returncode}: {answer.stderr.strip()[-200:]}",
        )
    return answer.stdout.strip() == "True", "cuFile says no"


def _names_peer_to_peer() -> bool:
    for place in _CONFIGURATIONS:
        path = Path(os.environ.get(place, "")) if isinstance(place, str) else place
        try:
            if path.is_file() and '"use_pci_p2pdma": true' in path.read_text(encoding="utf-8"):
                return True
        except (OSError, UnicodeDecodeError):
            continue
    return False
