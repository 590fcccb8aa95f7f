"""What a trace holds, as a table for people. Pure text from numbers; needs numpy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tvm_pager.memory import PageKind
from tvm_pager.observe.table import format_rows
from tvm_pager.planning import Phase
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tvm_pager.planning import Trace

__all__ = ["format_trace"]


def format_trace(trace: Trace) -> str:
    """Facts, operations by phase, pages by kind, and the peak; without a newline at the end."""
    index = TraceIndex(trace)
    lines = [f"{name}: {value}" for name, value in trace.facts.items()]
    lines += format_rows(_phase_rows(trace))
    lines += format_rows(_kind_rows(trace))
    lines.append(
        f"peak if nothing leaves the device: {format_bytes(index.peak_bytes)}; largest operation: "
        f"{format_bytes(int(index.named_bytes.max(initial=0)))}; kernels: "
        f"{format_seconds(trace.compute_ns / 1e9)}"
    )
    return "\n".join(lines)


def _phase_rows(trace: Trace) -> list[list[str]]:
    rows = [["phase", "operations", "kernels"]]
    for phase in Phase:
        ops = [op for op in trace.ops if op.phase is phase]
        if ops:
            seconds = sum(op.compute_ns for op in ops) / 1e9
            rows.append([phase.name.lower(), f"{len(ops):,}", format_seconds(seconds)])
    rows.append(["all", f"{len(trace.ops):,}", format_seconds(trace.compute_ns / 1e9)])
    return rows


def _kind_rows(trace: Trace) -> list[list[str]]:
    """Pages and bytes by kind: at the beginning, and made on the way."""
    rows = [["kind", "pages", "there at the beginning", "made in the iteration"]]
    num_pages: Counter[PageKind] = Counter()
    held: Counter[PageKind] = Counter()
    made: Counter[PageKind] = Counter()
    for page in trace.pages:
        num_pages[page.kind] += 1
        (held if page.born is None else made)[page.kind] += page.frame_bytes
    rows += [
        [kind.value, f"{num_pages[kind]:,}", format_bytes(held[kind]), format_bytes(made[kind])]
        for kind in PageKind
        if num_pages[kind]
    ]
    rows.append(
        [
            "all",
            f"{len(trace.pages):,}",
            *(format_bytes(sum(nbytes.values())) for nbytes in (held, made)),
        ]
    )
    return rows
