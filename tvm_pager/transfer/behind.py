"""What the copies of a transfer come behind: kernels that use its memory, tickets that fill it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tvm_pager.transfer.device_copy import Copier, SlabRange
    from tvm_pager.transfer.protocol import Ticket

__all__ = ["CopierBehind", "Waitable", "after_events", "after_tickets"]


class Waitable(Protocol):
    """Work queued on a device, such as a CUDA event."""

    def synchronize(self) -> object:
        """Blocks until it has ended. Releases the GIL."""


class CopierBehind:
    """Copies of one transfer on a disk's lane, behind what uses its memory. The host waits for it.

    Not the copier's stream, which two transfers share: the one would wait for the other's kernels.

    Args:
        copier: makes the copies.
        waits: what comes first.
    """

    def __init__(self, copier: Copier, waits: Sequence[Waitable]) -> None:
        self._copier = copier
        self._waits = waits

    def copy(
        self, storage: torch.UntypedStorage, page_offset: int, place: SlabRange, *, down: bool
    ) -> None:
        self._wait()
        self._copier.copy(storage, page_offset, place, down=down)

    def finish(self) -> None:
        self._wait()
        self._copier.finish()

    def _wait(self) -> None:
        for work in self._waits:
            work.synchronize()


def after_events(
    waits: Sequence[torch.cuda.Event], stream: torch.cuda.Stream, steps: Iterator[bool]
) -> Iterator[bool]:
    """Lets the copies come after what was queued elsewhere when the transfer was submitted."""
    for event in waits:
        # A transfer that was queued for a while finds its kernels done, and the link idles less
        # between two copies without a wait there.
        if not event.query():  # type: ignore[no-untyped-call]
            stream.wait_event(event)
    yield from steps


def after_tickets(tickets: Sequence[Ticket], steps: Iterator[bool]) -> Iterator[bool]:
    """The same where the copies begin in a thread, which waits."""
    for ticket in tickets:
        ticket.wait()
    yield from steps
