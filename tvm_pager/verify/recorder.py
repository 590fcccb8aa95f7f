"""Writes a record per tensor, compares it with another run's, and stops the script where told."""

from __future__ import annotations

import os
from collections import Counter
from typing import IO, TYPE_CHECKING, Any

import torch

from tvm_pager.verify.record import Record, write_line
from tvm_pager.verify.tensor_bytes import describe, is_readable, parts, read_bytes
from tvm_pager.verify.watch import StopRun

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Recorder"]


class Recorder:
    """The sink of a `Watch`.

    Args:
        records: one line per record is appended.
        kept: receives the bytes of the tensor at which the script is stopped.
        reference: records of another run; the first that differs stops the script.
        keep_at: index of a record that stops the script, or None.
    """

    def __init__(
        self,
        records: IO[bytes],
        kept: IO[bytes],
        reference: Iterator[Record] | None = None,
        keep_at: int | None = None,
    ) -> None:
        self.num_by_phase: Counter[str] = Counter()
        self.unreadable: set[str] = set()
        self.found_at: int | None = None
        self.is_different = False
        self._records = records
        self._kept = kept
        self._reference = reference
        self._keep_at = keep_at

    def record(self, step: int, phase: str, name: str, value: Any) -> None:
        """Reads the value and records it. Blocks.

        Raises:
            StopRun: here is the place to stop; also at each later call, should the script go on.
        """
        for part_name, part in parts(name, value):
            self._record_part(step, phase, part_name, part)

    def _record_part(self, step: int, phase: str, name: str, value: Any) -> None:
        if self.found_at is not None:
            raise StopRun
        record = Record(step, phase, name, *describe(value))
        if not is_readable(record.digest):
            self.unreadable.add(record.dtype)
        index = self.num_by_phase.total()
        write_line(self._records, record.to_list())
        self.num_by_phase[phase] += 1
        if self._reference is not None:
            self.is_different = next(self._reference, None) != record
        if self.is_different or index == self._keep_at:
            self.found_at = index
            has_bytes = isinstance(value, torch.Tensor) and not value.is_meta
            if has_bytes and is_readable(record.digest):
                read_bytes(value, self._keep)
            raise StopRun

    def _keep(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._kept.fileno(), data) :]
