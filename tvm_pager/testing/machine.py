"""A rule machine over the pager on the delayed, failing backend, against a dict of bytes.

The model is what a program would see if memory were infinite: page id -> bytes. The backend
corrupts on purpose where a rule of order is broken, so every check is a comparison of bytes. All
invariants are checked after each rule.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from tvm_pager.errors import BudgetError, CommitError, TransferError
from tvm_pager.memory import Backing, Page, PageKind, PageState
from tvm_pager.paging import DemandPager
from tvm_pager.testing.checked import checked_policy, expect
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.ram_backend import RamBackend, RamMemory

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile, Policy

__all__ = ["PagerMachine"]

DEVICE_BYTES = 40 * 512
SIZES = st.sampled_from([0, 1, 100, 512, 3000, 4096, 5000, 9000, 12288])


class PagerMachine(RuleBasedStateMachine):
    """Rules: create, read, write, resize, pin, write back, prefetch, evict, free, fail, tick.

    Attributes:
        policies: each example takes one of them.
    """

    pages = Bundle("pages")
    policies: ClassVar[tuple[type[Policy], ...]] = ()
    hardware: ClassVar[HardwareProfile | None] = None  # without one nothing is planned

    @initialize(
        seed=st.integers(0, 2**16),
        max_delay=st.integers(0, 6),
        policy=st.runner().flatmap(lambda machine: st.sampled_from(machine.policies)),
        host_bytes=st.sampled_from([0, 4096, 5 * 4096, 16 * 4096]),
        nvme_bytes=st.sampled_from([0, 8 * 4096, 64 * 4096]),
        in_order=st.booleans(),
        write_behind_bytes=st.sampled_from([0, 4096, 12288]),
    )
    def open(
        self,
        seed: int,
        max_delay: int,
        policy: type[Policy],
        host_bytes: int,
        nvme_bytes: int,
        in_order: bool,
        write_behind_bytes: int,
    ) -> None:
        self.backend = RamBackend(
            host_bytes, nvme_bytes, seed=seed, max_delay=max_delay, in_order=in_order
        )
        hardware = self.hardware
        self.pager = DemandPager(
            self.backend,
            DEVICE_BYTES,
            checked_policy(policy),
            segment_bytes=4096,
            strict=True,
            write_behind_bytes=write_behind_bytes,
            hardware=None if hardware is None else lambda: hardware,
        )
        self.model: dict[int, bytes] = {}
        self.memory: dict[int, RamMemory] = {}
        self.pins: dict[int, int] = {}
        self.counter = 0

    def _pattern(self, nbytes: int) -> bytes:
        self.counter += 1
        return bytes((self.counter * 31 + i * 7) % 251 for i in range(nbytes))

    def _admit(self, page: Page, new_bytes: int = 0) -> bool:
        try:
            with self.pager.lock:
                self.pager.admit([page] if page is not None else [], new_bytes, "test")
        except (BudgetError, TransferError, CommitError) as error:
            event(f"refused: {type(error).__name__}")
            return False
        return True

    @rule(target=pages, nbytes=SIZES, kind=st.sampled_from([PageKind.OTHER, *PageKind]))
    def create(self, nbytes: int, kind: PageKind) -> Page | None:
        return self._born(nbytes, kind) if self._has_room(nbytes) else None

    def _has_room(self, nbytes: int) -> bool:
        try:
            with self.pager.lock:
                self.pager.admit([], -(-nbytes // 512) * 512, "create")
        except (BudgetError, TransferError, CommitError) as error:
            event(f"create refused: {type(error).__name__}")
            return False
        return True

    def _born(self, nbytes: int, kind: PageKind) -> Page:
        """Enters a page for which there is room."""
        memory = RamMemory()
        self.backend.allocate_device(memory, nbytes)
        page = self.pager.create(nbytes, lambda: memory, kind)
        self.memory[page.id] = memory
        self.pins[page.id] = 0
        self._store(page)
        return page

    def _check(self, page: Page) -> None:
        """The bytes on the device are the last ones written."""
        if bytes(self.memory[page.id].data) != self.model[page.id]:
            raise AssertionError(
                f"{page!r} does not hold the last bytes written; hazards: {self.backend.hazards}"
            )

    def _store(self, page: Page) -> None:
        pattern = self._pattern(page.nbytes)
        self.memory[page.id].data[:] = pattern
        self.model[page.id] = pattern

    @rule(page=pages)
    def read(self, page: Page | None) -> None:
        if page is None or page.id not in self.model:
            return
        if self._admit(page):
            self._check(page)
            self.pager.device_policy.used(page)

    @rule(page=pages)
    def write(self, page: Page | None) -> None:
        if page is None or page.id not in self.model:
            return
        if self._admit(page):
            if page.state is PageState.WRITING_BACK:
                event("write while writing back")
            if page.has_source:
                event(f"write to a page backed by {page.backing.value}")
            try:
                self.pager.written(page)
            except CommitError:
                expect(page.backing is Backing.FILE, f"a write to {page!r} was refused")
                return
            self._store(page)
            self.pager.device_policy.used(page)

    @rule(first=pages, second=pages)
    def read_two(self, first: Page | None, second: Page | None) -> None:
        operands = [page for page in (first, second) if page is not None and page.id in self.model]
        try:
            with self.pager.lock:
                self.pager.admit(operands, 512, "two")
        except (BudgetError, TransferError, CommitError):
            return
        for page in operands:
            self._check(page)

    @rule(page=pages)
    def start_write_back(self, page: Page | None) -> None:
        if page is None or page.id not in self.model or page.state is not PageState.RESIDENT:
            return
        try:
            self.pager.mover.start_write_back(page)
        except TransferError:
            event("write-back refused")

    @rule(page=pages, backing=st.sampled_from([Backing.FILE, Backing.RECIPE, Backing.SWAP]))
    def back(self, page: Page | None, backing: Backing) -> None:
        if page is None or page.id not in self.model or not self._admit(page):
            return
        source = None if backing is Backing.SWAP else self.model[page.id]
        try:
            self.pager.back(page, backing, source)
        except CommitError:
            expect(page.backing is Backing.FILE, f"{page!r} cannot be backed by {backing}")

    @rule(page=pages)
    def prefetch(self, page: Page | None) -> None:
        if page is None or page.id not in self.model:
            return
        self.pager.admission.largest_need_bytes = 0  # else few would be let through
        try:
            if self.pager.prefetcher.start(page):
                event("prefetch")
        except CommitError:
            expect(page.backing is Backing.RECIPE, f"a prefetch of {page!r} was refused")

    @rule()
    def cancel_prefetches(self) -> None:
        if self.pager.prefetcher.cancel():
            event("prefetch cancelled")

    @rule(page=pages)
    def resize(self, page: Page | None) -> None:
        if page is None or page.id not in self.model or not self._admit(page):
            return
        if page.tickets:
            # An operation that resizes waits for copies of its operand, well or not.
            with contextlib.suppress(TransferError):
                self.pager.flight.settle(page)
        nbytes = max(0, page.nbytes - 700)
        try:
            self.pager.written(page)
        except CommitError:
            return
        self.memory[page.id].data = bytearray(nbytes)
        self.pager.resized(page, nbytes)
        self._store(page)

    @rule(page=pages)
    def pin(self, page: Page | None) -> None:
        if page is None or page.id not in self.model or sum(self.pins.values()) > 2:
            return
        if self._admit(page):
            self.pager.hold(page)
            self.pins[page.id] += 1

    @rule(page=pages)
    def unpin(self, page: Page | None) -> None:
        if page is not None and self.pins.get(page.id):
            self.pager.drop(page)
            self.pins[page.id] -= 1

    @rule()
    def evict_all(self) -> None:
        try:
            self.pager.evict_all()
        except TransferError:
            event("evict refused")
        for page_id, count in self.pins.items():
            if count:
                page = self.pager.table.pages[page_id]
                expect(page.is_on_device, f"{page!r} was evicted under {count} pins")

    @rule(page=consumes(pages))
    def free(self, page: Page | None) -> None:
        if page is None or page.id not in self.model:
            return
        if page.tickets:
            event(f"death while {page.state.value}")
        self._die(page)

    def _die(self, page: Page) -> None:
        while self.pins[page.id]:
            self.pager.drop(page)
            self.pins[page.id] -= 1
        del self.model[page.id], self.pins[page.id]

        class Reference:
            pass

        reference: Any = Reference()
        reference.page = page
        self.pager.dead.append(reference)

    @precondition(lambda self: self.counter > 3)
    @rule(
        lane=st.sampled_from(list(Lane)),
        code=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EAGAIN]),
        num=st.integers(1, 2),
    )
    def fail_next(self, lane: Lane, code: int, num: int) -> None:
        self.backend.fail_next(num, lane=lane, code=code)

    @rule(num_blocks=st.integers(28, 48))
    def set_device_budget(self, num_blocks: int) -> None:
        before = self.pager.budget_bytes
        try:
            with self.pager.lock:
                self.pager.budgets.set_device(num_blocks * 512)
            event("device budget changed")
        except (BudgetError, CommitError, TransferError):
            expect(self.pager.budget_bytes == before, "a refused device budget holds all the same")

    @rule(num_frames=st.sampled_from([0, 1, 3, 5, 9, 16]))
    def set_host_budget(self, num_frames: int) -> None:
        before = self.backend.host_capacity_bytes
        try:
            with self.pager.lock:
                self.pager.budgets.set_host(num_frames * 4096)
            event("host budget changed")
        except (BudgetError, CommitError, TransferError):
            is_old = self.backend.host_capacity_bytes == before
            expect(is_old, "a refused host budget holds all the same")

    @rule(num=st.integers(1, 4))
    def advance(self, num: int) -> None:
        for _ in range(num):
            self.backend.tick()

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "pager"):
            return
        self.pager.check_invariants()
        used, budget = self.pager.table.device_used_bytes, self.pager.budget_bytes
        expect(used <= budget, f"{used} B on a device of {budget} B")
        expect(set(self.pager.table.pages) == set(self.model), "other pages live than should")
        for page_id, count in self.pins.items():
            page = self.pager.table.pages[page_id]
            expect(page.pins == count, f"{page!r} was pinned {count} times")
        if self.backend.hazards:
            note(str(self.backend.hazards))
        expect(not self.backend.hazards, f"hazards: {self.backend.hazards}")

    def teardown(self) -> None:
        if not hasattr(self, "pager"):
            return
        self.backend.fail_next(0)
        left = list(self.pager.table.pages.values())
        for page in left:
            page.pins = 0
        # Injected failures run out, and each page that was read makes room for the others.
        for _ in range(1000):
            for page in list(left):
                if self._admit(page):
                    self._check(page)
                    # Of a write-back that nobody waits for.
                    with contextlib.suppress(TransferError):
                        self.pager.flight.settle(page)
                    self.pager.forget(page)
                    left.remove(page)
        expect(not left, f"{left} cannot be read any more")
        self.pager.close()
        expect(not self.backend.pending, f"copies after the end: {self.backend.pending}")
