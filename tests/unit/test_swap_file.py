"""The swap file: nameless, private, sized with a margin, closed in children, direct if possible."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path

import pytest

from tests.interpreter import run_program, start_program
from tvm_pager.errors import ConfigError, TransferError
from tvm_pager.transfer import swap_file
from tvm_pager.transfer.swap_file import SwapFile, default_margin_bytes, usable_bytes

MIB = 1 << 20


def test_no_name_appears_and_the_space_is_taken(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, 4 * MIB + 5)
    try:
        status = os.fstat(file.fd)
        assert os.listdir(tmp_path) == []
        assert status.st_nlink == 0
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == file.nbytes == 4 * MIB
        assert status.st_blocks * 512 >= 4 * MIB
        assert not os.get_inheritable(file.fd)
    finally:
        file.close()


def test_path_opens_the_same_file(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, MIB)
    os.pwrite(file.fd, b"same", 4096)
    with open(file.path, "rb") as other:
        assert os.pread(other.fileno(), 4, 4096) == b"same"
    file.close()
    with pytest.raises(TransferError, match="closed") as caught:
        _ = file.path
    assert caught.value.errno == errno.EBADF
    file.close()


def test_without_nameless_files_name_and_folder_are_unlinked_at_once(tmp_path: Path) -> None:
    parent = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fd = swap_file._create_and_unlink(parent)
    try:
        assert os.listdir(tmp_path) == []
        assert os.fstat(fd).st_nlink == 0
        assert stat.S_IMODE(os.fstat(fd).st_mode) & 0o077 == 0
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
        os.close(parent)


def test_direct_io_is_found_out_by_doing_it(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, MIB)
    try:
        if file.io == "buffered":
            assert len(file.notices) == 1
            pytest.skip(f"no direct I/O in {tmp_path}")
        assert file.notices == []
        assert file.memory_alignment in (512, 4096)
        file.direct_fd  # noqa: B018  # raises if there is none
    finally:
        file.close()


def test_degrading_gives_one_notice(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, MIB)
    before = len(file.notices)
    was_direct = file.io == "direct"
    file.degrade("Invalid argument")
    file.degrade("Invalid argument")
    assert file.io == "buffered"
    assert len(file.notices) == before + was_direct
    assert "Invalid argument" in file.notices[-1]
    file.close()


def test_buffered_by_wish_is_no_news(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, MIB, direct=False)
    assert (file.io, file.notices) == ("buffered", [])
    file.push(0, 4096)
    file.close()


@pytest.mark.parametrize("nbytes", [0, 4095, -1])
def test_too_small_is_refused(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="4096"):
        SwapFile(tmp_path, nbytes)


def test_more_than_the_free_space_less_the_margin_is_refused_with_numbers(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    free_bytes = usage.f_bavail * usage.f_frsize
    with pytest.raises(ConfigError, match=r"free.*stay for others.*at most"):
        SwapFile(tmp_path, MIB, margin_bytes=2 * free_bytes)
    with pytest.raises(ConfigError, match="at most"):
        SwapFile(tmp_path, 2 * free_bytes)
    assert os.listdir(tmp_path) == []


def test_margin_is_two_percent_and_at_least_64_mib(tmp_path: Path) -> None:
    assert default_margin_bytes(0) == 64 * MIB
    assert default_margin_bytes(100 << 40) == 2 << 40
    assert usable_bytes(tmp_path, margin_bytes=1 << 60) == 0
    assert usable_bytes(tmp_path) % 4096 == 0
    assert usable_bytes(tmp_path) < usable_bytes(tmp_path, margin_bytes=0)


def test_space_that_cannot_be_allocated_is_a_config_error(tmp_path: Path) -> None:
    program = """
import resource, sys
from tvm_pager.errors import ConfigError
from tvm_pager.transfer.swap_file import SwapFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    SwapFile(sys.argv[1], 2 << 20, margin_bytes=0)
except ConfigError as error:
    print(error)
    sys.exit(17)
"""
    run = run_program(program, str(tmp_path))
    assert run.returncode == 17, run.stderr
    assert "2.00 MiB" in run.stdout
    assert "less nvme_bytes" in run.stdout
    assert os.listdir(tmp_path) == []


def test_missing_directory_and_file_in_its_place_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        SwapFile(tmp_path / "absent", MIB)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        SwapFile(tmp_path / "file", MIB)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o1777, False), (0o775, False)])
def test_a_directory_that_others_can_write_is_refused_unless_sticky(
    tmp_path: Path, mode: int, is_refused: bool
) -> None:
    directory = tmp_path / "swap"
    directory.mkdir()
    directory.chmod(mode)
    if is_refused:
        with pytest.raises(ConfigError, match="others can write"):
            SwapFile(directory, MIB)
    else:
        SwapFile(directory, MIB).close()


def test_odd_directory_names_do_not_matter(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 200) / ("ÄÖ €\n'\" " + "y" * 200)
    directory.mkdir(parents=True)
    SwapFile(directory, MIB).close()


def test_two_files_in_one_directory_are_two_files(tmp_path: Path) -> None:
    one, two = SwapFile(tmp_path, MIB), SwapFile(tmp_path, MIB)
    os.pwrite(one.fd, b"one", 0)
    os.pwrite(two.fd, b"two", 0)
    assert (os.pread(one.fd, 3, 0), os.pread(two.fd, 3, 0)) == (b"one", b"two")
    one.close()
    two.close()


def test_a_forked_child_has_the_file_closed(tmp_path: Path) -> None:
    program = """
import os, sys
from tvm_pager.errors import TransferError
from tvm_pager.transfer.swap_file import SwapFile
file = SwapFile(sys.argv[1], 1 << 20)
before = file.fd
child = os.fork()
if child == 0:
    try:
        file.fd
    except TransferError:
        try:
            os.fstat(before)
        except OSError:
            os._exit(17)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert file.fd == before
os.pwrite(file.fd, b"x", 0)
"""
    run = run_program(program, str(tmp_path))
    assert run.returncode == 0, run.stderr


def test_nothing_is_left_after_sigkill(tmp_path: Path) -> None:
    program = """
import sys, time
from tvm_pager.transfer.swap_file import SwapFile
file = SwapFile(sys.argv[1], 8 << 20)
print("ready", flush=True)
time.sleep(100)
"""
    with start_program(program, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert os.listdir(tmp_path) == []
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
