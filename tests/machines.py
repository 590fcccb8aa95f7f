"""Virtual machines of round figures, and traces by hand, for the tests of simulator and planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm_pager.planning import HardwareProfile, PageKind, Trace, TraceOp, TracePage
from tvm_pager.planning.hardware.profile import (
    DeviceRates,
    DiskRates,
    HostRates,
    MachineFacts,
    MatmulRates,
    Overheads,
)
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate, Point

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def figure(value: float) -> Figure:
    return Figure(value, value, value)


def curve(value: float) -> Curve:
    return Curve((Point(1, figure(value)), Point(GIB, figure(value))))


def link(bytes_per_ns: float, slowdown: float) -> LinkRate:
    """A rate without latency; both directions at once are slower by a factor."""
    rate = bytes_per_ns * 1e9
    return LinkRate(curve(rate), curve(rate / slowdown), 0.0, rate)


def make_hardware(
    *,
    link_bytes_per_ns: float = 1.0,
    link_slowdown: float = 2.0,
    disk_bytes_per_ns: float = 0.25,
    disk_slowdown: float = 2.0,
    dispatched_ns: int = 1,
    empty_copy_ns: int = 1,
) -> HardwareProfile:
    """One byte takes a nanosecond, on the disk four; both directions at once take twice as long."""
    one = figure(1e9)
    both_ways = link(link_bytes_per_ns, link_slowdown)
    disk = link(disk_bytes_per_ns, disk_slowdown)
    return HardwareProfile(
        machine=MachineFacts("", (), None, "", None, "", "", None, "", 1.0, False),
        device=DeviceRates("", True, 1, 1, MatmulRates(one, None, one, one), one, one),
        host=HostRates("", 1, None, 1, 1, *[curve(1e9)] * 4),
        overheads=Overheads(
            figure(1), figure(dispatched_ns), figure(empty_copy_ns), figure(empty_copy_ns)
        ),
        h2d=both_ways,
        d2h=both_ways,
        duplex_total_bytes_per_s=curve(2e9 * link_bytes_per_ns / link_slowdown),
        disks=(
            DiskRates(
                "raw",
                "direct",
                1,
                disk,
                disk,
                figure(2e9 * disk_bytes_per_ns / disk_slowdown),
            ),
        ),
    )


def make_trace(
    sizes: Mapping[str, int],
    program: Sequence[tuple[str, str, int]],
    *,
    launch_ns: int = 1,
) -> Trace:
    """A trace by hand.

    Args:
        sizes: bytes of each page by name. In capitals: it lives on; else it is born where it is
            named first and dies after its last use.
        program: of each operation the pages it reads, separated by spaces, those that it writes
            with a "!"; the pages it creates; and its nanoseconds on the device.
        launch_ns: of each.
    """
    numbers = {name: number for number, name in enumerate(sizes)}
    operands = [reads.split() for reads, _, _ in program]
    created = {name: i for i, (_, creates, _) in enumerate(program) for name in creates.split()}
    ops = []
    for reads, (_, creates, compute_ns) in zip(operands, program, strict=True):
        ops.append(
            TraceOp(
                "test::op",
                tuple(numbers[name.strip("!")] for name in reads),
                tuple(numbers[name.strip("!")] for name in reads if name.endswith("!")),
                tuple(numbers[name] for name in creates.split()),
                compute_ns,
            )
        )
    pages = []
    for name, number in numbers.items():
        if name.isupper():
            pages.append(TracePage(sizes[name], PageKind.PARAM, becomes=number))
            continue
        last = max([created[name], *(i for i, op in enumerate(ops) if number in op.reads)])
        pages.append(TracePage(sizes[name], PageKind.ACTIVATION, born=created[name], died=last + 1))
    return Trace(tuple(ops), tuple(pages), launch_ns=launch_ns)
