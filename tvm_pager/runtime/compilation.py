"""torch.compile is refused by name while a pager is open, until it has a design.

Compiled code is guarded on plain tensors and reads storages without dispatch, so over pages it
would crash or, worse, fall back without a word. Dynamo tells its start callbacks before it compiles
a frame; that is where the error is raised.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from tvm_pager.errors import UnpageableError

__all__ = ["allow_compilation", "refuse_compilation"]

_lock = threading.Lock()
_num_open = 0
_callback: Any = None


def refuse_compilation() -> None:
    """Counts an open pager; the first one registers the callback."""
    global _num_open, _callback
    from torch._dynamo import exc
    from torch._dynamo.callback import callback_handler

    with _lock:
        _num_open += 1
        if _num_open > 1:
            return

        # Dynamo rewraps every other exception, and answers `Unsupported` by running the frame
        # uncompiled.
        class CompilationRefused(UnpageableError, exc.ShortenTraceback):
            pass

        def refuse(arguments: Any) -> None:
            raise CompilationRefused(
                "torch.compile over paged tensors is not supported: compiled code reads storages "
                "that may be absent. Run the model uncompiled "
                "(torch.compiler.set_stance('force_eager')), or close the pager first",
                first_useful_frame=None,
            )

        _callback = refuse
        callback_handler.register_start_callback(refuse)


def allow_compilation() -> None:
    """The counterpart of `refuse_compilation`."""
    global _num_open, _callback
    from torch._dynamo.callback import callback_handler

    with _lock:
        _num_open -= 1
        if not _num_open:
            with contextlib.suppress(ValueError):  # `torch._dynamo.reset()` has removed it
                callback_handler.remove_start_callback(_callback)
            _callback = None
