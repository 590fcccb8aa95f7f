"""How much is measured: sizes, rounds and their length. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Effort", "share_of"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_MAX_SHARE = 4  # a quarter of what is free, of any memory or disk


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes in bytes, times in seconds. What does not fit on the machine shrinks.

    Attributes:
        is_quick: whether the figures are rough.
        num_rounds: each figure is the median of as many rounds; fewer where one takes too long.
        round_s: length of a round.
        num_disk_rounds: the same for the disk, which has most of what is measured.
        disk_round_s: length of a round on the disk, which needs longer to become steady.
        link_bytes: each of the two host buffers, and of the two device buffers.
        stand_in_link_bytes: the same where CPU tensors stand in for a GPU.
        link_round_bytes: most bytes of a round, both directions together.
        link_chunks: chunk sizes on the link.
        disk_bytes: size of the file.
        disk_chunks: chunk sizes of raw disk I/O.
        engine_chunks: chunk sizes of the block stores' I/O.
        num_disk_threads: chunks in flight.
        matmul_size: rows of a square matrix on a GPU.
        stand_in_matmul_size: and where CPU tensors stand in for it.
        buffer_bytes: each buffer of a copy within host memory.
        device_buffer_bytes: each buffer of a copy within the memory of a GPU.
        num_params: parameters of an update on the host; each takes 16 bytes.
        num_device_params: and on a GPU.
        num_calls: operations of one block, for overheads.
        dispatch_round_s: about the length of a round of overheads.
        is_every_thread_count: 1, 2, 4 ... threads and all of them, instead of 1 and all.
    """

    is_quick: bool = False
    num_rounds: int = 5
    round_s: float = 0.05
    num_disk_rounds: int = 3
    disk_round_s: float = 0.2
    link_bytes: int = _GIB
    stand_in_link_bytes: int = 256 * _MIB
    link_round_bytes: int = 2 * _GIB
    link_chunks: tuple[int, ...] = (
        64 * _KIB, 256 * _KIB, _MIB, 2 * _MIB, 8 * _MIB, 32 * _MIB,
    )  # fmt: skip
    disk_bytes: int = 2 * _GIB
    disk_chunks: tuple[int, ...] = (
        64 * _KIB, 256 * _KIB, _MIB, 2 * _MIB, 8 * _MIB, 32 * _MIB,
    )  # fmt: skip
    engine_chunks: tuple[int, ...] = (_MIB, 8 * _MIB, 32 * _MIB)
    num_disk_threads: int = 4
    matmul_size: int = 8192
    stand_in_matmul_size: int = 512  # fp16 runs at 1 GFLOP/s on some processors
    buffer_bytes: int = 512 * _MIB
    device_buffer_bytes: int = _GIB
    num_params: int = 32 << 20
    num_device_params: int = 64 << 20
    num_calls: int = 1000
    dispatch_round_s: float = 0.2
    is_every_thread_count: bool = True

    def thread_counts(self, num_cores: int) -> list[int]:
        """Numbers of threads to measure with, rising, the last one `num_cores`."""
        counts = [1]
        while self.is_every_thread_count and 2 * counts[-1] < num_cores:
            counts.append(2 * counts[-1])
        return [*counts, num_cores] if num_cores > counts[-1] else counts


FULL = Effort()
QUICK = Effort(
    is_quick=True,
    num_rounds=3,
    round_s=0.02,
    num_disk_rounds=2,
    disk_round_s=0.05,
    link_bytes=128 * _MIB,
    stand_in_link_bytes=64 * _MIB,
    link_round_bytes=_GIB,
    link_chunks=(64 * _KIB, _MIB, 32 * _MIB),
    disk_bytes=256 * _MIB,
    disk_chunks=(_MIB, 8 * _MIB),
    engine_chunks=(_MIB, 8 * _MIB),
    matmul_size=4096,
    stand_in_matmul_size=256,
    buffer_bytes=128 * _MIB,
    device_buffer_bytes=256 * _MIB,
    num_params=8 << 20,
    num_device_params=16 << 20,
    num_calls=300,
    dispatch_round_s=0.1,
    is_every_thread_count=False,
)


def share_of(wanted_bytes: int, free_bytes: int, granularity: int = 4096) -> int:
    """Gives what is wanted, a quarter of what is free at most; whole granules, at least one."""
    return max(
        granularity, min(wanted_bytes, free_bytes // _MAX_SHARE) // granularity * granularity
    )
