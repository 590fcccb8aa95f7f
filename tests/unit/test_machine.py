"""What the machine allows, read from trees of files that look like machines and containers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interpreter import run_program
from tvm_pager.errors import ConfigError
from tvm_pager.machine import (
    Limit,
    available_host_bytes,
    host_limit_bytes,
    host_limits,
    page_lock_limit,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
UNLIMITED_V1 = 9223372036854771712

Write = Callable[[str, object], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of the fake machine, which has 64 GiB, 48 of them available, and no limits."""

    def write(name: str, text: object) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    write(
        "proc/meminfo",
        f"MemTotal:       {64 * GIB // KIB} kB\nMemFree:         {4 * GIB // KIB} kB\n"
        f"MemAvailable:   {48 * GIB // KIB} kB",
    )
    write_limits(write)
    write("proc/self/status", f"Name:\tpython\nVmSize:\t {3 * MIB} kB\nVmData:\t {MIB} kB")
    write("proc/self/cgroup", "")
    write("proc/self/mountinfo", "22 27 0:21 / /proc rw,relatime - proc proc rw")
    return write


def write_limits(write: Write, **given: object) -> None:
    rows = {"Max address space": "space", "Max data size": "data", "Max locked memory": "lock"}
    lines = ["Limit                     Soft Limit           Hard Limit           Units     "]
    for name, key in rows.items():
        lines.append(f"{name:<26}{given.get(key, 'unlimited')!s:<21}{'unlimited':<21}bytes     ")
    write("proc/self/limits", "\n".join(lines))


def in_v2(write: Write, group: str, root: str = "/") -> None:
    write("proc/self/cgroup", f"0::{group}")
    write("proc/self/mountinfo", V2.format(root=root))


def in_v1(write: Write, group: str, root: str = "/") -> None:
    write("proc/self/cgroup", f"4:cpu,cpuacct:/elsewhere\n3:memory:{group}\n0::/unified")
    write("proc/self/mountinfo", V1.format(root=root))


# --- the machine itself --------------------------------------------------------------------------


def test_without_limits_it_is_the_physical_memory(write: Write, tmp_path: Path) -> None:
    assert host_limits(tmp_path) == [Limit(64 * GIB, "the physical memory")]
    assert host_limit_bytes(tmp_path) == Limit(64 * GIB, "the physical memory")
    assert available_host_bytes(tmp_path).nbytes == 48 * GIB


def test_an_old_kernel_without_memavailable_counts_all_memory(write: Write, tmp_path: Path) -> None:
    write("proc/meminfo", f"MemTotal: {8 * MIB} kB")
    assert available_host_bytes(tmp_path) == Limit(8 * GIB, "the physical memory")


@pytest.mark.parametrize("text", ["", "MemTotal: lots kB"])
def test_a_machine_that_does_not_say_is_an_error_with_a_remedy(
    write: Write, tmp_path: Path, text: str
) -> None:
    write("proc/meminfo", text)
    with pytest.raises(ConfigError, match=r"MemTotal.*mount /proc"):
        host_limit_bytes(tmp_path)


def test_an_empty_root_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MemTotal.*mount /proc"):
        available_host_bytes(tmp_path)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"space": 5 * GIB}, "ulimit -v"), ({"data": 3 * GIB}, "ulimit -d")],
)
def test_an_address_space_limit_leaves_what_is_not_mapped_yet(
    write: Write, tmp_path: Path, limits: dict[str, int], reason: str
) -> None:
    """The process has mapped 3 GiB, 1 GiB of it private and writable."""
    write_limits(write, **limits)
    for limit in (host_limit_bytes(tmp_path), available_host_bytes(tmp_path)):
        assert limit.nbytes == 2 * GIB
        assert reason in limit.reason


def test_a_process_beyond_its_address_space_limit_has_nothing_left(
    write: Write, tmp_path: Path
) -> None:
    write_limits(write, space=GIB)
    assert host_limit_bytes(tmp_path).nbytes == 0


def test_the_locked_memory_limit_is_reported_but_limits_nothing(
    write: Write, tmp_path: Path
) -> None:
    assert page_lock_limit(tmp_path) is None
    write_limits(write, lock=65536)
    limit = page_lock_limit(tmp_path)
    assert limit is not None
    assert limit.nbytes == 65536
    assert "ulimit -l" in limit.reason
    assert host_limit_bytes(tmp_path).nbytes == 64 * GIB


# --- control groups, version 2 -------------------------------------------------------------------


