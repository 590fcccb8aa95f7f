"""Read-only files whose ranges stand behind pages: weights that are read where they lie.

[Note: A file instead of frames]
    A page backed by a file takes no frame in any tier and is never written back while it is clean:
    its eviction moves nothing, its fetch reads the range again. Reads go through the page cache,
    because a range starts where the file's format says and not where direct I/O could; memory that
    the kernel keeps there is its own and is given up under pressure. A file that changes under us
    would change weights silently, so size, inode and modification time are compared at each read.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NamedTuple

from tvm_pager.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FileRange", "SourceFile"]


class _Read:
    """The completion of a read that has ended well: `read` raises otherwise."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Does nothing."""


_READ = _Read()


class SourceFile:
    """An open file. It is closed when the last range of it is gone.

    Args:
        path: of a regular file.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be opened: {error.strerror}") from error
        self._identity = self._stat()

    @property
    def nbytes(self) -> int:
        return self._identity[0]

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer from `offset` (bytes). Blocks; releases the GIL.

        Raises:
            TransferError: the disk failed, or the file is not what it was.
        """
        if self._stat() != self._identity:
            raise TransferError(
                f"{self.path} has changed since its tensors were loaded; load them again, or copy "
                "the file before another program writes it",
                errno.ESTALE,
            )
        done = 0
        while done < len(buffer):
            try:
                step = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise TransferError(
                    f"reading {len(buffer)} bytes at {offset} of {self.path}: {error.strerror}; "
                    "check the disk (dmesg)",
                    error.errno,
                ) from error
            if not step:
                raise TransferError(
                    f"{self.path} ends after {offset + done} bytes, {offset + len(buffer)} were "
                    "asked for; the file is damaged",
                    errno.EIO,
                )
            done += step

    def _stat(self) -> tuple[int, int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_ino, status.st_mtime_ns


class FileRange(NamedTuple):
    """Where the bytes of a page lie: the `source` of a file-backed page."""

    file: SourceFile
    offset: int
    nbytes: int

    def read(self, offset: int, buffers: Sequence[memoryview]) -> _Read:
        """Fills the buffers one after the other from `offset` of the range; as `SourceFile.read`.

        Blocks.
        """
        at = self.offset + offset
        for buffer in buffers:
            self.file.read(at, buffer)
            at += len(buffer)
        return _READ
