"""Drives a pager with a program: what the runtime does for each operation, without tensors.

[Note: As the runtime does it]
    Each step follows runtime/dispatch.py: deaths are queued and drained, operands that are resident
    and results that fit take the fast path, everything else asks the pager as
    runtime/execution.py does once it knows an operation's signature. Whoever watches the pager's
    iterations is told at the same places: traces are recorded, plans made and followed as there. So
    a policy decides the same here as there; tests compare the two event by event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.memory import PageState
from tvm_pager.paging.tier_policy import JOURNAL_LIMIT
from tvm_pager.transfer.virtual_backend import VirtualMemory

if TYPE_CHECKING:
    from tvm_pager.memory import Page
    from tvm_pager.paging import DemandPager
    from tvm_pager.simulation.program import Birth, Program, Step
    from tvm_pager.transfer.virtual_backend import VirtualBackend

__all__ = ["Feeder"]

_RESIDENT = PageState.RESIDENT


class Feeder:
    """Runs iterations of one program on one pager.

    Args:
        pager: new, on `backend`; nobody else uses it.
        backend: keeps the time.
        program: what to run.
        launch_ns: host time of one operation.

    Attributes:
        pages: by number in the present iteration; None: not alive.
        num_operations: run so far.
        num_faults: operands so far that were neither on the device nor on their way to it.
        workspace_peak_bytes: device bytes of pages and workspaces, where there is a workspace.
    """

    def __init__(
        self, pager: DemandPager, backend: VirtualBackend, program: Program, launch_ns: int
    ) -> None:
        self.pages: list[Page | None] = [None] * program.num_pages
        self.num_operations = 0
        self.num_faults = 0
        self.workspace_peak_bytes = 0
        self._pager = pager
        self._backend = backend
        self._program = program
        self._launch_ns = launch_ns
        self._held: list[Page] = []  # dead, and still being copied down
        pager.iterations.names = self._names
        # What it takes here is a constant of the machine, and was measured with the trace.
        pager.iterations.launch_ns = program.trace.launch_ns or launch_ns
        with pager.lock:
            self._bring(program.first)

    def run_iteration(self) -> None:
        """Runs all operations, and the boundary after them.

        Raises:
            BudgetError: an operation does not fit on the device.
            CommitError: the tiers cannot back what it creates.
        """
        with self._pager.lock:
            self._run_steps(self._program.steps)
            self._bury(self._program.deaths_at_end)
            self._turn()

    def _run_steps(self, steps: list[Step]) -> None:
        pager, table, policy = self._pager, self._pager.table, self._pager.device_policy
        pages, dead, create, run = self.pages, pager.dead, self._create, self._backend.run
        launch_ns, resident = self._launch_ns, _RESIDENT
        for step in steps:
            name, reads, writes, creates, deaths, new_bytes, least_bytes, compute_ns, _ = step
            if self._held:
                self._let_go()
            if deaths:
                self._bury(deaths)
            if dead:
                pager.drain()
            operands: list[Page] = [pages[number] for number in reads]  # type: ignore[misc]
            is_fast = (pager.watch is None or self._tell(name, operands)) and (
                table.device_used_bytes + pager.overhead_bytes + new_bytes <= pager.budget_bytes
                and table.committed_bytes + new_bytes <= pager.commit_limit_bytes
            )
            for page in operands:
                if page.state is not resident:
                    is_fast = False
            if is_fast:
                for number in writes:
                    if pages[number].has_copies:  # type: ignore[union-attr]
                        is_fast = False
            if not is_fast:
                self._run_slowly(step, operands)
            else:
                if len(policy.journal) > JOURNAL_LIMIT:
                    policy.replay()
                    pager.sample_overhead()
                policy.journal.append(operands)
                for birth in creates:
                    create(birth)
            if new_bytes != least_bytes:
                peak_bytes = table.device_used_bytes + new_bytes - least_bytes
                self.workspace_peak_bytes = max(self.workspace_peak_bytes, peak_bytes)
            run(name, launch_ns, compute_ns)
        self.num_operations += len(steps)

    def _tell(self, name: str, operands: list[Page]) -> bool:
        """Tells who watches the pager's iterations; whether the fast path may be taken."""
        pager = self._pager
        watch = pager.watch
        if watch is None:
            return True
        pager.running.append(operands)
        try:
            return watch(name, operands)
        finally:
            pager.running.pop()

    def _note(self, step: Step, operands: list[Page]) -> None:
        """Lets the operation be recorded, if an iteration is."""
        written: list[Page] = [self.pages[number] for number in step.writes]  # type: ignore[misc]
        entry = self._pager.iterations.enter(step.name, operands, written, is_told=True)
        if entry is not None:
            op, modules = step.op, self._program.trace.modules
            entry.compute_ns, entry.workspace_bytes = op.compute_ns, op.workspace_bytes
            entry.phase, entry.is_replayable = op.phase, op.is_replayable
            for record, number in zip(entry.operands, op.reads, strict=True):
                record.dtype = self._program.trace.pages[number].dtype
            entry.module = modules[op.module] if op.module >= 0 else ""

    def _run_slowly(self, step: Step, operands: list[Page]) -> None:
        """The general path, as `run_operator` of a known signature."""
        pager, table, new_bytes = self._pager, self._pager.table, step.new_bytes
        self._note(step, operands)
        missing_bytes = 0
        for page in operands:
            if not page.is_on_device:
                missing_bytes += page.frame_bytes
                self.num_faults += 1
        has_choice = new_bytes > step.least_bytes
        if has_choice and new_bytes > pager.free_bytes - missing_bytes:
            taken = pager.overhead_bytes + pager.pinned_bytes(operands)
            taken += sum(page.frame_bytes for page in operands)
            new_bytes = max(step.least_bytes, min(new_bytes, pager.budget_bytes - taken))
        if (
            any(page.state is not _RESIDENT for page in operands)
            or table.device_used_bytes + new_bytes + pager.overhead_bytes > pager.budget_bytes
            or table.committed_bytes + new_bytes > pager.commit_limit_bytes
        ):
            pager.admit(operands, new_bytes, step.name)
        for number in step.writes:
            written = self.pages[number]
            assert written is not None
            if step.creates and written.tickets:
                pager.flight.settle(written)
            pager.written(written)
        pager.device_policy.journal.append(operands)
        for birth in step.creates:
            self._create(birth)
        pager.device_policy.trim()

    def _create(self, birth: Birth) -> None:
        number, nbytes, kind = birth
        memory = VirtualMemory(nbytes)
        page = self._pager.table.create(nbytes, memory, kind)
        memory.page = page
        self.pages[number] = page
        self._pager.device_policy.journal[-1].append(page)

    def _bring(self, births: list[Birth]) -> None:
        """Creates pages that come from outside the program."""
        pager = self._pager
        for birth in births:
            pager.admit([], -(-birth.nbytes // 512) * 512, "a page from outside")
            self._create(birth)

    def _bury(self, numbers: tuple[int, ...] | list[int]) -> None:
        for number in numbers:
            self._bury_page(number, self.pages[number])
            self.pages[number] = None

    def _bury_page(self, number: int, page: Page | None) -> None:
        if page is None:
            return
        # What is recorded here is what was recorded.
        page.kind = self._program.trace.pages[number].kind
        if self._is_held(page):
            self._held.append(page)
        else:
            self._pager.dead.append(page.memory())

    def _is_held(self, page: Page) -> bool:
        """Whether a copy down keeps the page's memory, as its ticket does in torch_backend.py.

        Not while an iteration is recorded: the trace tells when its pages died.
        """
        return (
            page.state is PageState.WRITING_BACK
            and self._pager.recorder is None
            and not all(ticket.done() for ticket in page.tickets)
        )

    def _let_go(self) -> None:
        """Buries the pages whose copies down have ended meanwhile."""
        held, self._held = self._held, []
        for page in held:
            if all(ticket.done() for ticket in page.tickets):
                self._pager.dead.append(page.memory())
            else:
                self._held.append(page)

    def _turn(self) -> None:
        """The boundary: pages get the numbers of the next iteration."""
        before, facts = self.pages, self._program.trace.pages
        self.pages = [None] * self._program.num_pages
        for number, following in self._program.becomes:
            self.pages[following] = before[number]
        for number in (*(number for number, _ in self._program.becomes), *self._program.gone):
            page = before[number]
            if page is not None:
                page.kind = facts[number].kind  # an optimizer has told of it, or is about to
        self._pager.drain()  # as the operation does that begins the next iteration
        self._pager.iteration += 1
        self._pager.holds.pass_boundary()
        self._pager.iterations.pass_boundary()
        for number in self._program.gone:  # not earlier: it did not die in the iteration
            self._bury_page(number, before[number])
        self._bring(self._program.anew)

    def _names(self) -> dict[int, str]:
        """The names of parameters and buffers, by page id."""
        facts = self._program.trace.pages
        return {
            page.id: facts[number].name
            for number, page in enumerate(self.pages)
            if page is not None and facts[number].name
        }