def test_memory_max_of_the_own_group(write: Write, tmp_path: Path) -> None:
    in_v2(write, "/user.slice/job")
    write("sys/fs/cgroup/user.slice/job/memory.max", 10 * GIB)
    limit = host_limit_bytes(tmp_path)
    assert limit.nbytes == 10 * GIB
    assert limit.reason == "memory.max of the control group /sys/fs/cgroup/user.slice/job"


def test_a_parent_groups_limit_counts_when_it_is_lower(write: Write, tmp_path: Path) -> None:
    in_v2(write, "/pod/container")
    write("sys/fs/cgroup/pod/container/memory.max", "max")
    write("sys/fs/cgroup/pod/memory.max", 6 * GIB)
    assert host_limit_bytes(tmp_path).nbytes == 6 * GIB
    write("sys/fs/cgroup/pod/container/memory.max", 7 * GIB)
    assert host_limit_bytes(tmp_path).nbytes == 6 * GIB
    write("sys/fs/cgroup/pod/container/memory.max", 5 * GIB)
    assert host_limit_bytes(tmp_path).nbytes == 5 * GIB


def test_memory_high_counts_because_page_locked_memory_cannot_be_reclaimed(
    write: Write, tmp_path: Path
) -> None:
    in_v2(write, "/job")
    write("sys/fs/cgroup/job/memory.max", 10 * GIB)
    write("sys/fs/cgroup/job/memory.high", 9 * GIB)
    limit = host_limit_bytes(tmp_path)
    assert (limit.nbytes, limit.reason.split()[0]) == (9 * GIB, "memory.high")


def test_a_limit_above_the_physical_memory_changes_nothing(write: Write, tmp_path: Path) -> None:
    in_v2(write, "/job")
    write("sys/fs/cgroup/job/memory.max", 100 * GIB)
    assert host_limit_bytes(tmp_path) == Limit(64 * GIB, "the physical memory")
    assert len(host_limits(tmp_path)) == 2, "it is listed all the same"


def test_what_a_group_has_left_is_its_limit_less_what_cannot_be_reclaimed(
    write: Write, tmp_path: Path
) -> None:
    in_v2(write, "/pod/job")
    write("sys/fs/cgroup/pod/job/memory.max", 10 * GIB)
    write("sys/fs/cgroup/pod/job/memory.current", 6 * GIB)
    write(
        "sys/fs/cgroup/pod/job/memory.stat",
        f"anon {4 * GIB}\nfile {3 * GIB}\nactive_file {GIB}\ninactive_file {GIB // 2}",
    )
    limit = available_host_bytes(tmp_path)
    assert limit.nbytes == 10 * GIB - 6 * GIB + GIB + GIB // 2
    assert limit.reason == "what memory.max of the control group /sys/fs/cgroup/pod/job leaves now"
    # The parent's other children use the rest of it.
    write("sys/fs/cgroup/pod/memory.max", 20 * GIB)
    write("sys/fs/cgroup/pod/memory.current", 19 * GIB)
    assert available_host_bytes(tmp_path).nbytes == GIB
    write("sys/fs/cgroup/pod/memory.current", 21 * GIB)  # the limit was lowered below the use
    assert available_host_bytes(tmp_path).nbytes == 0


def test_a_namespaced_mount_shows_the_own_group_as_its_root(write: Write, tmp_path: Path) -> None:
    """A container with a control group namespace of its own: the usual case with version 2."""
    in_v2(write, "/")
    write("sys/fs/cgroup/memory.max", 2 * GIB)
    write("sys/fs/cgroup/memory.current", GIB)
    assert host_limit_bytes(tmp_path).nbytes == 2 * GIB
    assert available_host_bytes(tmp_path).nbytes == GIB


@pytest.mark.parametrize(
    ("group", "root"),
    [
        ("/docker/c0ffee", "/docker/c0ffee"),  # no namespace: the mount shows the group itself
        ("/docker/outer/docker/c0ffee", "/docker/c0ffee"),  # and inside another container
        ("/../other", "/"),  # moved to a group outside of its namespace
        ("/docker/c0ffee", "/../.."),  # a mount made in another namespace
        ("/gone (deleted)", "/"),
    ],
)
def test_a_mount_that_does_not_match_the_groups_path_is_read_at_its_top(
    write: Write, tmp_path: Path, group: str, root: str
) -> None:
    in_v2(write, group, root)
    write("sys/fs/cgroup/memory.max", 2 * GIB)
    write("sys/fs/other/memory.max", GIB)  # must not be read through ".."
    assert host_limit_bytes(tmp_path).nbytes == 2 * GIB


