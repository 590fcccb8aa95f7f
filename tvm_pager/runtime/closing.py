"""The end of a pager: live pages go back to torch, or are given up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tvm_pager.errors import PagerError, TransferError
from tvm_pager.paging.pager import UNLIMITED_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Protocol

    import torch

    from tvm_pager.memory import Page
    from tvm_pager.runtime.context import PagingContext
    from tvm_pager.transfer.protocol import Lane, Piece

    class Reader(Protocol):
        """Copies a page into memory that is not the device's."""

        def read_to_host(
            self, nbytes: int, pieces: Mapping[Lane, Sequence[Piece]], source: Any = None
        ) -> torch.Tensor: ...


__all__ = ["end"]


def end(
    context: PagingContext, reader: Reader, *, restore: bool, gives_up: bool = False
) -> TransferError | None:
    """Ends every page, then the pager and its backend. Blocks; the lock is held.

    Where that is cut off (Ctrl-C) the pager is still open, with the pages that are left.

    Args:
        context: whose pages.
        reader: takes what does not fit on the device.
        restore: whether pages that are not on the device are read back.
        gives_up: closes although pages could not be read back.

    Returns:
        The error of the first page that could not be read back, if any. The others are plain
        memory, and the pager is open unless it gave up.
    """
    core = context.core
    core.drain()
    budget_bytes, core.budget_bytes = core.budget_bytes, UNLIMITED_BYTES
    failure = None
    try:
        if restore:
            failure = _restore_all(context, reader)
        if failure is not None and gives_up:
            core.notice(f"what could not be read back at close is lost; first: {failure}")
        if not restore or gives_up:
            for page in list(core.table.pages.values()):
                _let_go(context, page)
        if failure is None or gives_up:
            core.close()
            context.is_closed = True
    finally:
        if not context.is_closed:
            core.budget_bytes = budget_bytes
    return failure


def _restore_all(context: PagingContext, reader: Reader) -> TransferError | None:
    num_kept, failure = 0, None
    for page in list(context.core.table.pages.values()):
        try:
            num_kept += not _restore(context, reader, page)
        except TransferError as error:
            failure = failure or error.with_traceback(None)  # else it holds this frame
    if num_kept:
        context.core.notice(
            f"{num_kept} pages did not fit on {context.device} at close and are kept in host "
            "memory; pager.recover(tensor) copies them out"
        )
    return failure


def _restore(context: PagingContext, reader: Reader, page: Page) -> bool:
    """Brings one page home; False if its bytes had to be kept in host memory."""
    storage = page.memory()
    if storage is None:
        return True
    try:
        context.core.admit([page], 0, "close")
    except (PagerError, MemoryError) as error:
        if isinstance(error, TransferError):
            raise
        for ticket in page.readers:  # one of them may be filling the frames
            ticket.wait()
        pieces = context.core.mover.pieces_below(page)
        page.kept = reader.read_to_host(page.nbytes, pieces, page.source)
        return False
    context.forget_storage(storage)
    return True


def _let_go(context: PagingContext, page: Page) -> None:
    """Gives a page on the device to torch, and its bytes up anywhere else."""
    if page.tickets:
        with contextlib.suppress(TransferError):
            context.core.flight.settle(page)
    storage = page.memory()
    if storage is not None and page.is_on_device:
        context.forget_storage(storage)
