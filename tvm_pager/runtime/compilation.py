"""torch.compile is refused by name while a pager is open, until it has a design.

Compiled code is guarded on plain tensors and reads storages without dispatch, so over pages it
would crash or, worse, fall back without a word. Dynamo tells its start callbacks before it compiles
a frame; that is where the error is raised.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import UnpageableError

if TYPE_CHECKING:
    from tvm_pager.runtime.context import PagingContext

__all__ = ["allow_compilation", "refuse_compilation"]

_lock = threading.Lock()
_open: weakref.WeakSet[PagingContext] = weakref.WeakSet()  # what is forgotten refuses nothing
_callback: Any = None


def refuse_compilation(context: PagingContext) -> None:
    """Until the pager is closed, or forgotten; the first one registers the callback."""
    global _callback
    from torch._dynamo import exc
    from torch._dynamo.callback import callback_handler

    with _lock:
        _open.add(context)
        if _callback is not None:
            return

        # Dynamo rewraps every other exception, and answers `Unsupported` by running the frame
        # uncompiled.
        class CompilationRefused(UnpageableError, exc.ShortenTraceback):
            pass

        def refuse(arguments: Any) -> None:
            if all(context.is_closed for context in _open):  # as in a forked child
                return
            raise CompilationRefused(
                "torch.compile over paged tensors is not supported: compiled code reads storages "
                "that may be absent. Run the model uncompiled "
                "(torch.compiler.set_stance('force_eager')), or close the pager first",
                first_useful_frame=None,
            )

        _callback = refuse
        callback_handler.register_start_callback(refuse)


def allow_compilation(context: PagingContext) -> None:
    """The counterpart of `refuse_compilation`. Idempotent."""
    global _callback
    from torch._dynamo.callback import callback_handler

    with _lock:
        _open.discard(context)
        if not _open and _callback is not None:
            with contextlib.suppress(ValueError):  # `torch._dynamo.reset()` has removed it
                callback_handler.remove_start_callback(_callback)
            _callback = None
