"""The hardware profile is measured, kept and found again, and leaves nothing behind."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from tests.interpreter import run_program, start_program
from tests.tools.profile_rig import KIB, QUICK_TINY, TINY, no_pager
from tvm_pager import Pager
from tvm_pager.errors import ConfigError, PagerError, TransferError
from tvm_pager.observe.profile import cache, command, disk
from tvm_pager.observe.profile.identity import identify
from tvm_pager.observe.profile.measure import measure
from tvm_pager.planning import HardwareProfile

if TYPE_CHECKING:
    from tvm_pager.planning.hardware.rates import Curve

CPU = torch.device("cpu")


def measure_tiny(
    nvme: Path | None,
    say: Callable[[str], None] = lambda _: None,
    make_pager: Any = no_pager,
    **changes: Any,
) -> HardwareProfile:
    effort = dataclasses.replace(TINY, **changes)
    return measure(CPU, nvme, identify(CPU, nvme), effort, make_pager, say)


def xs(curve: Curve) -> list[int]:
    return [point.x for point in curve.points]


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[Path]:
    """A directory for the disk's file, and settings of torch's: all are checked at the end."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    torch.set_num_threads(1)
    settings = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    num_threads = threading.active_count()
    yield nvme
    assert (torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision) == settings
    assert threading.active_count() <= num_threads
    assert list(nvme.iterdir()) == []


# --- measuring -----------------------------------------------------------------------------------


class CountingPager(Pager):
    """Keeps how many operations went through each pager of this kind."""

    num_operations: ClassVar[list[int]] = []

    def __exit__(self, *error: Any) -> None:
        self.num_operations.append(self.stats().num_operations)
        super().__exit__(*error)


@pytest.mark.bench
def test_everything_is_measured(unchanged: Path) -> None:
    lines: list[str] = []
    profile = measure_tiny(unchanged, lines.append, CountingPager)
    assert len(lines) == 5
    assert profile.device.is_stand_in
    assert "stand in" in profile.notices[0]
    for link in (profile.h2d, profile.d2h):
        assert xs(link.by_chunk) == xs(link.duplex_by_chunk) == [4 * KIB, 64 * KIB]
    assert xs(profile.duplex_total_bytes_per_s) == [4 * KIB, 64 * KIB]
    assert [found.engine for found in profile.disks] == ["raw", "posix"]
    assert xs(profile.disk("raw").read.by_chunk) == [4 * KIB, 16 * KIB]
    assert xs(profile.disk("posix").write.by_chunk) == [16 * KIB]
    num_cores = len(os.sched_getaffinity(0))
    assert xs(profile.host.adamw_params_per_s) == sorted({1, num_cores})
    assert profile.device.matmul_flop_per_s.tf32 is None
    (num_operations,) = CountingPager.num_operations
    assert num_operations > TINY.num_rounds * 6 * TINY.num_calls  # six blocks, one is warm-up
    assert profile.machine.nvme_device is not None
    assert HardwareProfile.from_json(profile.to_json()) == profile


def test_a_profile_without_a_directory_has_no_disk(unchanged: Path) -> None:
    profile = measure_tiny(None)
    assert (profile.disks, profile.machine.nvme_device) == ((), None)


@pytest.mark.parametrize("section", ["host <->", "disk", "host:", "device", "overhead"])
def test_an_interrupt_in_any_section_leaves_nothing(unchanged: Path, section: str) -> None:
    def interrupt(line: str) -> None:
        if line.startswith(section):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_tiny(unchanged, interrupt)


