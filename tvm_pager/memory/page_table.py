"""The page table: the one writer of page state, frames and byte counts.

Transition                      method                       who owns the device memory then
(new) -> RESIDENT               create                       the page
RESIDENT -> WRITING_BACK        begin_write_back             the page, and the copy reads it
WRITING_BACK -> RESIDENT        finish_ / fail_write_back    the page
RESIDENT -> EVICTED             evict                        nobody
WRITING_BACK -> LEAVING         leave                        nobody, in stream order
LEAVING -> EVICTED / FAILED     finish_ / fail_leave         nobody
EVICTED, FAILED -> FETCHING     begin_fetch                  the page, and the copy writes it
FETCHING -> RESIDENT / FAILED   finish_fetch / fail_fetch    the page / nobody
EVICTED -> DEMOTING -> EVICTED  begin_, finish_, fail_demote nobody
any -> DEAD                     free                         nobody
WRITING_BACK -> DEAD etc. keep their frames until `reap` says that the tickets are done. So do the
frames of a page that was used in stream order before its fetch was done (`Page.readers`): freed
meanwhile, they are in limbo.

docs/states.md says what holds in each state; `invariants.check_table` is that list as code. Each
method assigns the state in its last step. All methods expect the pager's lock to be held; none
blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_pager.memory.address_space import AddressSpace, Translation
from tvm_pager.memory.page import Backing, Page, PageKind, PageState, Segment, Tier
from tvm_pager.memory.tier_books import COMMIT_ALIGNMENT, Arrival, TierBooks
from tvm_pager.memory.transitions import enter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.memory.frames import FrameAllocator

__all__ = ["PageTable"]

_COMMIT_MASK = COMMIT_ALIGNMENT - 1
# Names of the module cost 2 ns, members of an enumeration 30 (Python 3.11).
_RESIDENT = PageState.RESIDENT
_DEAD = PageState.DEAD
_OTHER = PageKind.OTHER


def _nothing() -> None:
    """Nobody wants to know."""


class PageTable(TierBooks):
    """All pages of one pager.

    Args:
        host: frames of the DRAM slab.
        nvme: frames of the swap file.
        segment_bytes: pages are split into parts of this size below the device.
        device_alignment: granularity of the device's allocator.
    """

    def __init__(
        self,
        host: FrameAllocator,
        nvme: FrameAllocator,
        *,
        segment_bytes: int,
        device_alignment: int = 512,
    ) -> None:
        super().__init__(host, nvme)
        self.pages: dict[int, Page] = {}
        self.segment_bytes = segment_bytes
        self._device_mask = device_alignment - 1  # a power of two
        self.device_used_bytes = 0
        self.device_peak_bytes = 0
        self.committed_bytes = 0
        self.largest_bytes = 0  # of any page so far
        self.on_larger_page: Callable[[], None] = _nothing
        self.num_created = 0
        self.created_bytes = 0  # cumulative; the difference around an operation is what it created
        self._space = AddressSpace()
        self._arrivals: dict[int, list[Arrival]] = {}  # page id -> frames being filled
        self._zombies: dict[int, Page] = {}  # dead pages whose frames a ticket still uses

    # --- birth and death -------------------------------------------------------------------------

    def create(self, nbytes: int, memory: Callable[[], Any], kind: PageKind = _OTHER) -> Page:
        """Enters a page whose bytes are already on the device.

        The caller has reserved and committed its bytes.
        """
        page = Page()
        page.id = page_id = self.num_created
        self.num_created = page_id + 1
        page.nbytes = nbytes
        page.frame_bytes = frame_bytes = (nbytes + self._device_mask) & ~self._device_mask
        page.memory = memory
        page.state = _RESIDENT
        page.has_copies = False
        page.tickets = ()
        page.known_to = page.last_use = 0
        page.executors = page.pager = None
        if kind is not _OTHER:
            page.kind = kind
        self.pages[page_id] = page
        if nbytes > self.largest_bytes:
            self.largest_bytes = nbytes
            self.on_larger_page()
        self.committed_bytes += (nbytes + _COMMIT_MASK) & ~_COMMIT_MASK
        self.created_bytes += frame_bytes
        self.device_used_bytes = used_bytes = self.device_used_bytes + frame_bytes
        if used_bytes > self.device_peak_bytes:
            self.device_peak_bytes = used_bytes
        return page

    def create_absent(
        self, nbytes: int, memory: Callable[[], Any], kind: PageKind, source: Any
    ) -> Page:
        """Enters an EVICTED page whose bytes are in a file; it takes nothing until it is fetched.

        Args:
            nbytes: size, not 0.
            memory: gives its device memory, which is empty.
            kind: what it holds.
            source: see `Page.source`.
        """
        page = self.create(nbytes, memory, kind)
        self.device_used_bytes -= page.frame_bytes
        self.created_bytes -= page.frame_bytes
        self.committed_bytes -= self.commit_of(nbytes)
        page.backing, page.source, page.has_copies = Backing.FILE, source, True
        page.state = PageState.EVICTED
        return page

    def free(self, page: Page) -> None:
        """Takes a page whose last tensor is gone out of the books.

        Frames in use by a ticket wait for `reap`.
        """
        del self.pages[page.id]
        if page.has_copies and page.has_source:
            self.committed_bytes -= self.committed_of(page)
        else:
            self.committed_bytes -= (page.nbytes + _COMMIT_MASK) & ~_COMMIT_MASK
        if page.state is _RESIDENT or page.is_on_device:
            self.device_used_bytes -= page.frame_bytes
        if page.tickets:
            self._zombies[page.id] = page
        elif page.has_copies:
            self._free_copies(page)
        page.state = _DEAD  # allowed from every state

    def reap(self) -> None:
        """Frees the frames of dead pages, and the oldest in limbo, whose tickets are done."""
        self.leave_limbo()
        for page in list(self._zombies.values()):
            self.bury(page)

    def bury(self, page: Page) -> None:
        """Frees the frames of one dead page, if its tickets are done. O(its tickets)."""
        if page.id in self._zombies and all(ticket.done() for ticket in page.tickets):
            del self._zombies[page.id]
            page.tickets = ()
            for _, tier, frame in self._arrivals.pop(page.id, ()):
                self.frames[tier].free(frame)
            self._free_copies(page)

    @property
    def zombies(self) -> list[Page]:
        return list(self._zombies.values())

    def resize(self, page: Page, nbytes: int) -> None:
        """Follows a storage that an operation resized; its bytes are on the device and dirty."""
        self.write(page)
        frame_bytes = (nbytes + self._device_mask) & ~self._device_mask
        self.device_used_bytes += frame_bytes - page.frame_bytes
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_used_bytes)
        self.committed_bytes += self.commit_of(nbytes) - self.committed_of(page)
        page.va = 0  # a range is never stretched over its neighbour
        page.nbytes, page.frame_bytes, page.segments = nbytes, frame_bytes, ()
        self.largest_bytes = max(self.largest_bytes, nbytes)

    # --- writing ---------------------------------------------------------------------------------

    def write(self, page: Page) -> None:
        """Declares that the device's bytes are about to change: copies below stop being current."""
        if page.state is PageState.WRITING_BACK:
            page.is_superseded = True
        elif page.state is not PageState.RESIDENT:
            raise AssertionError(f"write to {page!r}")
        if page.has_copies:
            if page.has_source:
                self.back(page, Backing.SWAP)
            self._free_copies(page)

    def back(self, page: Page, backing: Backing, source: Any = None) -> None:
        """Declares what stands behind a page whose current bytes are on the device.

        Args:
            page: RESIDENT, or WRITING_BACK.
            backing: SWAP undoes the others. FILE and RECIPE free the frames below.
            source: of FILE and RECIPE, see `Page.source`: gives exactly the current bytes.
        """
        if not (page.state is PageState.RESIDENT or page.state is PageState.WRITING_BACK):
            raise AssertionError(f"backing of {page!r}")
        if (source is not None) != (backing in (Backing.FILE, Backing.RECIPE)):
            raise AssertionError(f"{backing} with source {source!r}")
        self.committed_bytes -= self.committed_of(page)
        if source is not None:
            if page.state is PageState.WRITING_BACK:
                page.is_superseded = True  # the frames that are arriving are not needed
            self._free_copies(page)
        page.backing, page.source = backing, source
        page.has_copies = page.has_source or any(not part.is_dirty for part in page.segments)
        self.committed_bytes += self.committed_of(page)

    def begin_write_back(
        self, page: Page, arrivals: Sequence[Arrival], tickets: tuple[Any, ...]
    ) -> None:
        """RESIDENT -> WRITING_BACK: `tickets` fill the frames in `arrivals`, from `allocate`."""
        self._arrivals[page.id] = list(arrivals)
        page.tickets = tickets
        page.is_superseded = False
        enter(page, PageState.WRITING_BACK)

    def finish_write_back(self, page: Page) -> None:
        """WRITING_BACK -> RESIDENT, clean unless superseded. All tickets are done and well."""
        self._finish_arrivals(page, keep=not page.is_superseded)
        enter(page, PageState.RESIDENT)

    def fail_write_back(self, page: Page, *, is_bad: bool = False) -> None:
        """WRITING_BACK -> RESIDENT: the device's bytes stay the current ones.

        Frames that `is_bad` are not used again.
        """
        self._finish_arrivals(page, keep=False, is_bad=is_bad)
        enter(page, PageState.RESIDENT)

    # --- residency -------------------------------------------------------------------------------

    def evict(self, page: Page) -> None:
        """RESIDENT -> EVICTED.

        The backend has released the device memory; every segment has a copy below, or the page a
        source. A recomputable page is dropped by this, and commits nothing until it is back.
        """
        if page.pins or page.backing is Backing.NONE or not (page.is_clean or page.nbytes == 0):
            raise AssertionError(f"evict of {page!r}, clean={page.is_clean}, {page.backing}")
        if page.backing is Backing.RECIPE:
            self.committed_bytes -= self.commit_of(page.nbytes)
        self.device_used_bytes -= page.frame_bytes
        enter(page, PageState.EVICTED)

    def leave(self, page: Page) -> None:
        """WRITING_BACK -> LEAVING: the backend has released the device memory in stream order.

        Its tickets are certain and go on filling the frames.
        """
        if page.pins or page.is_superseded:
            raise AssertionError(f"leave of {page!r}, superseded={page.is_superseded}")
        self.device_used_bytes -= page.frame_bytes
        enter(page, PageState.LEAVING)

    def finish_leave(self, page: Page) -> None:
        """LEAVING -> EVICTED: the frames below hold the bytes."""
        self._finish_arrivals(page, keep=True)
        enter(page, PageState.EVICTED)

    def fail_leave(self, page: Page) -> None:
        """LEAVING -> FAILED: the device was lost, and the bytes with it."""
        self._finish_arrivals(page, keep=False)
        page.is_lost = True
        enter(page, PageState.FAILED)

    def begin_fetch(self, page: Page) -> None:
        """EVICTED, LEAVING or FAILED -> FETCHING: the device memory is allocated.

        Set `tickets` with `in_flight`. The caller has committed a recomputable page again. Copies
        down that are still under way count from now on: the fetch is ordered behind them, and
        their frames are remembered as being in use.
        """
        if page.state is PageState.LEAVING:
            page.readers = (*page.readers, *page.tickets)
            self._finish_arrivals(page, keep=True)
        if page.backing is Backing.RECIPE:
            self.committed_bytes += self.commit_of(page.nbytes)
        self.device_used_bytes += page.frame_bytes
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_used_bytes)
        enter(page, PageState.FETCHING)

    def in_flight(self, page: Page, tickets: tuple[Any, ...]) -> None:
        page.tickets = tickets

    def finish_fetch(self, page: Page) -> None:
        """FETCHING -> RESIDENT; the copies below stay current.

        Tickets that are not done have been ordered before all use of the page, and go on reading
        the frames below.
        """
        page.readers = tuple(
            ticket for ticket in (*page.readers, *page.tickets) if not ticket.done()
        )
        page.tickets = ()
        enter(page, PageState.RESIDENT)

    def cancel_fetch(self, page: Page) -> None:
        """FETCHING -> EVICTED: nothing has moved, and the device memory is released."""
        self._end_fetch(page, PageState.EVICTED)

    def fail_fetch(self, page: Page) -> None:
        """FETCHING -> FAILED: the device memory is released, the copies below are untouched."""
        self._end_fetch(page, PageState.FAILED)

    # --- host to NVMe ----------------------------------------------------------------------------

    def begin_demote(
        self, page: Page, arrivals: Sequence[Arrival], tickets: tuple[Any, ...]
    ) -> None:
        """EVICTED -> DEMOTING: `tickets` copy host frames into the NVMe frames in `arrivals`.

        Or NVMe frames into host frames, which are then a second copy.
        """
        self._arrivals[page.id] = list(arrivals)
        page.tickets = tickets
        enter(page, PageState.DEMOTING)

    def finish_demote(self, page: Page) -> None:
        """DEMOTING -> EVICTED: what arrived is current; on NVMe it replaces the host's frames."""
        moved = [part for part, tier, _ in self._arrivals[page.id] if tier is Tier.NVME]
        self._finish_arrivals(page, keep=True)
        for segment in moved:
            self._release(page, segment, Tier.HOST)
        enter(page, PageState.EVICTED)

    def fail_demote(self, page: Page, *, is_bad: bool = False) -> None:
        """DEMOTING -> EVICTED: the host frames stay the current ones.

        Frames that `is_bad` are not used again.
        """
        self._finish_arrivals(page, keep=False, is_bad=is_bad)
        enter(page, PageState.EVICTED)

    def drop_host_copies(self, page: Page) -> int:
        """Frees the host frames that another current copy makes redundant; returns the bytes freed.

        On the device, the page becomes dirty where the host held its only copy below. In flight,
        nothing is freed: a ticket may be reading the frames.
        """
        freed = 0
        if page.tickets:
            return freed
        redundant = page.state is PageState.RESIDENT
        for segment in page.segments:
            if segment.host is not None and (redundant or segment.nvme is not None):
                freed += sum(extent.nbytes for extent in segment.host)
                self._release(page, segment, Tier.HOST)
        page.has_copies = page.has_source or any(not part.is_dirty for part in page.segments)
        return freed

    # --- segments --------------------------------------------------------------------------------

    def segments_of(self, page: Page) -> tuple[Segment, ...]:
        if not page.segments and page.nbytes:
            step = self.segment_bytes
            page.segments = tuple(
                Segment(offset, min(step, page.nbytes - offset))
                for offset in range(0, page.nbytes, step)
            )
        return page.segments

    # --- looking ---------------------------------------------------------------------------------

    def address_of(self, page: Page) -> int:
        """The page's virtual address, reserved at the first call."""
        if not page.va:
            page.va = self._space.reserve(page.nbytes)
        return page.va

    def translate(self, va: int) -> Translation:
        """Tier, frame offset and page of the byte at `va`; KeyError if no live page owns it."""
        return self._space.translate(va, self.pages)

    def tier_of(self, page: Page) -> Tier:
        """The highest tier that holds the whole page's current bytes."""
        if page.is_on_device or not page.nbytes:
            return Tier.DEVICE if page.is_on_device else Tier.HOST
        if page.has_source:
            return Tier.NVME
        if page.state is PageState.LEAVING:
            return max(tier for _, tier, _ in self._arrivals[page.id])
        on_host = all(segment.host is not None for segment in page.segments)
        return Tier.HOST if on_host else Tier.NVME

    def arrivals_of(self, page_id: int) -> list[Arrival]:
        return self._arrivals.get(page_id, [])

    def dump(self) -> str:
        """Every page on a line, for a debugger."""
        lines = [repr(page) for page in self.pages.values()]
        lines.append(f"device {self.device_used_bytes} B, committed {self.committed_bytes} B")
        return "\n".join(lines)

    # --- inside ----------------------------------------------------------------------------------

    def _end_fetch(self, page: Page, state: PageState) -> None:
        page.tickets = ()
        if page.backing is Backing.RECIPE:
            self.committed_bytes -= self.commit_of(page.nbytes)
        self.device_used_bytes -= page.frame_bytes
        enter(page, state)

    def _finish_arrivals(self, page: Page, *, keep: bool, is_bad: bool = False) -> None:
        for segment, tier, frame in self._arrivals.pop(page.id):
            if is_bad and tier is Tier.NVME:
                self.bad_frames.append(frame)
            elif not keep:
                self.frames[tier].free(frame)
            elif tier is Tier.HOST:
                segment.host = frame
            else:
                segment.nvme = frame
        page.tickets = ()
        page.has_copies = page.has_source or any(not part.is_dirty for part in page.segments)

    def _free_copies(self, page: Page) -> None:
        for segment in page.segments:
            self._release(page, segment, Tier.HOST)
            self._release(page, segment, Tier.NVME)
        page.has_copies = False

    def _release(self, page: Page, segment: Segment, tier: Tier) -> None:
        frame = segment.host if tier is Tier.HOST else segment.nvme
        if frame is not None:
            if page.readers:
                page.readers = tuple(ticket for ticket in page.readers if not ticket.done())
            self.free_after(page.readers, tier, frame)
        if tier is Tier.HOST:
            segment.host = None
        else:
            segment.nvme = None
