"""Records one iteration as a `planning.Trace`. Under the pager's lock.

[Note: Numbering]
    Numbers go by first mention: operation by operation, its operands in order, then what it
    creates. So two iterations in which a program does the same have the same numbers, and the same
    first operations have the same numbers whatever follows. Pages that no operation mentions come
    last, in the order of their birth.
    What is born between two operations counts as created by the first of them: page ids rise, so
    births and their order are seen without asking the operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tvm_pager.planning.traces.recorded import in_order_of_mention, with_learned_kinds
from tvm_pager.planning.traces.trace import Phase, Trace, TraceOp, TracePage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tvm_pager.memory import Page, PageTable

__all__ = ["MAX_OPERATIONS", "Entry", "Origin", "Recorder", "Recording"]

MAX_OPERATIONS = 200_000  # of one iteration; their entries take 0.2 GB

# What created a page: the trace of the iteration before, and the page's number there.
Origin: TypeAlias = tuple[int, int]


@dataclass(slots=True, eq=False)
class PageRecord:
    """One page of an iteration that is being recorded."""

    page: Page | None  # None: gone before anybody looked; `known` says what it was
    known: TracePage | None = None
    born: Entry | None = None
    is_dead: bool = False
    died_after: Entry | None = None  # None: before the first one
    dtype: str = ""
    number: int = -1


@dataclass(slots=True, eq=False)
class Entry:
    """One operation that is being recorded.

    Attributes:
        name: as torch calls it.
        operands: as passed; one that is named twice comes twice.
        writes: those whose bytes it changes.
        creates: what is born in it.
        begun_ns: host clock at its beginning; 0: not known.
        excess_ns: what of the time up to the next operation were waits for bytes or room, and the
            recording itself.
        compute_ns: device time, or who is asked for it when the iteration is over.
        workspace_bytes: device memory beside operands and results.
        phase: part of the iteration.
        module: dotted path; "" if unknown.
        is_replayable: see `TraceOp`.
    """

    name: str
    operands: list[PageRecord]
    writes: list[PageRecord] = field(default_factory=list)
    creates: list[PageRecord] = field(default_factory=list)
    begun_ns: int = 0
    excess_ns: int = 0
    compute_ns: int | Callable[[], int] = 0
    workspace_bytes: int = 0
    phase: Phase = Phase.OTHER
    module: str = ""
    is_replayable: bool = False
    index: int = -1


class Recording(NamedTuple):
    """What a recorder gives.

    Attributes:
        trace: the iteration. `becomes` is set for what lives through it only.
        operands: of each operation, page numbers as passed.
        numbers: by page id.
        carried: numbers of the pages that the iteration before has created, by their origin.
        num_mentioned: the pages with smaller numbers are named by some operation.
    """

    trace: Trace
    operands: tuple[tuple[int, ...], ...]
    numbers: dict[int, int]
    carried: dict[Origin, int]
    num_mentioned: int


class Recorder:
    """Takes down operations, births and deaths from now on; see [Note: Numbering].

    Args:
        table: whose pages.
        clock: nanoseconds of the host.
        origins: of the pages that the iteration before has created, by page id.
    """

    def __init__(
        self, table: PageTable, clock: Callable[[], int], origins: Mapping[int, Origin]
    ) -> None:
        self.entries: list[Entry] = []
        self.overhead_bytes = 0
        self._table = table
        self._clock = clock
        self._origins = origins
        self._alive = dict(table.pages)  # when it began
        self._records: dict[int, PageRecord] = {}  # of pages that something happened to
        self._anonymous: list[PageRecord] = []
        self._next_id = table.num_created

    @property
    def is_full(self) -> bool:
        """Whether the iteration is too long to be recorded."""
        return len(self.entries) >= MAX_OPERATIONS

    # --- while the iteration runs ----------------------------------------------------------------

    def begin(self, name: str, pages: Sequence[Page], written: Sequence[Page] = ()) -> Entry:
        """An operation begins; what it creates is seen when the next one does.

        Args:
            name: as torch calls it.
            pages: its operands, as passed.
            written: those of them whose bytes it changes.
        """
        begun_ns = self._clock()
        self._look_at_births()
        entry = Entry(name, [self._record_of(page) for page in pages], begun_ns=begun_ns)
        entry.writes = [self._record_of(page) for page in written]
        self.entries.append(entry)
        entry.excess_ns = self._clock() - begun_ns
        return entry

    def waited(self, nanoseconds: int) -> None:
        """The operation that has begun last has waited for bytes or room."""
        if self.entries:
            self.entries[-1].excess_ns += nanoseconds

    def died(self, page: Page) -> None:
        """The page's last tensor is gone."""
        self._look_at_births()
        record = self._record_of(page)
        record.page, record.is_dead = page, True
        record.died_after = self.entries[-1] if self.entries else None

    def recall(
        self,
        trace: Trace,
        operands: Sequence[tuple[int, ...]],
        pages: Sequence[Page | None],
        index: int,
    ) -> None:
        """Puts the first `index` operations of a trace before what was recorded.

        What the trace says of them stands for what they did.

        Args:
            trace: which.
            operands: its operations' page numbers, as passed.
            pages: what its pages were, by number, when the recorder began; None: none, or gone.
            index: the number of operations.
        """
        entries = [_recalled(trace, op) for op in trace.ops[:index]]
        last = entries[-1] if entries else None
        for record in self._records.values():
            if record.is_dead and record.died_after is None:
                record.died_after = last
        found: list[PageRecord] = []
        for known, page in zip(trace.pages, pages, strict=True):
            if page is None:
                record = PageRecord(None, known, is_dead=True, died_after=last)
                self._anonymous.append(record)
            else:
                record = self._record_of(page)
                if page.id not in self._alive and not record.is_dead:
                    record.is_dead, record.died_after = True, last
            if known.died is not None and known.died <= index and record.died_after is last:
                record.died_after = entries[known.died - 1] if known.died else None
            record.dtype = record.dtype or known.dtype
            found.append(record)
        for entry, op, numbers in zip(entries, trace.ops, operands, strict=False):
            entry.operands = [found[number] for number in numbers]
            entry.writes = [found[number] for number in op.writes]
            entry.creates = [found[number] for number in op.creates]
            for record in entry.creates:
                record.born = entry
        self.entries[:0] = entries

    def _record_of(self, page: Page) -> PageRecord:
        record = self._records.get(page.id)
        if record is None:
            record = self._records[page.id] = PageRecord(page)
        return record

    def _look_at_births(self) -> None:
        num_created = self._table.num_created
        if self._next_id == num_created:
            return
        entry = self.entries[-1] if self.entries else None
        for page_id in range(self._next_id, num_created):
            record = PageRecord(self._table.pages.get(page_id), born=entry)
            self._records[page_id] = record
            if entry is not None:
                entry.creates.append(record)
        self._next_id = num_created

    # --- when it is over -------------------------------------------------------------------------

    def finish(
        self,
        names: Mapping[int, str] | None = None,
        facts: Mapping[str, str] | None = None,
        launch_ns: int | None = None,
    ) -> Recording:
        """Makes a trace of everything since. Waits for device times.

        Args:
            names: of parameters and buffers, by page id.
            facts: see `Trace.facts`.
            launch_ns: see `Trace.launch_ns`; None: as measured.
        """
        self._look_at_births()
        for page in self._alive.values():
            self._record_of(page)
        for index, entry in enumerate(self.entries):
            entry.index = index
        ordered, num_mentioned = self._number()
        launch_ns = self._launch_ns() if launch_ns is None else launch_ns
        modules: dict[str, int] = {}
        ops = tuple([_op(entry, modules) for entry in self.entries])
        labels = {
            id(self._records[page_id]): name
            for page_id, name in (names or {}).items()
            if page_id in self._records
        }
        pages = with_learned_kinds(
            [self._page(record, labels.get(id(record), "")) for record in ordered], ops
        )
        numbers = {
            page_id: record.number
            for page_id, record in self._records.items()
            if record.number >= 0
        }
        return Recording(
            Trace(ops, pages, tuple(modules), launch_ns, self.overhead_bytes, facts or {}),
            tuple([tuple([record.number for record in e.operands]) for e in self.entries]),
            numbers,
            {origin: numbers[i] for i, origin in self._origins.items() if i in numbers},
            num_mentioned,
        )

    def _number(self) -> tuple[list[PageRecord], int]:
        """Gives all pages their numbers; how many of them are mentioned."""
        others = [record for _, record in sorted(self._records.items()) if record.page is not None]
        numbers = in_order_of_mention(((e.operands, e.creates) for e in self.entries), others)
        for record, number in numbers.items():
            record.number = number
        mentioned = {id(r) for e in self.entries for some in (e.operands, e.creates) for r in some}
        return list(numbers), len(mentioned)

    @staticmethod
    def _page(record: PageRecord, name: str) -> TracePage:
        born = None if record.born is None else record.born.index
        died = None
        if record.is_dead:
            died = 0 if record.died_after is None else record.died_after.index + 1
        if record.page is None:
            known = record.known or TracePage(0)
            died = (0 if born is None else born + 1) if died is None else died
            return known._replace(born=born, died=died, becomes=None)
        becomes = record.number if born is None and died is None else None
        page = record.page
        return TracePage(page.nbytes, page.kind, record.dtype, name, born, died, becomes)

    def _launch_ns(self) -> int:
        """What one operation costs the launching thread, on average.

        Of each operator the lower quartile: threads of lanes take the interpreter in between, and
        some operations wait for the device. What runs in this very thread is left out, so device
        times have to be asked for later.
        """
        gaps = defaultdict[str, list[int]](list)
        for entry, following in zip(self.entries, self.entries[1:], strict=False):
            if entry.begun_ns:
                compute_ns = entry.compute_ns if isinstance(entry.compute_ns, int) else 0
                gap_ns = following.begun_ns - entry.begun_ns - entry.excess_ns - compute_ns
                gaps[entry.name].append(gap_ns)
        total_ns = sum(sorted(some)[len(some) // 4] * len(some) for some in gaps.values())
        return max(0, total_ns // max(1, sum(map(len, gaps.values()))))


def _recalled(trace: Trace, op: TraceOp) -> Entry:
    return Entry(
        op.name,
        [],
        compute_ns=op.compute_ns,
        workspace_bytes=op.workspace_bytes,
        phase=op.phase,
        module=trace.modules[op.module] if op.module >= 0 else "",
        is_replayable=op.is_replayable,
    )


def _op(entry: Entry, modules: dict[str, int]) -> TraceOp:
    if not isinstance(entry.compute_ns, int):
        entry.compute_ns = entry.compute_ns()
    return TraceOp(
        entry.name,
        tuple(dict.fromkeys([record.number for record in entry.operands])),
        tuple(dict.fromkeys([record.number for record in entry.writes])),
        tuple([record.number for record in entry.creates]),
        entry.compute_ns,
        entry.workspace_bytes,
        entry.phase,
        modules.setdefault(entry.module, len(modules)) if entry.module else -1,
        entry.is_replayable,
    )
