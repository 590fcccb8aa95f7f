"""Moves pages between tiers: submits transfers, drives the page table through their states.

Decides where a written-back page goes, never which page leaves. Everything runs under the pager's
lock.

[Note: Memory is reused only after its last reader]
    `settle` is the only way out of an in-flight state, and it waits for every ticket of the page,
    also when the copy was superseded or has failed. Device memory is released, and frames are
    freed, by the transitions that follow it. So no byte is reused while a copy reads or writes it,
    whatever the order of write-back, fault, write and free (hazard: a write-back that was cancelled
    in the books and still ran).
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import TransferError
from tvm_pager.events import Event, EventKind
from tvm_pager.memory import Backing, Extent, Page, PageState, Segment, Tier
from tvm_pager.paging.view import host_frame_bytes
from tvm_pager.transfer.protocol import Lane, Piece, Transfer
from tvm_pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.events import EventSink
    from tvm_pager.memory import PageTable
    from tvm_pager.memory.page_table import Arrival
    from tvm_pager.paging.tier_policy import TierPolicy
    from tvm_pager.paging.view import PagerView
    from tvm_pager.transfer.protocol import Backend, Checker, Ticket

__all__ = ["Mover"]

_TIER_IS_BROKEN = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT})
_UP = frozenset({Lane.H2D, Lane.N2D, Lane.N2H, Lane.R2D})
_DOWN = {Tier.HOST: Lane.D2H, Tier.NVME: Lane.D2N}


class Mover:
    """Write-back, fetch, demotion and eviction of single pages."""

    def __init__(
        self,
        table: PageTable,
        backend: Backend,
        host_policy: TierPolicy,
        device_policy: TierPolicy,
        view: PagerView,
        sink: EventSink | None,
        clock: Callable[[], int],
        on_tier_closed: Callable[[], None],
        owner_executors: tuple[Any, ...],
        checker: Checker | None,
    ) -> None:
        self.in_flight: dict[int, Page] = {}
        self._table = table
        self._backend = backend
        self._host_policy = host_policy
        self._device_policy = device_policy
        self._view = view
        self._sink = sink
        self._clock = clock
        self._on_tier_closed = on_tier_closed
        self._checker = checker
        self._owner = owner_executors[0] if owner_executors else None
        self._owner_executors = owner_executors  # used by every page whose `executors` is None
        self._started_ns: dict[int, int] = {}

    # --- down ------------------------------------------------------------------------------------

    def start_write_back(self, page: Page, to: Tier | None = None) -> None:
        """Starts copying the dirty segments down; the page stays on the device.

        Does not block on the copy.

        Raises:
            TransferError: no tier below has room for them.
        """
        if page.has_source:
            return
        arrivals: list[Arrival] = []
        pieces: dict[Tier, list[Piece]] = {}
        for segment in self._table.segments_of(page):
            if not segment.is_dirty:
                continue
            placed = self._place(page, segment.nbytes, to)
            if placed is None:
                self._table.release_frames(arrivals)
                raise TransferError(self._no_room(page), errno.ENOSPC)
            tier, frame = placed
            arrivals.append((segment, tier, frame))
            pieces.setdefault(tier, []).extend(_pieces(segment, frame, to_frame=True))
        if arrivals:
            tickets = self._submit(page, {_DOWN[tier]: run for tier, run in pieces.items()})
            self._table.begin_write_back(page, arrivals, tickets)

    def evict(self, page: Page, to: Tier | None = None) -> None:
        """Writes the page back if it is dirty, then takes its device memory away.

        Blocks for the copy.

        Raises:
            TransferError: the page could not be written to any tier; it stays on the device,
                unharmed.
        """
        self.settle(page)
        memory = page.memory()  # kept alive by this reference until the end
        if memory is None:
            # Its last tensor died since it was chosen; the pager's next `drain` takes it out.
            return
        start_ns = self._clock()
        was_clean = page.is_clean
        while not page.is_clean:
            num_closed = len(self._table.closed_tiers)
            self.start_write_back(page, to)
            try:
                self.settle(page)
            except TransferError:
                if len(self._table.closed_tiers) == num_closed:
                    raise
                to = None  # a tier has just closed: the next round can only use the other
        if self._checker is not None:
            self._checker.seal(memory)
        self._backend.release_device(memory, self._executors(page))
        page.executors = None if page.home is None else {self._owner, page.home}
        self._table.evict(page)
        self._device_policy.removed(page)
        self._emit(
            EventKind.EVICT, page, page.nbytes, None, start_ns, "clean" if was_clean else "dirty"
        )

    # --- up --------------------------------------------------------------------------------------

    def start_fetch(self, page: Page) -> None:
        """Allocates device memory and starts filling it. The caller has made room.

        Does not block on the copy.

        Raises:
            MemoryError: the device has no room although the books say so; the page stays where it
                was.
        """
        home = page.home if page.home is not None else self._owner
        self._backend.allocate_device(page.memory(), page.nbytes, home)
        pieces = self.pieces_below(page)
        self._table.begin_fetch(page)
        self._table.in_flight(page, self._submit(page, pieces))

    def pieces_below(self, page: Page) -> dict[Lane, list[Piece]]:
        """What a fetch of the page copies, by lane: from DRAM where it is there, else from NVMe.

        A page with a source comes from there.
        """
        if page.has_source:
            lane = Lane.N2D if page.backing is Backing.FILE else Lane.R2D
            return {lane: [Piece(0, 0, 0, page.nbytes)]} if page.nbytes else {}
        pieces: dict[Lane, list[Piece]] = {}
        for segment in page.segments:
            lane, frame = (
                (Lane.H2D, segment.host) if segment.host is not None else (Lane.N2D, segment.nvme)
            )
            if frame is None:
                raise AssertionError(f"{page!r} has a segment without a copy")
            pieces.setdefault(lane, []).extend(_pieces(segment, frame, to_frame=False))
        return pieces

    # --- sideways --------------------------------------------------------------------------------

    def free_host(self, need_bytes: int) -> bool:
        """Frees slab bytes as the host's policy says: copies are dropped, the rest goes to NVMe."""
        frames = self._table.frames[Tier.HOST]
        if need_bytes > frames.capacity_bytes:
            return False
        while frames.free_bytes < need_bytes:
            missing = need_bytes - frames.free_bytes
            victims = self._host_policy.victims(missing, self._view)
            if victims is None:
                return False
            # All of them leave: `any` over a generator would stop at the first that did.
            outcomes = [self._leave_host(self._table.pages[victim.page_id]) for victim in victims]
            if not any(outcomes):
                return False
        return True

    def _leave_host(self, page: Page) -> bool:
        """Takes the page's bytes out of the slab; False if some had to stay."""
        self._table.drop_host_copies(page)
        if any(segment.host is not None for segment in page.segments):
            arrivals: list[Arrival] = []
            pieces: list[Piece] = []
            for segment in page.segments:
                if segment.host is None:
                    continue
                frame = self._table.allocate(Tier.NVME, segment.nbytes)
                if frame is None:
                    break
                arrivals.append((segment, Tier.NVME, frame))
                pieces.extend(_between(segment.page_offset, segment.nbytes, segment.host, frame))
            if not arrivals:
                return False
            tickets = self._submit(page, {Lane.H2N: pieces})
            self._table.begin_demote(page, arrivals, tickets)
            try:
                self.settle(page)
            except TransferError:
                return False
        if not host_frame_bytes(page):
            self._host_policy.removed(page)
        return True

    # --- tickets ---------------------------------------------------------------------------------

    def settle(self, page: Page) -> None:
        """Waits for the page's transfers and finishes the transition they belong to.

        See [Note: Memory is reused only after its last reader].

        Raises:
            TransferError: one of them failed; the page is in the state that the failure leads to.
        """
        if not page.tickets:
            self.in_flight.pop(page.id, None)  # a dead page that the table has reaped
            return
        failure: TransferError | None = None
        for ticket in page.tickets:
            try:
                ticket.wait()
            except TransferError as error:
                failure = failure or error
        self.in_flight.pop(page.id, None)
        if failure is None and page.state is PageState.FETCHING:
            failure = self._mismatch(page)
        self._report(page, failure)
        if page.state is PageState.DEAD:
            self._table.reap()
            return
        if failure is not None:
            self._fail(page, failure)
            raise failure
        if page.state is PageState.FETCHING:
            self._table.finish_fetch(page)
            self._device_policy.used(page)
        elif page.state is PageState.WRITING_BACK:
            self._table.finish_write_back(page)
        else:
            self._table.finish_demote(page)
        if host_frame_bytes(page):
            self._host_policy.used(page)
        else:
            self._host_policy.removed(page)

    def _mismatch(self, page: Page) -> TransferError | None:
        memory = page.memory()
        if self._checker is None or memory is None or self._checker.is_intact(memory):
            return None
        lanes = ", ".join(ticket.transfer.lane.value for ticket in page.tickets)
        return TransferError(
            f"{page!r} came back over {lanes} with other bytes than it left with: its checksum "
            "differs. The host memory, the disk or the pager is at fault; its copies below are kept"
        )

    def _fail(self, page: Page, failure: TransferError) -> None:
        if page.state is PageState.FETCHING:
            memory = page.memory()
            if memory is not None:
                self._backend.release_device(memory, ())
            self._table.fail_fetch(page)
            return
        to_nvme = any(tier is Tier.NVME for _, tier, _ in self._table.arrivals_of(page.id))
        is_bad = to_nvme and failure.errno in _TIER_IS_BROKEN
        if page.state is PageState.WRITING_BACK:
            self._table.fail_write_back(page, is_bad=is_bad)
        else:
            self._table.fail_demote(page, is_bad=is_bad)
        if is_bad:
            self._table.close_tier(Tier.NVME, str(failure))
            self._on_tier_closed()  # last: the frames that are bad by now back no page

    def reap(self) -> None:
        """Finishes what has ended by itself.

        Never blocks; failures show in the page's state and in the events.
        """
        for page in list(self.in_flight.values()):
            if all(ticket.done() for ticket in page.tickets):
                try:
                    self.settle(page)
                except TransferError:
                    continue
        self._table.reap()

    def settle_any(self) -> bool:
        """Blocks for the oldest transfer in flight; False if there is none."""
        page = next(iter(self.in_flight.values()), None)
        if page is None:
            return False
        with contextlib.suppress(TransferError):  # the page's state and the events have it
            self.settle(page)
        return True

    # --- inside ----------------------------------------------------------------------------------

    def _place(
        self, page: Page, nbytes: int, to: Tier | None
    ) -> tuple[Tier, tuple[Extent, ...]] | None:
        """A frame below the device: in DRAM if it has, or can be given, room, else on NVMe."""
        if to is not Tier.NVME:
            frame = self._table.allocate(Tier.HOST, nbytes)
            if frame is None and self.free_host(nbytes):
                frame = self._table.allocate(Tier.HOST, nbytes)
            if frame is not None:
                return Tier.HOST, frame
        frame = self._table.allocate(Tier.NVME, nbytes)
        if frame is not None:
            return Tier.NVME, frame
        return self._place(page, nbytes, Tier.HOST) if to is Tier.NVME else None

    def _executors(self, page: Page) -> tuple[Any, ...]:
        return self._owner_executors if page.executors is None else tuple(page.executors)

    def _submit(self, page: Page, lanes: dict[Lane, list[Piece]]) -> tuple[Ticket, ...]:
        needs_device = any(lane not in (Lane.H2N, Lane.N2H) for lane in lanes)
        memory = page.memory() if needs_device else None
        after = self._executors(page) if needs_device else ()
        self._started_ns[page.id] = self._clock()
        tickets = tuple(
            self._backend.submit(Transfer(page.id, lane, tuple(pieces), memory, after, page.source))
            for lane, pieces in lanes.items()
        )
        if tickets:
            self.in_flight[page.id] = page
        return tickets

    def _report(self, page: Page, failure: TransferError | None) -> None:
        started_ns = self._started_ns.pop(page.id, self._clock())
        if failure is not None:
            self._emit(EventKind.FAILURE, page, 0, None, started_ns, str(failure))
            return
        for ticket in page.tickets:
            up = ticket.transfer.lane in _UP
            kind = EventKind.FETCH if up else EventKind.WRITE_BACK
            self._emit(
                kind, page, ticket.transfer.nbytes, ticket.transfer.lane.value, started_ns, ""
            )

    def _emit(
        self, kind: EventKind, page: Page, nbytes: int, lane: str | None, start_ns: int, detail: str
    ) -> None:
        if self._sink is not None:
            self._sink.emit(Event(kind, page.id, nbytes, lane, start_ns, self._clock(), detail))

    def _no_room(self, page: Page) -> str:
        parts = [
            f"{tier.name} {format_bytes(space.free_bytes)} free of "
            f"{format_bytes(space.capacity_bytes)}"
            + (
                f", closed: {self._table.closed_tiers[tier]}"
                if tier in self._table.closed_tiers
                else ""
            )
            for tier, space in self._table.frames.items()
        ]
        return (
            f"no tier below the device can take the {format_bytes(page.nbytes)} of {page!r} "
            f"({'; '.join(parts)}); it stays on the device. Give a larger host or nvme budget"
        )


def _pieces(segment: Segment, frame: Sequence[Extent], *, to_frame: bool) -> list[Piece]:
    """Copies between a segment on the device and its frame."""
    pieces: list[Piece] = []
    done = 0
    for extent in frame:
        nbytes = min(extent.nbytes, segment.nbytes - done)
        at = segment.page_offset + done
        pieces.append(
            Piece(at, at, extent.offset, nbytes)
            if to_frame
            else Piece(at, extent.offset, at, nbytes)
        )
        done += nbytes
    return pieces


def _between(
    page_offset: int, nbytes: int, source: Sequence[Extent], target: Sequence[Extent]
) -> list[Piece]:
    """Copies a frame of one tier into a frame of another, cut where either changes extent."""
    pieces: list[Piece] = []
    sources: list[Any] = [list(extent) for extent in source]
    targets: list[Any] = [list(extent) for extent in target]
    done = 0
    while done < nbytes:
        run = min(sources[0][1], targets[0][1], nbytes - done)
        pieces.append(Piece(page_offset + done, sources[0][0], targets[0][0], run))
        done += run
        for side in (sources, targets):
            side[0][0] += run
            side[0][1] -= run
            if not side[0][1]:
                side.pop(0)
    return pieces
