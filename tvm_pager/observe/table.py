"""The table at exit: budgets against peaks, bytes per lane, faults, what thrashes, notices.

Pure text from numbers. Imports the unit formatter only, so it can describe a run in another process
too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tvm_pager.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["StatsLike", "format_rows", "format_stats"]

# In the order in which people ask: out of the device, back into it, then the disk.
_LANES = {
    "d2h": "device -> host",
    "h2d": "host -> device",
    "h2n": "host -> nvme",
    "n2h": "nvme -> host",
    "d2n": "device -> nvme",
    "n2d": "nvme -> device",
}


class StatsLike(Protocol):
    """The counters of one pager, as `Pager.stats()` gives them."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the counters by name; sizes in bytes, times in seconds."""


def format_stats(stats: StatsLike) -> str:
    """Writes the counters of one pager as a table for people, without a newline at the end."""
    numbers = stats.to_dict()
    parts = [
        _summary(numbers),
        *format_rows(_tier_rows(numbers)),
        *format_rows(_lane_rows(numbers["bytes_by_lane"])),
        _counts(numbers),
    ]
    if numbers.get("thrashing"):
        parts += _thrashing(numbers["thrashing"], numbers["device_budget_bytes"])
    if numbers["num_policy_errors"]:
        parts.append(
            f"policy errors: {numbers['num_policy_errors']:,}; least recently used took over there"
        )
    if numbers.get("plans"):
        parts.append(numbers["plans"])
    parts += [f"notice: {notice}" for notice in numbers["notices"]]
    return "\n".join(parts)


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns cells in columns, the first to the left, the others to the right; a line a row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _summary(numbers: Mapping[str, Any]) -> str:
    text = f"tvm_pager: {numbers['num_operations']:,} operations, {numbers['num_pages']:,} pages"
    return f"{text}, engine {numbers['engine']}" if numbers["engine"] else text


def _tier_rows(numbers: Mapping[str, Any]) -> list[list[str]]:
    rows = [["tier", "budget", "peak", "used"]]
    for tier in ("device", "host", "nvme"):
        budget_bytes, peak_bytes = numbers[f"{tier}_budget_bytes"], numbers[f"{tier}_peak_bytes"]
        if not budget_bytes and not peak_bytes:
            limit = "none" if budget_bytes == 0 else "no limit"
            rows.append([tier, limit, format_bytes(0), ""])
            continue
        rows.append(
            [
                tier,
                "no limit" if budget_bytes is None else format_bytes(budget_bytes),
                format_bytes(peak_bytes),
                f"{peak_bytes / budget_bytes:.1%}" if budget_bytes else "",
            ]
        )
    return rows


def _lane_rows(bytes_by_lane: Mapping[str, int]) -> list[list[str]]:
    rows = [["lane", "moved"]]
    for lane, name in _LANES.items():
        # Lanes between device and disk exist only where the hardware has them.
        if bytes_by_lane.get(lane, 0) or lane in ("d2h", "h2d"):
            rows.append([name, format_bytes(bytes_by_lane.get(lane, 0))])
    return rows


def _counts(numbers: Mapping[str, Any]) -> str:
    num_evictions, num_clean = numbers["num_evictions"], numbers["num_clean_evictions"]
    return (
        f"faults: {numbers['num_faults']:,}; evictions: {num_evictions:,} "
        f"({num_clean:,} clean, {num_evictions - num_clean:,} dirty); "
        f"write-backs: {numbers['num_write_backs']:,}; "
        f"stalled for {format_seconds(numbers['stall_s'])}"
    )


def _thrashing(found: Mapping[str, Any], budget_bytes: int) -> list[str]:
    rows = [["fetched most often", "size", "fetches", "moved", "waited for by"]]
    rows += [
        [
            f"{page['kind']} {page['name'] or page['page_id']}",
            format_bytes(page["nbytes"]),
            f"{page['num_fetches']:,}",
            format_bytes(page["fetched_bytes"]),
            page["operation"],
        ]
        for page in found["pages"]
    ]
    alive, enough = format_bytes(found["alive_bytes"]), format_bytes(found["enough_bytes"])
    if found["alive_bytes"] > budget_bytes:
        advice = (
            f"the working set (tensors that are alive at a time) is about {alive}: give device >= "
            f"{enough}, or work on less at a time (batch, sequence)"
        )
    else:
        advice = (
            f"the working set (about {alive}) fits into the device budget; look for what sends "
            "pages away: evict_all(), set_budgets(), other processes on the device"
        )
    return [
        f"thrashing: {format_bytes(found['fetched_bytes'])} were fetched, "
        f"{found['fetched_bytes'] / max(budget_bytes, 1):,.1f} times the device budget",
        *format_rows(rows),
        f"advice: {advice}",
    ]
