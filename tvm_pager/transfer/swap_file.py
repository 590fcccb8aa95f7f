"""The swap file: one per pager, without a name, preallocated, private, gone with the process.

Owns the descriptors. Engines read and write through them; nobody else opens the file.

[Note: Nothing stays on disk]
    O_TMPFILE gives a file that never had a name, so the kernel frees it when the last descriptor
    goes, also after SIGKILL. Where the file system lacks that, the file is created exclusively in a
    fresh 0700 directory and both are unlinked at once. The freed blocks keep their bytes: on shared
    disks, encrypt the volume.

[Note: Direct or buffered]
    Direct I/O is tried for real, a block out and back, because some file systems accept the flag
    and refuse the I/O. Without it bytes go through the page cache, each write is pushed to the disk
    before it counts as done (so that its errors surface there, not never), and one notice says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import stat
import threading
import weakref
from typing import Literal

from tvm_pager.errors import ConfigError, TransferError
from tvm_pager.units import format_bytes

__all__ = ["SwapFile", "default_margin_bytes", "usable_bytes"]

_LOGGER = logging.getLogger(__name__)
_BLOCK_BYTES = 4096
_MIN_MARGIN_BYTES = 64 << 20
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_WRITE_FAILED = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
_SYNC_FILE_RANGE_FLAGS = 7  # wait before, write, wait after
_OPEN_FILES: weakref.WeakSet[SwapFile] = weakref.WeakSet()
_LIBC = ctypes.CDLL(None, use_errno=True)


def default_margin_bytes(free_bytes: int) -> int:
    """Gives what a swap file leaves free out of `free_bytes`: 2 %, at least 64 MiB. Bytes."""
    return max(_MIN_MARGIN_BYTES, free_bytes // 50)


def usable_bytes(directory: str | os.PathLike[str], margin_bytes: int | None = None) -> int:
    """Gives the size (bytes) of the largest swap file that `directory` takes now; may be 0.

    Raises:
        OSError: the directory cannot be asked.
    """
    usage = os.statvfs(directory)
    return _usable(usage.f_bavail * usage.f_frsize, margin_bytes)


class SwapFile:
    """An open file of fixed size; see [Note: Nothing stays on disk], [Note: Direct or buffered].

    Args:
        directory: where it lies. Refused if others can write there, unless it is sticky.
        nbytes: its size; rounded down to a multiple of 4096.
        margin_bytes: free space to leave; None for `default_margin_bytes`.
        direct: False never tries direct I/O.

    Attributes:
        nbytes: size in bytes.
        io: whether I/O passes by the page cache.
        memory_alignment: bytes; what direct I/O asks of addresses. File offsets and lengths: 4096.
        notices: what the user should know, a sentence each.

    Raises:
        ConfigError: the directory or the space cannot be used.
        TransferError: the operating system failed otherwise.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        nbytes: int,
        *,
        margin_bytes: int | None = None,
        direct: bool = True,
    ) -> None:
        self._direct_fd = self._fd = -1
        self.directory = os.path.abspath(directory)
        self.nbytes = nbytes // _BLOCK_BYTES * _BLOCK_BYTES
        self.io: Literal["direct", "buffered"] = "buffered"
        self.memory_alignment = 1
        self.notices: list[str] = []
        self._lock = threading.Lock()
        if self.nbytes <= 0:
            raise ConfigError(
                f"swap file of {nbytes} bytes in {self.directory}: {_BLOCK_BYTES} are the least"
            )
        try:
            self._fd = _open_nameless(self.directory)
            _preallocate(self._fd, self.nbytes, margin_bytes, self.directory)
            if direct:
                self._open_direct()
        except BaseException:
            self.close()
            raise
        _OPEN_FILES.add(self)

    @property
    def path(self) -> str:
        """A path that this process can open the file by, while it is open."""
        return f"/proc/self/fd/{self._checked(self._fd)}"

    @property
    def fd(self) -> int:
        """The buffered descriptor.

        Raises:
            TransferError: the file is closed.
        """
        return self._checked(self._fd)

    @property
    def direct_fd(self) -> int:
        """The O_DIRECT descriptor, also after `degrade`; see `io`.

        Raises:
            TransferError: the file is closed, or was never opened so.
        """
        return self._checked(self._direct_fd)

    def degrade(self, reason: str) -> None:
        """Goes on through the page cache, with one notice. Does not disturb I/O in flight."""
        with self._lock:
            if self.io == "direct" or not self.notices:
                self.io = "buffered"
                self.memory_alignment = 1
                self.notices.append(
                    f"swap file in {self.directory}: direct I/O refused ({reason}); using buffered "
                    f"I/O, which costs host memory and speed. A directory on a local disk avoids it"
                )
                _LOGGER.warning("%s", self.notices[-1])

    def push(self, offset: int, nbytes: int) -> None:
        """Waits until buffered writes to the range are on the disk.

        Raises:
            TransferError: they failed.
        """
        fd = self.fd
        result = _LIBC.sync_file_range(
            fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_FLAGS
        )
        code = ctypes.get_errno() if result else 0
        if code in _WRITE_FAILED:
            raise TransferError(
                f"writing {nbytes} bytes at {offset} of the swap file in {self.directory}: "
                f"{os.strerror(code)}",
                code,
            )

    def close(self) -> None:
        """Closes the descriptors; the space is free once engines have closed theirs. Idempotent."""
        _OPEN_FILES.discard(self)
        for fd in (self._direct_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._direct_fd = self._fd = -1

    def __del__(self) -> None:
        """Frees the space of a pager that was forgotten; I/O in flight holds the file."""
        self.close()

    def _checked(self, fd: int) -> int:
        if fd < 0:
            raise TransferError(
                f"the swap file in {self.directory} is closed (in this process: a forked child has "
                f"no pager); make a new pager",
                errno.EBADF,
            )
        return fd

    def _open_direct(self) -> None:
        try:
            self._direct_fd = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            self.memory_alignment = _probe_direct(self._direct_fd)
            self.io = "direct"
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise TransferError(
                    f"swap file in {self.directory}: first write failed ({error.strerror})",
                    error.errno,
                ) from error
            self.degrade(error.strerror or str(error))


def _probe_direct(fd: int) -> int:
    """Writes and reads a block; gives the address alignment (bytes) that this needs.

    Raises:
        OSError: direct I/O does not work here.
    """
    with mmap.mmap(-1, 3 * _BLOCK_BYTES) as memory, memoryview(memory) as view:
        for alignment in (512, _BLOCK_BYTES):
            with view[alignment : alignment + _BLOCK_BYTES] as block:
                try:
                    block[:] = b"\x5a" * _BLOCK_BYTES
                    written = os.pwritev(fd, [block], 0)
                    block[:] = bytes(_BLOCK_BYTES)
                    read = os.preadv(fd, [block], 0)
                except OSError as error:
                    if error.errno in _NO_DIRECT and alignment < _BLOCK_BYTES:
                        continue
                    raise
                if written == read == _BLOCK_BYTES and block[0] == block[-1] == 0x5A:
                    return alignment
                break
    raise OSError(errno.EINVAL, "a block that was written did not come back")


def _open_nameless(directory: str) -> int:
    try:
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"swap directory {directory!r}: {error.strerror}; create it or name another"
        ) from error
    try:
        mode = os.fstat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"swap directory {directory!r} has mode {stat.S_IMODE(mode):04o}: others can write "
                f"there; chmod o-w or chmod +t it, or name another"
            )
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_EXCL  # here O_EXCL means: can never get a name
        try:
            fd = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=parent)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            fd = _create_and_unlink(parent)
    except OSError as error:
        raise ConfigError(
            f"swap directory {directory!r}: no file can be made there ({error.strerror}); "
            f"change its mode or name another"
        ) from error
    finally:
        os.close(parent)
    return fd


