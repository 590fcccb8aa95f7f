"""The swap directory, unusable or failing: refused by name, and nothing is lost."""

from __future__ import annotations

import errno
import gc
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tvm_pager
from tests.trials.harness import (
    assert_nothing_left,
    push_to_nvme,
    small_pager,
    spill_folder,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_missing_directory_is_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    with pytest.raises(tvm_pager.ConfigError, match="there") as caught:
        small_pager(tmp_path, nvme=str(missing))
    assert "mkdir" in str(caught.value) or "create" in str(caught.value)
    assert not missing.exists()
    assert_nothing_left(tmp_path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("hello")
    with pytest.raises(tvm_pager.ConfigError, match="a file"):
        small_pager(tmp_path, nvme=str(file))
    assert file.read_text() == "hello"
    assert_nothing_left(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        folder = "/proc/self/fdinfo"  # nobody can create files there, root neither
    else:
        folder = str(spill_folder(tmp_path))
        os.chmod(folder, 0o500)
    with pytest.raises(tvm_pager.PagerError, match=folder):
        small_pager(tmp_path, nvme=folder)
    if os.geteuid() != 0:
        os.chmod(folder, 0o700)
    assert_nothing_left(tmp_path)


def test_a_directory_open_to_everyone_is_refused(tmp_path: Path) -> None:
    folder = spill_folder(tmp_path)
    folder.chmod(0o777)
    with pytest.raises(tvm_pager.ConfigError, match="0777") as caught:
        small_pager(tmp_path)
    assert "chmod" in str(caught.value)
    folder.chmod(0o1777)  # sticky, as /tmp is
    with small_pager(tmp_path):
        pass
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert_nothing_left(tmp_path)


def test_a_swap_file_beyond_the_free_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tvm_pager.ConfigError, match="free") as caught:
        small_pager(tmp_path, nvme_bytes=1 << 60)
    assert str(spill_folder(tmp_path)) in str(caught.value)
    assert_nothing_left(tmp_path)


def test_a_directory_that_fills_up_while_the_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free space was there when asked and is gone when the file is preallocated."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(tvm_pager.PagerError) as caught:
        small_pager(tmp_path)
    assert str(spill_folder(tmp_path)) in str(caught.value)
    assert "space" in str(caught.value).lower()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_disk_that_fails_while_running_loses_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page stays where it is, the tier closes for new pages, and creation says so."""

    def failing(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    with small_pager(tmp_path) as pager:
        kept = [torch.full((1024,), float(i)) for i in range(8)]
        push_to_nvme(pager, *kept[:2])
        for name in ("pwrite", "pwritev", "write", "writev"):
            monkeypatch.setattr(os, name, failing)

        def create() -> None:
            for index in range(8, 100):
                kept.append(torch.full((1024,), float(index)))  # noqa: PERF401 - keeps what was made

        with pytest.raises(tvm_pager.PagerError) as caught:
            create()
        monkeypatch.undo()
        assert os.strerror(code) in str(caught.value)
        assert "nvme" in str(caught.value).lower()
        assert pager.stats().num_failures > 0
        assert len(kept) >= 16
        for index, tensor in enumerate(kept):
            assert tensor.tolist() == [float(index)] * 1024  # creates no page: none may be left
        pager.check_invariants()
        del kept[10:], tensor
        assert (kept[0] + kept[9])[0].item() == 9.0  # and the program goes on
        kept.clear()
        del caught
    gc.collect()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def test_a_failed_read_can_be_tried_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    with small_pager(tmp_path) as pager:
        tensor = torch.arange(1024.0)
        push_to_nvme(pager, tensor)
        for name in ("pread", "preadv", "read", "readv"):
            monkeypatch.setattr(os, name, failing)
        with pytest.raises(tvm_pager.TransferError) as caught:
            tensor.sum()
        monkeypatch.undo()
        assert caught.value.errno == code
        pager.check_invariants()
        assert tensor.sum().item() == 1023 * 512.0
        del tensor, caught
    assert_nothing_left(tmp_path)