@pytest.mark.parametrize("num_calls", [1, 30, 300])
def test_an_interrupt_while_the_disk_works_leaves_nothing(
    unchanged: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    real, count, lock = os.pwritev, [0], threading.Lock()
    main = threading.main_thread().ident
    assert main is not None

    def counting(fd: int, buffers: Sequence[Any], offset: int, /) -> int:
        with lock:
            count[0] += 1
            if count[0] == num_calls:
                signal.pthread_kill(main, signal.SIGINT)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", counting)
    with pytest.raises(KeyboardInterrupt):
        measure_tiny(unchanged, disk_round_s=0.2)


@pytest.mark.parametrize("num_calls", [1, 12])
def test_a_disk_that_fails_is_an_error_and_leaves_nothing(
    unchanged: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    real, count = os.preadv, [0]

    def failing(fd: int, buffers: Sequence[Any], offset: int, /) -> int:
        count[0] += 1
        # The first call is the swap file's own probe of direct I/O.
        if count[0] > num_calls:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(TransferError, match=r"reading \d+ bytes at") as caught:
        measure_tiny(unchanged)
    assert caught.value.errno == errno.EIO
    assert str(unchanged) in str(caught.value)


def test_a_disk_without_direct_io_is_measured_through_the_page_cache(
    unchanged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def buffered_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", buffered_only)
    profile = measure_tiny(unchanged)
    assert [found.io for found in profile.disks] == ["buffered", "buffered"]
    assert any("direct I/O refused" in notice for notice in profile.notices)


@pytest.mark.parametrize("free_bytes", [3 << 20, 8 << 20])
def test_a_short_disk_gets_a_file_of_a_quarter_of_it_or_an_error(
    unchanged: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    sizes: list[int] = []

    class Spy(disk.SwapFile):
        def __init__(self, directory: Any, nbytes: int) -> None:
            sizes.append(nbytes)
            super().__init__(directory, nbytes)

    monkeypatch.setattr(disk, "SwapFile", Spy)
    monkeypatch.setattr(disk, "usable_bytes", lambda _: free_bytes)
    if free_bytes < 4 << 20:
        with pytest.raises(ConfigError, match="too little to measure"):
            measure_tiny(unchanged)
    else:
        measure_tiny(unchanged, disk_bytes=1 << 30)
        assert sizes == [2 << 20]


def test_a_pager_that_is_active_is_refused(unchanged: Path) -> None:
    with (
        Pager(torch_device="cpu", host="1MiB"),
        pytest.raises(PagerError, match="before entering"),
    ):
        measure_tiny(unchanged)


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command in here, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "QUICK", QUICK_TINY)

    def run(*arguments: object) -> int:
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers(), no_pager)
        given = ["profile", "--torch-device", "cpu", "--quick", *map(str, arguments)]
        parsed = parser.parse_args(given)
        return int(parsed.command(parsed))

    return run


def test_the_command_shows_a_table_and_keeps_the_profile(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvme").mkdir()
    json_file = tmp_path / "profile.json"
    assert run_command("--nvme", tmp_path / "nvme", "--json", json_file) == 0
    table, progress = capsys.readouterr()
    headings = [part.partition("\n")[0] for part in table.split("\n\n")]
    assert [heading.split(",")[0] for heading in headings[1:7]] == [
        "host <-> device (CPU stand-in)",
        "disk",
        "disk",
        "host",
        "device (CPU stand-in)",
        "overhead (CPU stand-in)",
    ]
    assert "overhead of single operations" in progress
    profile = HardwareProfile.load(json_file)
    assert run_command("--nvme", tmp_path / "nvme") == 0
    again, progress = capsys.readouterr()
    assert again == table
    assert f"profile-{profile.machine.key}-quick.json" in progress


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--nvme", "/absent"], "--nvme /absent"),
        (["--json", "/absent/x.json"], "--json /absent/x.json"),
        (["--json", "/"], "--json /"),
    ],
)
def test_a_mistake_is_said_before_anything_is_measured(
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    mentions: str,
) -> None:
    with pytest.raises(ConfigError, match=mentions):
        run_command(*arguments)
    assert capsys.readouterr() == ("", "")


def test_the_command_line_knows_it_and_helps_without_torch() -> None:
    result = run_program(
        "import sys; from tvm_pager.cli import main\n"
        "try: main(['profile', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit(str([name for name in ('torch', 'numpy') if name in sys.modules]))"
    )
    assert "usage: tvm-pager profile" in result.stdout
    assert result.stderr == "[]\n"


def test_ctrl_c_ends_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    nvme, cached = tmp_path / "nvme", tmp_path / "cache"
    nvme.mkdir()
    process = start_program(
        "import os, sys; os.environ['XDG_CACHE_HOME'] = sys.argv[1]\n"
        "from tvm_pager.cli import main\n"
        "sys.exit(main(['profile', '--quick', '--torch-device', 'cpu', '--nvme', sys.argv[2]]))",
        cached,
        nvme,
    )
    with process:
        assert process.stderr is not None
        assert any("disk: " in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read().endswith("tvm-pager: interrupted\n")
    assert list(nvme.iterdir()) == []
    assert not cached.exists()