def test_a_mount_of_a_part_of_the_tree_is_read_below_that_part(
    write: Write, tmp_path: Path
) -> None:
    in_v2(write, "/docker/c0ffee/inner", "/docker/c0ffee")
    write("sys/fs/cgroup/memory.max", 4 * GIB)
    write("sys/fs/cgroup/inner/memory.max", 3 * GIB)
    assert host_limit_bytes(tmp_path).nbytes == 3 * GIB


def test_spaces_in_a_mount_point_are_escaped_by_the_kernel(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/my job")
    write(
        "proc/self/mountinfo", r"30 23 0:26 / /sys/fs/c\040group rw shared:4 - cgroup2 cgroup2 rw"
    )
    write("sys/fs/c group/my job/memory.max", GIB)
    assert host_limit_bytes(tmp_path).nbytes == GIB


@pytest.mark.parametrize("text", ["", "max", "many", "-1"])
def test_a_limit_that_is_no_number_is_none(write: Write, tmp_path: Path, text: str) -> None:
    in_v2(write, "/job")
    write("sys/fs/cgroup/job/memory.max", text)
    assert len(host_limits(tmp_path)) == 1


def test_lines_that_make_no_sense_are_passed_over(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "nonsense\n0::/job")
    write("proc/self/mountinfo", f"x\n1 2 3 - cgroup2\n{V2.format(root='/')}\n - cgroup2 a b")
    write("proc/self/limits", "Max address space\nMax data size  a b c")
    write("proc/self/status", "VmSize\n")
    write("sys/fs/cgroup/job/memory.max", GIB)
    assert host_limit_bytes(tmp_path).nbytes == GIB


# --- control groups, version 1 -------------------------------------------------------------------


def test_version_1_is_read_from_the_memory_controller(write: Write, tmp_path: Path) -> None:
    in_v1(write, "/docker/c0ffee", "/docker/c0ffee")
    group = "sys/fs/cgroup/memory"
    write(f"{group}/memory.limit_in_bytes", 8 * GIB)
    write(f"{group}/memory.usage_in_bytes", 5 * GIB)
    write(f"{group}/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}")
    limit = host_limit_bytes(tmp_path)
    assert limit.nbytes == 8 * GIB
    assert limit.reason == "memory.limit_in_bytes of the control group /sys/fs/cgroup/memory"
    assert available_host_bytes(tmp_path).nbytes == 4 * GIB


def test_version_1_without_a_limit_is_the_physical_memory(write: Write, tmp_path: Path) -> None:
    in_v1(write, "/")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED_V1)
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", 5 * GIB)
    write("sys/fs/cgroup/memory/memory.stat", f"hierarchical_memory_limit {UNLIMITED_V1}")
    assert host_limits(tmp_path) == [Limit(64 * GIB, "the physical memory")]
    assert available_host_bytes(tmp_path).nbytes == 48 * GIB


def test_version_1_tells_of_parents_that_the_mount_does_not_show(
    write: Write, tmp_path: Path
) -> None:
    in_v1(write, "/pod/c0ffee", "/pod/c0ffee")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED_V1)
    write("sys/fs/cgroup/memory/memory.stat", f"cache 0\nhierarchical_memory_limit {3 * GIB}")
    limit = host_limit_bytes(tmp_path)
    assert limit.nbytes == 3 * GIB
    assert limit.reason.startswith("hierarchical_memory_limit of")


def test_a_hybrid_machine_is_read_where_the_memory_controller_is(
    write: Write, tmp_path: Path
) -> None:
    write("proc/self/cgroup", "3:memory:/job\n0::/job")
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    write("proc/self/mountinfo", f"{unified}\n{V1.format(root='/')}")
    write("sys/fs/cgroup/unified/job/cgroup.procs", "1")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", GIB)
    assert host_limit_bytes(tmp_path).nbytes == GIB


# --- this machine --------------------------------------------------------------------------------


def test_this_machine_has_some_memory_and_allows_no_more_than_that() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host_limit_bytes().nbytes <= physical
    assert 0 < available_host_bytes().nbytes <= host_limit_bytes().nbytes


def test_a_ulimit_of_this_process_is_seen() -> None:
    program = """
import resource
from tvm_pager.machine import host_limit_bytes, page_lock_limit
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
limit = host_limit_bytes()
assert 0 < limit.nbytes < 1 << 33 and "ulimit -v" in limit.reason, limit
assert page_lock_limit().nbytes == 4096
"""
    run = run_program(program)
    assert run.returncode == 0, run.stderr
