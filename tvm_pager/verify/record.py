"""What a run leaves behind: a record per tensor, then how the run ended. JSON lines; no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BUFFER",
    "GRADIENT",
    "INITIAL",
    "LOSS",
    "OUTPUT",
    "STATE",
    "WEIGHT",
    "Outcome",
    "Record",
    "read_lines",
    "read_outcome",
    "read_records",
    "write_line",
]

# Phases of a step, in the order in which they come.
INITIAL = "initial value"
OUTPUT = "forward output"
LOSS = "loss"
BUFFER = "buffer"
GRADIENT = "gradient"
WEIGHT = "weight"
STATE = "optimizer state"


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor, or one number, at one point of the script.

    Attributes:
        step: counted from 1.
        phase: one of the phases above.
        name: path of the parameter, buffer or output.
        dtype: without "torch."; the Python type of a number.
        shape: empty for a number.
        digest: of the bytes in logical order; for a number its text.
    """

    step: int
    phase: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    def to_list(self) -> list[Any]:
        """The fields in their order, ready for JSON."""
        return [self.step, self.phase, self.name, self.dtype, self.shape, self.digest]

    @classmethod
    def from_list(cls, values: list[Any]) -> Self:
        """Reads what `to_list` gave, after JSON."""
        step, phase, name, dtype, shape, digest = values
        return cls(step, phase, name, dtype, tuple(shape), digest)

    @property
    def place(self) -> tuple[int, str, str]:
        """Where in the run it was taken: equal places are compared."""
        return (self.step, self.phase, self.name)


@dataclass(slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        end: "stopped" (by us), "finished", "exit" (`sys.exit`), "error", "interrupted", or "died"
            where the process ended without a word.
        exit_code: of the script; with "died" that of the process, below zero for a signal.
        error: type and message of the exception.
        error_kind: "memory", "pager" (paging refused), or "script".
        num_steps: that were completed.
        num_by_phase: records by phase.
        unreadable: types of values whose bytes could not be read, and so were not compared.
        found_at: index of the record at which the run stopped: the first that differs from the
            reference, or the one that was asked for.
        is_different: whether it stopped because of a difference.
        stats: counters of the pager.
        seconds: of the whole process; the parent writes it.
    """

    end: str
    exit_code: int = 0
    error: str = ""
    error_kind: str = ""
    num_steps: int = 0
    num_by_phase: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    found_at: int | None = None
    is_different: bool = False
    stats: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def num_records(self) -> int:
        """Tensors and numbers that were recorded."""
        return sum(self.num_by_phase.values())

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return dataclasses.asdict(self)


def write_line(file: IO[bytes], value: Any) -> None:
    """Appends one line at once: neither a crash nor a fork afterwards loses or doubles it."""
    data = memoryview(json.dumps(value, separators=(",", ":")).encode() + b"\n")
    while data:
        data = data[os.write(file.fileno(), data) :]


def read_lines(file: IO[bytes]) -> Iterator[Any]:
    """Reads whole lines from the start, without moving the writer's position in the file."""
    with open(f"/proc/self/fd/{file.fileno()}", "rb") as own:
        for line in own:
            if line.endswith(b"\n"):  # else its writer was killed in the middle of it
                yield json.loads(line)


def read_records(file: IO[bytes]) -> Iterator[Record]:
    """Gives the records of a run in their order."""
    for value in read_lines(file):
        if isinstance(value, list):
            yield Record.from_list(value)


def read_outcome(file: IO[bytes]) -> Outcome | None:
    """Gives how the run ended; None where it did not live to say so."""
    for value in read_lines(file):
        if isinstance(value, dict):
            return Outcome(**value)
    return None
