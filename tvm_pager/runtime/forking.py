"""A forked child has no pager: what was on the device is plain memory there, the rest is absent.

[Note: After a fork]
    The child has a copy of the device memory of a CPU, but neither the slab nor the swap file, and
    none of the threads. So its pagers are closed from the start: they make no pages, move nothing
    and take no lock. The forking thread holds every pager's lock across the fork: another thread's
    operation is over then, and the books agree with the storages. Memory of a GPU cannot be used in
    a forked child; there each page is refused by name.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from tvm_pager.memory import PageState
from tvm_pager.runtime.storage import unbind

if TYPE_CHECKING:
    from tvm_pager.runtime.context import PagingContext

__all__ = ["close_in_children"]

_open: weakref.WeakSet[PagingContext] = weakref.WeakSet()
_forking = threading.local()  # `contexts`: those whose locks the thread holds across its fork


def close_in_children(context: PagingContext) -> None:
    """From now on a child that is forked has this pager closed; see [Note: After a fork]."""
    _open.add(context)


def _before_fork() -> None:
    # In one order, so that two threads that fork do not wait for each other.
    _forking.contexts = sorted((c for c in _open if not c.is_closed), key=id)
    for context in _forking.contexts:
        context.core.lock.acquire()


def _in_parent() -> None:
    contexts, _forking.contexts = _forking.contexts, ()
    for context in contexts:
        context.core.lock.release()


def _in_child() -> None:
    contexts = _forking.contexts
    _in_parent()
    _open.clear()
    for context in contexts:
        context.is_closed = context.is_forked = True
        context.core.watch = None
        if context.is_cpu:
            for page in list(context.core.table.pages.values()):
                storage = page.memory()
                is_here = page.state is PageState.RESIDENT or page.state is PageState.WRITING_BACK
                if storage is not None and is_here:
                    unbind(storage)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
