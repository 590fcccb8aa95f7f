"""Room on the device: granted whole, first come first served.

[Note: Reservation]
    A request asks for all the bytes that its operation needs and holds nothing until it has them:
    two threads that each pinned half of what they need would wait for ever. The oldest request owns
    the bytes that become free. Whoever blocks gives up the lock and the GIL; what its operations in
    progress use is pinned meanwhile, and what the request itself asks for is not. A thread that
    holds pins goes before the others, which may be waiting for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

from tvm_pager.interrupts import interruptible
from tvm_pager.paging.limits import over_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tvm_pager.memory import Page
    from tvm_pager.paging.pager import DemandPager

__all__ = ["Reservations", "Turn"]


class Turn:
    """The place of one request in the queue."""

    __slots__ = ("is_queued", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.is_queued = False


class Reservations:
    """The queue of requests for room, and the waits of one pager."""

    def __init__(self, pager: DemandPager) -> None:
        self.queue: deque[Turn] = deque()  # requests, oldest first; almost always empty
        self._pager = pager
        self._gates: list[threading.Lock] = []  # of threads in `_wait`: open when they shall look
        self._pins: Counter[int] = Counter()  # transient pins by the thread that holds them
        self._num_waiting_pins = 0  # those of threads that wait here themselves

    @contextlib.contextmanager
    def request(self) -> Iterator[Turn]:
        """A place in the queue, taken at the first wait and kept until the block ends."""
        turn = Turn(threading.get_ident())
        try:
            yield turn
        finally:
            self.leave(turn)

    def leave(self, turn: Turn) -> None:
        """Lets the next request go first. Idempotent."""
        if turn.is_queued:
            turn.is_queued = False
            self.queue.remove(turn)
            with self._pager.lock:
                self._wake()

    def make_room(
        self, turn: Turn, need_bytes: int, operation: str, own: Sequence[Page] = ()
    ) -> bool:
        """Evicts until `need_bytes` of the budget are free. Blocks.

        Args:
            turn: the request's.
            need_bytes: asked for.
            operation: for the error.
            own: pages of the request itself, which waiting does not pin.

        Returns:
            Whether the lock was given up meanwhile, so that pages may have other states.

        Raises:
            BudgetError: not even evicting everything evictable would do.
            TransferError: a victim could not be written to any tier.
        """
        pager = self._pager
        pager.sample_overhead()
        num_waits = self.num_waits
        while pager.free_bytes < need_bytes or (self.queue and self.queue[0] is not turn):
            if not turn.is_queued:
                self._enter(turn)
            if self.queue[0] is turn:
                before = self.num_waits, pager.num_drops
                if pager.evictor.evict_some(need_bytes - pager.free_bytes):
                    continue
                if pager.prefetcher.cancel(own) or pager.flight.settle_any():
                    continue
                if (self.num_waits, pager.num_drops) != before or pager.dead_exports or pager.dead:
                    # Others have evicted what was chosen here, brought more, or let go of some.
                    pager.drain()
                    continue
                if not self._may_end():
                    if own and self.num_waits != num_waits:
                        return True  # others may have brought what was counted as missing
                    raise over_budget(pager, need_bytes, operation)
            self._wait(own)
        return self.num_waits != num_waits

    def _enter(self, turn: Turn) -> None:
        turn.is_queued = True
        # Whoever holds pins, or is inside a request of its own, is waited for by the others.
        if self._pins[turn.thread] or any(other.thread == turn.thread for other in self.queue):
            self.queue.appendleft(turn)
        else:
            self.queue.append(turn)

    num_waits = 0  # how often any thread has given up the lock

    def unlocked(self, wait: Callable[[], None]) -> None:
        """Runs a wait that ends by itself, such as for a transfer, with the lock given up."""
        pager = self._pager
        with pager.lock:
            held = self._pin_running(())
            self.num_waits += 1
            mine, pager.running = pager.running, []
            self.pinned(len(held))
            try:
                self._give_up_lock(wait)
            finally:
                pager.running = mine
                self._unpin(held)
                self.pinned(-len(held))

    def pinned(self, num: int) -> None:
        """Counts pins of the calling thread that end by themselves; tells those who wait."""
        thread = threading.get_ident()
        self._pins[thread] += num
        self._pager.num_transient_pins += num
        if not self._pins[thread]:
            del self._pins[thread]
        if num < 0:
            self._wake()

    def _give_up_lock(self, wait: Callable[[], object]) -> None:
        """Runs a wait without the lock. A signal may end it; see [Note: Signals]."""
        lock = self._pager.lock
        # What threading.Condition does with a re-entrant lock, around another kind of wait.
        depth = lock._release_save()  # type: ignore[attr-defined]
        try:
            interruptible(wait)
        finally:
            lock._acquire_restore(depth)  # type: ignore[attr-defined]

    def _wake(self) -> None:
        """Lets those in `_wait` look again."""
        gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def _may_end(self) -> bool:
        """Whether pins exist that end without this request."""
        pager = self._pager
        waiting = self._num_waiting_pins + self._pins[threading.get_ident()]
        return pager.num_transient_pins > waiting or pager.holds.can_end

    def _wait(self, own: Sequence[Page]) -> None:
        """Gives up the lock until a pin or a request ends."""
        pager = self._pager
        held = self._pin_running(own)
        self.num_waits += 1
        mine, pager.running = pager.running, []
        pins = self._pins[threading.get_ident()]
        self._num_waiting_pins += pins
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        try:
            # Nobody tells of the end of others' work: it is asked for.
            timeout_s = 0.001 if pager.holds.works else 1.0
            self._give_up_lock(partial(gate.acquire, timeout=timeout_s))
        finally:
            if gate in self._gates:
                self._gates.remove(gate)
            self._num_waiting_pins -= pins
            self._unpin(held)
            pager.running = mine
            pager.holds.poll()
            pager.drain()

    def _pin_running(self, own: Sequence[Page]) -> list[Page]:
        running = self._pager.running
        held = [p for pages in running if pages is not own for p in pages if p.is_on_device]
        for page in held:
            page.pins += 1
        return held

    @staticmethod
    def _unpin(held: Iterable[Page]) -> None:
        for page in held:
            page.pins -= 1
