"""A transfer on its way between the bytearrays of `RamBackend`."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tvm_pager.errors import TransferError

if TYPE_CHECKING:
    from tvm_pager.transfer.protocol import Transfer
    from tvm_pager.transfer.ram_backend import RamBackend

__all__ = ["RamTicket", "ram_ticket"]


class RamTicket:
    """A transfer on its way; see [Note: How it corrupts] and [Note: Time] in ram_backend.py."""

    __slots__ = (
        "_backend",
        "_delivered",
        "_failure",
        "_is_done",
        "_moments",
        "_num_ticks",
        "block",
        "error",
        "transfer",
    )

    def __init__(
        self,
        backend: RamBackend,
        transfer: Transfer,
        block: bytearray | None,
        moments: list[int],
        failure: TransferError | None,
    ) -> None:
        self.transfer = transfer
        self.error: TransferError | None = None
        self.block = block  # captured at submit, as a copy engine captures an address
        self._backend = backend
        self._failure = failure
        self._delivered: bytes | None = None
        self._is_done = False
        self._moments = moments  # still to come, of: first half, second half, end
        self._num_ticks = 0

    @property
    def is_certain(self) -> bool:
        return self._failure is None

    def done(self) -> bool:
        if not self._is_done:
            self._backend.tick()
        return self._is_done

    def wait(self) -> None:
        while not self._is_done:
            self._backend.tick()
        if self.error is not None:
            raise self.error.with_traceback(None)

    def advance(self) -> None:
        """Lets one moment pass: moves what is due."""
        if any(not ram_ticket(ticket).is_over for ticket in self.transfer.behind):
            return
        self._num_ticks += 1
        while len(self._moments) > 1 and self._moments[0] < self._num_ticks:
            is_second = len(self._moments) == 2
            del self._moments[0]
            if self._delivered is not None:
                if self._backend.source_of(self) != self._delivered:
                    self._backend.hazards.append(f"source of {self.transfer} changed in flight")
            elif not is_second or self._failure is None:  # a failure leaves the job half done
                self._backend.copy_half(self, is_second=is_second)

    def deliver(self) -> None:
        """Lets the device have the bytes now, as work queued behind the copy will find them.

        The source is looked at again at the copy's own moments.
        """
        for ticket in self.transfer.behind:
            ticket.wait()
        if self._delivered is None and len(self._moments) > 1:
            for is_second in (False, True):
                self._backend.copy_half(self, is_second=is_second)
            self._delivered = self._backend.source_of(self)
        self.block = None

    def cancel(self) -> bool:
        """Ends it if nothing has moved yet."""
        if len(self._moments) < 3 or self._delivered is not None or self._is_done:
            return False
        self._failure = TransferError(f"{self.transfer} was cancelled", errno.ECANCELED)
        self._moments = []
        self.end()
        return True

    @property
    def is_over(self) -> bool:
        """As `done`, and the clock stands still."""
        return self._is_done

    @property
    def is_due(self) -> bool:
        return len(self._moments) == 1 and self._moments[0] < self._num_ticks

    def end(self) -> None:
        """Marks it done, well or not."""
        self._is_done = True
        self.error = self._failure
        self.block = None
        self.transfer.behind = ()


def ram_ticket(ticket: object) -> RamTicket:
    """Refuses the tickets of other backends."""
    if not isinstance(ticket, RamTicket):
        raise AssertionError(f"{type(ticket).__name__} is no RamTicket")
    return ticket
