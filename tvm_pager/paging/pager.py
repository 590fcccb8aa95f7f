"""Demand paging: before an operation runs, its operands are resident, with room for its outputs.

[Note: One lock]
    `lock` covers fault, pin and launch. An operation that runs under it needs no pins: its operands
    are listed in `running`, and only this thread could evict. Operations that leave the lock while
    they run (`pin`, `unpin`) are counted in `num_transient_pins`; a request that they block waits,
    first come first served, and holds nothing meanwhile: two threads that each pinned half of what
    they need would wait for ever.

[Note: Finalisers]
    A storage's death runs on any thread, inside any call, also inside the pager's own lock. It only
    appends to `dead` (an atomic operation); the pager drains that list on entry and before it
    waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import BudgetError, TransferError
from tvm_pager.events import Event, EventKind
from tvm_pager.memory import Backing, FrameAllocator, Page, PageKind, PageState, PageTable, Tier
from tvm_pager.memory.invariants import check_table
from tvm_pager.memory.tier_books import COMMIT_ALIGNMENT
from tvm_pager.paging.admission import Admission
from tvm_pager.paging.budgets import Budgets
from tvm_pager.paging.evictor import Evictor
from tvm_pager.paging.flight import Flight
from tvm_pager.paging.holds import Holds
from tvm_pager.paging.host_room import HostRoom
from tvm_pager.paging.iterations import Iterations
from tvm_pager.paging.limits import commit_limit_bytes, over_commit
from tvm_pager.paging.mover import Mover
from tvm_pager.paging.planner import Planner
from tvm_pager.paging.prefetcher import Prefetcher
from tvm_pager.paging.reservations import Reservations
from tvm_pager.paging.tier_policy import TierPolicy
from tvm_pager.paging.view import PagerView
from tvm_pager.planning import load_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tvm_pager.events import EventSink
    from tvm_pager.paging.recorder import Recorder
    from tvm_pager.planning import HardwareProfile, Policy
    from tvm_pager.transfer.protocol import Backend, Checker

__all__ = ["UNLIMITED_BYTES", "DemandPager"]


def _gone() -> None:
    """The `memory` of a page whose storage has died."""


UNLIMITED_BYTES = 1 << 62
_DEAD = PageState.DEAD  # members of enumerations cost 30 ns a look-up in Python 3.11


class DemandPager:
    """Decides, with its policies, what is on the device; nobody else changes the page table.

    Args:
        backend: moves the bytes.
        device_budget_bytes: pages on the device never exceed it, together with
            `Backend.device_overhead_bytes`.
        make_policy: makes the policy of one tier; called once per tier.
        segment_bytes: pages are split into parts of this size below the device.
        sink: receives every event; None costs nothing.
        strict: a misbehaving policy raises instead of being replaced by LRU.
        clock: nanoseconds, monotonic; the simulator passes its own.
        checker: compares every page that comes back with what left; None costs nothing.
        owner_executors: the executor (CUDA stream) that operations normally run on.
        current_executor: gives the calling thread's executor; None where there are none.
        write_behind_bytes: how much is written back ahead of need, in each tier; see
            [Note: Write-back ahead of need].
        hardware: gives the profile that policies plan with; None: nothing is planned.
        disk_engine: which of the profile's disks moves bytes to and from NVMe.
    """

    def __init__(
        self,
        backend: Backend,
        device_budget_bytes: int,
        make_policy: Callable[[], Policy],
        *,
        segment_bytes: int = 32 << 20,
        sink: EventSink | None = None,
        strict: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        owner_executors: tuple[Any, ...] = (),
        current_executor: Callable[[], Any] | None = None,
        checker: Checker | None = None,
        write_behind_bytes: int = 0,
        hardware: Callable[[], HardwareProfile] | None = None,
        disk_engine: str = "raw",
    ) -> None:
        self.lock = threading.RLock()
        self.dead: deque[Any] = deque()  # see [Note: Finalisers]; entries have a `page`
        self.num_drops = 0  # holds that have ended
        self.dead_exports: deque[Page] = deque()  # pages whose raw alias has died; likewise
        # Operands of the operations that run under the lock.
        self.running: list[Sequence[Page]] = []
        self.num_transient_pins = 0
        self.holds = Holds(self)
        self.iteration = 0
        self.budget_bytes = device_budget_bytes
        self.overhead_bytes = 0  # device bytes that are not pages, as of the last `sample_overhead`
        self.backend = backend
        self.sink = sink
        self._clock = clock
        self.reservations = Reservations(self)
        self.table = PageTable(
            FrameAllocator(backend.host_capacity_bytes, COMMIT_ALIGNMENT),
            FrameAllocator(backend.nvme_capacity_bytes, COMMIT_ALIGNMENT),
            segment_bytes=segment_bytes,
        )
        self.view = PagerView(self.table)
        fallback = load_policy("lru")
        given = {tier: make_policy() for tier in (Tier.DEVICE, Tier.HOST)}
        self.policies = {
            tier: TierPolicy(
                tier, policy, fallback, self.notice, strict=strict, kind_of=self.view.kind_of
            )
            for tier, policy in given.items()
        }
        self.device_policy = self.policies[Tier.DEVICE]
        self.flight = Flight(
            self.table,
            backend,
            self.policies,
            sink,
            clock,
            self.update_commit_limit,
            owner_executors,
            current_executor,
            checker,
            self.reservations.unlocked,
        )
        self.evictor = Evictor(self, write_behind_bytes)
        self.host_room = HostRoom(
            self.table,
            self.flight,
            self.policies[Tier.HOST],
            self.view,
            min(write_behind_bytes, backend.host_capacity_bytes // 8)
            if backend.nvme_capacity_bytes
            else 0,
        )
        self.mover = Mover(
            self.table,
            backend,
            self.flight,
            self.host_room,
            self.device_policy,
            self.evictor.may_leave,
            clock,
        )
        self.admission = Admission(self, sink, clock)
        self.prefetcher = Prefetcher(self)
        self.budgets = Budgets(self)
        # Told of each operation before anything is done for it: its name and operands' pages.
        # Whether it may take a path on which nobody records it. None: nobody listens.
        self.watch: Callable[[str, Sequence[Page]], bool] | None = None
        self.recorder: Recorder | None = None  # told of deaths; set by `iterations`
        self.iterations = Iterations(
            self,
            Planner(given[Tier.DEVICE], hardware, disk_engine, self.notice, strict=strict),
            clock,
        )
        self.view.attach(
            self.iterations.followed,
            lambda: self.iterations.follower,
            self.flight.backlog_bytes,
            lambda: self.operation_index,
        )
        self.commit_limit_bytes = 0
        self.table.on_larger_page = self.update_commit_limit
        self.update_commit_limit()

    # --- pages -----------------------------------------------------------------------------------

    @property
    def operation_index(self) -> int:
        """How many operations have begun to run."""
        return self.device_policy.num_replayed + len(self.device_policy.journal) - 1

    @property
    def is_bounded(self) -> bool:
        """Whether the device has a budget."""
        return self.budget_bytes < UNLIMITED_BYTES

    @property
    def free_bytes(self) -> int:
        """Device bytes that a page could take without an eviction."""
        return self.budget_bytes - self.table.device_used_bytes - self.overhead_bytes

    @property
    def num_policy_errors(self) -> int:
        """What policies did that they may not."""
        errors = sum(policy.num_errors for policy in self.policies.values())
        return errors + self.iterations.planner.num_errors

    def sample_overhead(self) -> None:
        """Asks the backend how many device bytes are not pages.

        Tens of microseconds on CUDA, so not per operation. Deaths are drained first: memory that
        is back at the allocator, and still in the books, would hide as much of what is no page.
        """
        self.drain()
        self.overhead_bytes = self.backend.device_overhead_bytes()

    def pinned_bytes(self, beside: Iterable[Page]) -> int:
        """Device bytes that are pinned by others than `beside`. O(pages)."""
        own = {page.id for page in beside}
        return sum(
            page.frame_bytes
            for page in self.table.pages.values()
            if page.pins and page.is_on_device and page.id not in own
        )

    def update_commit_limit(self) -> None:
        """To be called when a budget or the largest page has changed."""
        self.commit_limit_bytes = commit_limit_bytes(self.table, self.budget_bytes)

    def create(
        self, nbytes: int, memory: Callable[[], Any], kind: PageKind = PageKind.OTHER
    ) -> Page:
        """Enters memory on the device as a page; `admit` or `reserve` has made room for it."""
        page = self.table.create(nbytes, memory, kind)
        self.device_policy.used(page)
        return page

    def drain(self) -> None:
        """Takes pages whose storage is gone out of the books, ends holds of dead raw aliases."""
        exports = self.dead_exports
        while exports:
            page = exports.popleft()
            if page.state is not PageState.DEAD:
                self.written(page)  # through the alias, until now
                self.drop(page)
        if self.holds.works:
            self.holds.poll_oldest()
        dead, recorder = self.dead, self.recorder
        follower = self.iterations.follower if dead else None
        while dead:
            page = dead.popleft().page
            if recorder is not None:
                recorder.died(page)
            if follower is not None:
                follower.died(page)
            # Page and reference hold each other: without this only the cycle collector frees them.
            page.memory = _gone
            if page.known_to or page.tickets:
                self.forget(page)
            elif page.state is not _DEAD:
                self.table.free(page)

    def forget(self, page: Page) -> None:
        """Takes a page out of the books: its storage died, or is the user's alone again."""
        if page.state is PageState.DEAD:
            return
        if self.recorder is not None:
            self.recorder.died(page)
        if page.tickets and all(t.done() for t in page.tickets):
            with contextlib.suppress(TransferError):  # nobody needs the bytes any more
                self.flight.settle(page)
        self.table.free(page)
        for policy in self.policies.values():
            policy.removed(page)

    def written(self, page: Page) -> None:
        """Declares that the device's bytes of a resident page are about to change.

        Raises:
            CommitError: a file stood behind the page, and no tier could back it from now on.
        """
        had_copies = page.has_copies
        if page.state is PageState.WRITING_BACK and not page.is_superseded:
            self.flight.cancel(page)  # what has not begun need not
        if page.backing is Backing.FILE:
            self.commit(self.table.commit_of(page.nbytes), f"a write to file-backed {page!r}")
        self.table.write(page)
        if had_copies:
            self.policies[Tier.HOST].removed(page)

    def back(self, page: Page, backing: Backing, source: Any = None) -> None:
        """Declares what stands behind a page; see `PageTable.back`. The lock is held.

        Raises:
            CommitError: it was a file, is one no more, and no tier could back the page.
        """
        if page.backing is Backing.FILE and backing is not Backing.FILE:
            self.commit(self.table.commit_of(page.nbytes), f"{page!r} without its file")
        self.table.back(page, backing, source)
        if page.has_source:
            self.policies[Tier.HOST].removed(page)

    def resized(self, page: Page, nbytes: int) -> None:
        """Follows a storage that an operation has resized."""
        self.table.resize(page, nbytes)
        self.policies[Tier.HOST].removed(page)

    # --- admission -------------------------------------------------------------------------------

    def admit(self, pages: Sequence[Page], new_bytes: int, operation: str) -> None:
        """Makes `pages` resident with `new_bytes` free on top, as one request. Blocks.

        Pins nothing. The lock is held by the caller, and is given up only while waiting for pins of
        other threads.

        Raises:
            BudgetError: they can never be on the device together.
            CommitError: all tiers together cannot back `new_bytes` more.
            TransferError: a page could not be read or written; nothing is lost, a later access
                tries again.
        """
        self.admission.admit(pages, new_bytes, operation)

    def commit(self, new_bytes: int, operation: str) -> None:
        """Checks that every live page and `new_bytes` more can be backed by all tiers together."""
        if not new_bytes or self.table.committed_bytes + new_bytes <= self.commit_limit_bytes:
            return
        self.drain()
        self.update_commit_limit()
        if self.table.committed_bytes + new_bytes > self.commit_limit_bytes:
            raise over_commit(self.table, self.commit_limit_bytes, new_bytes, operation)

    def make_room(self, need_bytes: int, operation: str) -> None:
        """Evicts until `need_bytes` of the budget are free; see `Reservations.make_room`."""
        with self.reservations.request() as turn:
            self.reservations.make_room(turn, need_bytes, operation)

    def make_room_if_possible(self, operation: str) -> None:
        """Evicts down to the budget as far as there are evictable pages; never raises for it."""
        with contextlib.suppress(BudgetError):
            self.make_room(0, operation)

    def evict_for_retry(self) -> bool:
        """Frees what it can after the device refused an operation that is about to run again."""
        self.drain()
        try:
            return self.evictor.evict_some(self.table.device_used_bytes // 8)
        except TransferError:
            return False  # the caller's error is the one that counts

    def evict_all(self) -> int:
        """Evicts every page that can go and has room below; returns the bytes freed. Blocks."""
        with self.lock:
            self.holds.poll()
            return self.evictor.evict_all()

    # --- pins ------------------------------------------------------------------------------------

    def pin(self, pages: Iterable[Page]) -> None:
        """Forbids eviction of resident pages until `unpin`; other threads' requests wait for it."""
        for page in pages:
            page.pins += 1
            self.reservations.pinned(1)

    def unpin(self, pages: Iterable[Page]) -> None:
        with self.lock:
            for page in pages:
                page.pins -= 1
                self.reservations.pinned(-1)

    def hold(self, page: Page) -> None:
        """Forbids eviction beyond any one operation (an exported array, an escaped pointer)."""
        page.pins += 1

    def drop(self, page: Page) -> None:
        """Ends a hold."""
        page.pins -= 1
        self.num_drops += 1

    # --- life ------------------------------------------------------------------------------------

    def notice(self, text: str) -> None:
        """Tells the sink something that a person should know."""
        if self.sink is not None:
            now = self._clock()
            self.sink.emit(Event(EventKind.NOTICE, -1, 0, None, now, now, text))

    def check_invariants(self) -> None:
        """Raises AssertionError if the books contradict docs/states.md. O(pages)."""
        with self.lock:
            self.flight.reap()
            self.drain()
            check_table(self.table)
            for policy in self.policies.values():
                policy.check_invariants()

    def close(self) -> None:
        """Waits for all transfers and closes the backend; bytes below the device are gone."""
        with self.lock:
            self.iterations.close()
            self.flight.settle_all()
            self.drain()
            self.flight.failures.tell_rest()
            self.backend.close()
