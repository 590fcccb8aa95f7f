"""The NUMA node that host memory should lie on: the one that the GPU's bus hangs on.

Standard library only.

[Note: NUMA placement]
    A copy from the other socket's memory crosses the link between the sockets, which is slower and
    shared with all that the processors do. So a mapping is told its node by `mbind` before it is
    touched: the policy is the mapping's, whichever thread touches it, while that of a thread
    (`set_mempolicy`) would have to be set in each. The node is preferred, not bound: where it is
    full the next one serves.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

__all__ = ["NumaNode", "node_near"]

_ROOT = Path("/")
_MBIND = {"x86_64": 237, "aarch64": 235}.get(os.uname().machine)  # libc has no name for it
_MPOL_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_uint),
)


class NumaNode:
    """One node, preferred for memory that has not been touched yet. Thread-safe.

    Attributes:
        notices: what the user should know: that the system refused, once.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.notices: list[str] = []

    def prefer(self, address: int, nbytes: int) -> None:
        """Lets a page-aligned range be backed by the node's memory while it has some.

        Microseconds; touches nothing. A system that refuses is not asked again: the memory is then
        wherever it would have been.
        """
        if _MBIND is None or self.notices:
            return
        num_words = self.number // _WORD_BITS + 1
        mask = (ctypes.c_ulong * num_words)()
        mask[self.number // _WORD_BITS] = 1 << self.number % _WORD_BITS
        code = _LIBC.syscall(
            _MBIND,
            address,
            nbytes,
            _MPOL_PREFERRED,
            mask,
            num_words * _WORD_BITS + 1,  # the kernel takes one bit less than that
            0,
        )
        if code:
            self.notices.append(
                f"host memory could not be placed on NUMA node {self.number}, next to the GPU "
                f"({os.strerror(ctypes.get_errno())}), so copies may be slower; in a container "
                "allow the system call mbind (docker run --cap-add=SYS_NICE) and that node's memory"
            )


def node_near(bus_id: str, root: Path = _ROOT) -> NumaNode | None:
    """The node of a PCI device, or None where there is no choice: one node only, or nobody says.

    Args:
        bus_id: of the device, as the kernel writes it: "0000:3b:00.0".
        root: of the file system; another one in tests.
    """
    text = _read(root / "sys/bus/pci/devices" / bus_id / "numa_node")
    nodes = _numbers(_read(root / "sys/devices/system/node/has_memory"))
    if not text.isdecimal() or len(nodes) < 2 or int(text) not in nodes:  # "-1": unknown
        return None
    return NumaNode(int(text))


def _numbers(text: str) -> set[int]:
    """Those of a list as the kernel writes it: "0-1,4"."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