def _create_and_unlink(parent: int) -> int:
    name = f"tvm_pager-{os.getpid()}-{secrets.token_hex(8)}"  # of bounded length
    os.mkdir(name, 0o700, dir_fd=parent)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        own = os.open(name, flags, dir_fd=parent)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open("swap", flags, 0o600, dir_fd=own)
            try:
                os.unlink("swap", dir_fd=own)
            except BaseException:
                os.close(fd)
                raise
        finally:
            os.close(own)
    finally:
        os.rmdir(name, dir_fd=parent)
    return fd


def _preallocate(fd: int, nbytes: int, margin_bytes: int | None, directory: str) -> None:
    usage = os.fstatvfs(fd)
    free_bytes = usage.f_bavail * usage.f_frsize
    room = _usable(free_bytes, margin_bytes)
    if nbytes > room:
        raise ConfigError(
            f"swap file of {format_bytes(nbytes)}: {directory} has {format_bytes(free_bytes)} "
            f"free, of which {format_bytes(free_bytes - room)} stay for others; give nvme_bytes of "
            f"{format_bytes(room)} at most, or another directory"
        )
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise TransferError(
                f"swap file of {format_bytes(nbytes)} in {directory}: {error.strerror}", error.errno
            ) from error
        raise ConfigError(
            f"swap file of {format_bytes(nbytes)}: {directory} said {error.strerror!r} with "
            f"{format_bytes(free_bytes)} free; give less nvme_bytes (quota, ulimit -f?)"
        ) from error


def _usable(free_bytes: int, margin_bytes: int | None) -> int:
    margin = default_margin_bytes(free_bytes) if margin_bytes is None else margin_bytes
    return max(0, free_bytes - margin) // _BLOCK_BYTES * _BLOCK_BYTES


def _close_in_child() -> None:
    """Closes a forked child's descriptors, so that the space is free when the parent ends."""
    for file in list(_OPEN_FILES):
        with contextlib.suppress(OSError):
            file.close()


os.register_at_fork(after_in_child=_close_in_child)
