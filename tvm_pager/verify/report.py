"""What was found, in words. Pure: results in, lines out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_pager.child import describe_exit
from tvm_pager.observe.table import format_rows
from tvm_pager.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.verify.elements import Elements
    from tvm_pager.verify.operation import Operation, OperationDifference
    from tvm_pager.verify.record import Outcome, Record

__all__ = [
    "count",
    "format_difference",
    "format_elements",
    "format_end",
    "format_notes",
    "format_operation",
    "format_place",
    "format_run",
]

_MAX_NOTICES = 3
_PLURAL = {"loss": "losses"}


def count(number: int, noun: str) -> str:
    """Writes "1 step", "2 steps"."""
    return f"{number:,} {noun if number == 1 else _PLURAL.get(noun, noun + 's')}"


def format_run(name: str, outcome: Outcome) -> str:
    """One line: what one run did."""
    parts = [
        count(outcome.num_steps, "step"),
        count(outcome.num_records, "tensor"),
        format_seconds(outcome.seconds),
    ]
    if outcome.stats is not None:
        moved = sum(outcome.stats["bytes_by_lane"].values())
        parts.append(f"{count(outcome.stats['num_evictions'], 'eviction')}")
        parts.append(f"{format_bytes(moved)} moved")
    return f"{name:<12} {', '.join(parts)}"


def format_end(outcome: Outcome) -> str:
    """Says how a run ended, behind "the plain run"."""
    if outcome.end == "error":
        return f"raised {outcome.error}"
    if outcome.end == "exit":
        return f"called sys.exit({outcome.exit_code})"
    if outcome.end == "died":
        return f"ended without a word ({describe_exit(outcome.exit_code)})"
    if outcome.end == "interrupted":
        return "was interrupted"
    return f"ended after {count(outcome.num_steps, 'step')}"


def format_notes(paged: Outcome, num_steps: int) -> list[str]:
    """What a reader should know beside the verdict."""
    notes = []
    if paged.end != "stopped" and paged.num_steps < num_steps:
        notes.append(f"the script ended after {paged.num_steps:,} of {count(num_steps, 'step')}")
    stats = paged.stats
    if stats is not None and not stats["num_evictions"]:
        peak = format_bytes(stats["device_peak_bytes"])
        notes.append(
            f"no page ever left the device, so little was tested; pages took {peak} at most: "
            "give --device less than that"
        )
    if paged.unreadable:
        kinds = ", ".join(paged.unreadable)
        notes.append(f"the bytes of these types cannot be read and were not compared: {kinds}")
    notices: list[Any] = [] if stats is None else stats["notices"]
    return [f"note: {note}" for note in [*notes, *notices[:_MAX_NOTICES]]]


def format_difference(plain: Record | None, paged: Record | None) -> list[str]:
    """Names the first record that differs."""
    if plain is None or paged is None or plain.place != paged.place:
        return [
            "DIFFERENT: the script does something else in the two runs",
            f"  plain  {format_place(plain)}",
            f"  paged  {format_place(paged)}",
        ]
    if (plain.dtype, plain.shape) != (paged.dtype, paged.shape):
        return [
            f"DIFFERENT at step {plain.step}: {_what(plain)}",
            f"  plain  {_kind(plain.dtype, plain.shape)}",
            f"  paged  {_kind(paged.dtype, paged.shape)}",
        ]
    lines = [f"DIFFERENT at step {plain.step}: {_what(plain)}, {_kind(plain.dtype, plain.shape)}"]
    if _is_number(plain.dtype, plain.digest):
        lines += [f"  plain  {plain.digest}", f"  paged  {paged.digest}"]
    return lines


def format_elements(elements: Elements) -> list[str]:
    """Shows the first elements that differ, and the size of the difference."""
    rows = [["  index", "plain", "paged", "plain bits", "paged bits"]]
    for one in elements.first:
        index = f"  {list(one.index)}"
        rows.append([index, one.plain, one.paged, one.plain_bits, one.paged_bits])
    num_all, not_finite = elements.num_elements, ""
    if elements.num_not_finite:
        not_finite = f"; {elements.num_not_finite:,} of them inf or nan in one run at least"
    return [
        f"  different elements: {elements.num_different:,} of {num_all:,}{not_finite}",
        *format_rows(rows),
        f"  largest difference {elements.max_absolute:.3g}, relative {elements.max_relative:.3g}",
    ]


def format_operation(found: OperationDifference, step: int) -> list[str]:
    """Names the first operation that differs, and where the script called it."""
    operation = found.operation
    place = f" in module {operation.module}" if operation.module else ""
    node = f" in backward ({operation.node})" if operation.node else ""
    first = f"first operation that differs: number {found.index:,} of step {step}, "
    lines = [f"{first}{_call(operation)}{place}{node}"]
    if found.kind == "more":
        lines.append("  only the paged run has it")
    elif found.kind == "program":
        other = "no more" if found.other is None else _call(found.other)
        lines.append(f"  the paged run calls another one here: {other}")
    elif found.kind == "operand":
        lines.append(
            f"  its operand {found.position} differs before it runs, and every operation before it "
            "gave the same:"
        )
        lines.append("  the bytes changed while no operation wrote them")
    elif found.kind == "extra":
        assert found.other is not None
        lines.append(
            f"  its operand {found.position} differs; it comes from an operation that only the "
            f"paged run has: {_call(found.other)}"
        )
        return [*lines, *(f"  {line}" for line in found.other.stack)]
    else:
        lines.append(f"  its result {found.position} differs, and its operands are the same")
    return [*lines, *(f"  {line}" for line in operation.stack)]


def _call(operation: Operation) -> str:
    shown = ", ".join(_operand(*operand) for operand in operation.operands)
    return f"{operation.name}({shown})"


def _operand(dtype: str, shape: Sequence[int], digest: str) -> str:
    return digest if _is_number(dtype, digest) else _kind(dtype, shape)


def format_place(record: Record | None) -> str:
    """Says where in the script a record was taken."""
    if record is None:
        return "no more"
    return f"step {record.step}, {_what(record)}"


def _what(record: Record) -> str:
    """The phase and the name, which for a loss are the same."""
    is_said = record.name.startswith(record.phase)
    return record.name if is_said else f"{record.phase} {record.name}"


def _kind(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}" if shape else dtype


def _is_number(dtype: str, digest: str) -> bool:
    """Whether it is a number of Python's, whose text stands for a digest; "bool" may be either."""
    return dtype in ("int", "float", "complex") or digest in ("True", "False")
