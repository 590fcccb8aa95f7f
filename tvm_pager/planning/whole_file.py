"""Files that hold all of what was written, or what they held before."""

from __future__ import annotations

import contextlib
import os
import tempfile

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file of mode 0600 beside `path` and puts it in its place. Blocks.

    Raises:
        OSError: it cannot be written; nothing has changed, and nothing is left beside it.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(
            dir=os.path.dirname(os.path.abspath(path)), prefix=".tvm_pager-"
        )
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
        temporary = None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
