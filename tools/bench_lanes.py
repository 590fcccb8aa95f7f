"""Measures every lane of the backend against the raw rate of its link or disk, in one run.

    python tools/bench_lanes.py --torch-device cuda --nvme /mnt/swap --json lanes.json
    python tools/bench_lanes.py --torch-device cpu --quick

Lane and raw rounds take turns, so that a busy machine hits both alike; the ratio is the median over
the pairs. What is compared:

    d2h, h2d, duplex    transfers of whole pages, against plain copies of as many bytes each, on
                        one stream for each direction, with the same page-locked memory
    d2n, n2d, h2n, n2h  the same through the block store, against `preadv` and `pwritev` with
                        O_DIRECT on the same file and memory, as many threads, in tasks of the
                        size that turns out best

    fault               urgent transfers, a few in flight: what makes room, and what is waited for
    queued              write-backs and prefetches, all submitted at once, and nobody looks after
                        them or waits: what a lane does by itself

GB/s count each byte once. Times of lanes are the host's, from the first submission to the moment
when the last ticket is seen done; times of raw copies are the device's. Pages have segments of
32 MiB, as by default. Every page size moves at most 4 GiB a direction on the link and 2 GiB on the
disk. On the CPU, tensors stand in for the device, and link rows say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from tvm_pager.observe.profile.copies import D2H, H2D, Copies, open_copies
from tvm_pager.observe.profile.disk import raw_mover
from tvm_pager.observe.profile.rounds import Span, overlap_rates
from tvm_pager.observe.table import format_rows
from tvm_pager.transfer.protocol import Lane, Piece, Priority, Ticket, Transfer
from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias
from tvm_pager.transfer.torch_backend import TorchBackend, TorchBackendOptions
from tvm_pager.units import format_bytes

__all__ = ["Row", "main", "measure"]

MIB = 1 << 20
JUDGED_BYTES = 8 * MIB  # smaller pages have no target
DEPTH = 8  # urgent tickets in flight
PAUSE_S = 100e-6  # between two looks
LONG_PAUSE_S = 500e-6  # where a look would take the interpreter from the lanes
SEGMENT_BYTES = 32 * MIB
STAGING_BYTES = 32 * MIB
LIMIT_S = 70.0  # after it every row gets one round
SIDES = {Lane.D2H: D2H, Lane.H2D: H2D}
LINKS = {"d2h": (Lane.D2H,), "h2d": (Lane.H2D,), "duplex": (Lane.D2H, Lane.H2D)}
DISKS = {lane.value: lane for lane in (Lane.D2N, Lane.H2N, Lane.N2D, Lane.N2H)}  # writes first
DOWN = frozenset({Lane.D2H, Lane.D2N, Lane.H2N})


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. Sizes in bytes."""

    page_bytes: tuple[int, ...] = (MIB, 8 * MIB, 32 * MIB, 128 * MIB)
    link_bytes: int = 1024 * MIB  # of a round, each direction
    disk_bytes: int = 512 * MIB
    task_bytes: tuple[int, ...] = (MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
    num_rounds: int = 3


FULL = Effort()
STAND_IN = Effort(link_bytes=256 * MIB)
QUICK = Effort((64 << 10, 256 << 10), MIB, MIB, (64 << 10, 128 << 10), 2)


@dataclass
class Row:
    """One lane, or two at once, at one page size; bytes/s of each round, in pairs."""

    lane: str
    page_bytes: int
    urgency: str
    lane_rates: list[float] = field(default_factory=list)
    raw_rates: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(
            lane / raw for lane, raw in zip(self.lane_rates, self.raw_rates, strict=True)
        )

    def verdict(self, target: float) -> str:
        if self.page_bytes < JUDGED_BYTES:
            return "no target"
        return "ok" if self.ratio >= target else "MISSED"


class Rig:
    """A backend with pages of one size on the device, in the slab and in the file.

    Args:
        device: where pages live.
        directory: of the swap file.
        effort: decides on the sizes.
        engine: see `TorchBackend`.
        num_threads: I/O depth of the block store, and of raw I/O.
    """

    def __init__(
        self, device: str, directory: str, effort: Effort, engine: str, num_threads: int
    ) -> None:
        most = max(effort.link_bytes, effort.disk_bytes)
        host_bytes = 2 * most + 2 * STAGING_BYTES
        options = TorchBackendOptions(
            staging_bytes=STAGING_BYTES, region_bytes=most, num_threads=num_threads, measure=False
        )
        self.backend = TorchBackend(
            device, host_bytes, directory, effort.disk_bytes, engine=engine, options=options
        )
        self.slab = self.backend._slab
        self.slab.grow(2 * most)
        self.most_bytes = most
        self._memory: dict[Lane, list[torch.UntypedStorage]] = {}
        self._page_bytes = 0

    def fill(self) -> None:
        """Fills the slab, and pages that are made from now on, with noise: some disks compress."""
        noise = os.urandom(MIB)
        for buffer in self.slab.buffers(0, self.slab.capacity_bytes):
            for at in range(0, len(buffer), MIB):
                part = buffer[at : at + MIB]
                part[:] = noise[: len(part)]
        self._memory.clear()

    def close(self) -> None:
        self._memory.clear()
        self.backend.close()

    def run(
        self, lanes: Sequence[Lane], page_bytes: int, nbytes: int, urgency: str
    ) -> list[list[Span]]:
        """Moves `nbytes` along each lane; gives the spans of each. Blocks."""
        sides = [deque(self._transfers(lane, page_bytes, nbytes)) for lane in lanes]
        self.synchronize()
        in_flight: list[deque[Ticket]] = [deque() for _ in lanes]
        spans: list[list[Span]] = [[] for _ in lanes]
        before_s = [time.perf_counter()] * len(lanes)
        while any(sides) or any(in_flight):
            has_moved = False
            for index, (side, tickets) in enumerate(zip(sides, in_flight, strict=True)):
                while side and (urgency == "queued" or len(tickets) < DEPTH):
                    transfer = side.popleft()
                    tickets.append(self.backend.submit(transfer, _priority(transfer, urgency)))
                    has_moved = True
                while tickets and tickets[0].done():
                    ticket = tickets.popleft()
                    ticket.wait()  # it is over: raises what has failed
                    now_s = time.perf_counter()
                    spans[index].append(Span(before_s[index], now_s, ticket.transfer.nbytes))
                    before_s[index] = now_s
                    has_moved = True
            if not has_moved:
                time.sleep(LONG_PAUSE_S if urgency == "queued" and not any(sides) else PAUSE_S)
        return spans

    def synchronize(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)

    def _transfers(self, lane: Lane, page_bytes: int, nbytes: int) -> Iterator[Transfer]:
        """Pages one behind the other; what goes up has a half of the slab of its own."""
        memory = self._pages(lane, page_bytes, nbytes) if "d" in lane.value else None
        host_base = 0 if lane in DOWN else self.most_bytes
        executor = self.backend.current_executor()
        for index in range(nbytes // page_bytes):
            offsets = {"d": 0, "h": host_base + index * page_bytes, "n": index * page_bytes}
            source, target = offsets[lane.value[0]], offsets[lane.value[2]]
            yield Transfer(
                index,
                lane,
                tuple(
                    Piece(at, source + at, target + at, min(SEGMENT_BYTES, page_bytes - at))
                    for at in range(0, page_bytes, SEGMENT_BYTES)
                ),
                None if memory is None else memory[index],
                () if executor is None or memory is None else (executor,),
            )

    def _pages(self, lane: Lane, page_bytes: int, nbytes: int) -> list[torch.UntypedStorage]:
        """Device memory of the lane's pages, written once; that of other page sizes is freed."""
        if page_bytes != self._page_bytes:
            self._memory.clear()
            self._page_bytes = page_bytes
        pages = self._memory.setdefault(Lane.D2H if lane in DOWN else Lane.H2D, [])
        while len(pages) < nbytes // page_bytes:
            storage = torch.UntypedStorage(0, device=self.backend.device)  # type: ignore[no-untyped-call]
            self.backend.allocate_device(storage, page_bytes)
            with RawDispatch():
                raw_alias(storage, self.backend.device).copy_(self.slab.view(0, page_bytes)[0])
            pages.append(storage)
        return pages


class RawDisk:
    """Plain system calls on the rig's own file and memory, by as many threads as its store has."""

    def __init__(self, rig: Rig, pool: ThreadPoolExecutor) -> None:
        assert rig.backend._file is not None
        self._move = raw_mover(rig.backend._file)
        self.io = rig.backend._file.io
        self._slab = rig.slab
        self._reads_at = rig.most_bytes  # where the lanes read to, whose memory it must be
        self._pool = pool
        self.task_bytes: dict[bool, int] = {}  # by whether it writes

    def choose_tasks(self, sizes: tuple[int, ...], nbytes: int) -> None:
        """Writes the file, then finds the fastest size of a task for each direction."""
        self.run(True, nbytes, sizes[-1])  # blocks that were never written are slower, or faster
        for is_write in (True, False):
            rates: dict[int, list[float]] = {size: [] for size in sizes}
            for size in sizes * 3:  # in turns
                rates[size].append(self.run(is_write, nbytes // 2, size))
            self.task_bytes[is_write] = max(sizes, key=lambda size: statistics.median(rates[size]))

    def named_tasks(self) -> dict[str, int]:
        return {"write" if is_write else "read": n for is_write, n in self.task_bytes.items()}

    def run(self, is_write: bool, nbytes: int, task_bytes: int | None = None) -> float:
        """Moves the first `nbytes` of the file; gives bytes/s. Blocks."""
        size = task_bytes or self.task_bytes[is_write]
        (buffer,) = self._slab.buffers(0 if is_write else self._reads_at, nbytes)
        started_s = time.perf_counter()
        futures = [
            self._pool.submit(self._move, at, buffer[at : at + size], is_write)
            for at in range(0, nbytes, size)
        ]
        for future in futures:
            future.result()
        return nbytes / (time.perf_counter() - started_s)


def _priority(transfer: Transfer, urgency: str) -> Priority:
    if urgency == "fault":
        return Priority.FAULT
    return Priority.WRITE_BACK if transfer.lane in DOWN else Priority.PREFETCH


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, how much of it, and until when."""

    rig: Rig
    effort: Effort
    only: Sequence[str]
    end_s: float

    def links(self, copies: Copies) -> Iterator[Row]:
        nbytes = self.effort.link_bytes
        for page_bytes in self.effort.page_bytes:
            for name, lanes in LINKS.items():
                sides = [SIDES[lane] for lane in lanes]
                raw = partial(copies.run, sides, page_bytes, nbytes // page_bytes)
                for urgency in ("fault", "queued") if name in self.only else ():
                    lane = partial(self.rig.run, lanes, page_bytes, nbytes, urgency)
                    row = Row(name, page_bytes, urgency)
                    yield self._fill(row, partial(_rate, lane), partial(_rate, raw))

    def disks(self, raw: RawDisk) -> Iterator[Row]:
        nbytes = self.effort.disk_bytes
        raw.choose_tasks(self.effort.task_bytes, nbytes)
        for page_bytes in self.effort.page_bytes:
            for name, lane in DISKS.items():
                if name in self.only:
                    run = partial(self.rig.run, (lane,), page_bytes, nbytes, "queued")
                    raw_round = partial(raw.run, lane in DOWN, nbytes)
                    yield self._fill(
                        Row(name, page_bytes, "queued"), partial(_rate, run), raw_round
                    )

    def _fill(
        self, row: Row, lane_round: Callable[[], float], raw_round: Callable[[], float]
    ) -> Row:
        for run_round in (lane_round, raw_round):
            run_round()  # warm-up: memory, clocks
        for _ in range(self.effort.num_rounds):
            row.lane_rates.append(lane_round())
            row.raw_rates.append(raw_round())
            if time.monotonic() > self.end_s:
                break
        return row


def _rate(run: Callable[[], list[list[Span]]]) -> float:
    """Bytes/s of all sides together, while all were busy."""
    return sum(overlap_rates(run()))


def measure(
    device: str,
    directory: str,
    effort: Effort,
    *,
    engine: str = "auto",
    num_threads: int = 4,
    only: Sequence[str] = (*LINKS, *DISKS),
) -> tuple[list[Row], dict[str, object]]:
    """Measures the lanes named in `only`; gives the rows, and facts about the run."""
    started_s = time.monotonic()
    rows: list[Row] = []
    facts: dict[str, object] = {"torch": torch.__version__, "torch_device": device}
    with contextlib.closing(Rig(device, directory, effort, engine, num_threads)) as rig:
        plan = Plan(rig, effort, only, started_s + LIMIT_S)
        if device.startswith("cuda"):
            facts["gpu"] = torch.cuda.get_device_name(rig.backend.device)
        if set(only) & set(LINKS):
            with open_copies(rig.backend.device, rig.slab, effort.link_bytes) as copies:
                rows += plan.links(copies)
        with ThreadPoolExecutor(num_threads, "raw") as pool:
            raw = RawDisk(rig, pool)
            if set(only) & set(DISKS):
                rig.fill()
                rows += plan.disks(raw)
        facts |= {"engine": rig.backend.engine_text, "threads": num_threads, "raw": raw.io}
        facts |= {"notices": rig.backend.notices}
        facts |= {f"raw_{name}_bytes": size for name, size in raw.named_tasks().items()}
    facts["seconds"] = round(time.monotonic() - started_s, 1)
    return rows, facts


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; gives 1 if a row misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--torch-device", default=default, help=f"default here: {default}")
    parser.add_argument("--nvme", help="directory on the disk to measure; default: a temporary one")
    parser.add_argument("--engine", default="auto", choices=("auto", "posix", "kvikio"))
    parser.add_argument("--threads", type=int, default=4, help="of the disk; default 4")
    parser.add_argument("--only", default=",".join((*LINKS, *DISKS)), help="lanes; default all")
    parser.add_argument("--target", type=float, default=0.9, help="least ratio, from 8 MiB on")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs at all")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    args = parser.parse_args(argv)
    only = args.only.split(",")
    if unknown := set(only) - {*LINKS, *DISKS}:
        parser.error(f"--only: unknown lanes {sorted(unknown)}; known: {[*LINKS, *DISKS]}")
    effort = QUICK if args.quick else FULL if args.torch_device != "cpu" else STAND_IN
    with contextlib.ExitStack() as stack:
        directory = args.nvme or stack.enter_context(tempfile.TemporaryDirectory())
        rows, facts = measure(
            args.torch_device,
            directory,
            effort,
            engine=args.engine,
            num_threads=args.threads,
            only=only,
        )
    if args.json:
        document = {
            **facts,
            "target": args.target,
            "rows": [
                asdict(row) | {"ratio": row.ratio, "verdict": row.verdict(args.target)}
                for row in rows
            ],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return _print(rows, facts, args.target)


def _print(rows: Sequence[Row], facts: dict[str, object], target: float) -> int:
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    cells = [["lane", "page", "urgency", "lane, GB/s", "raw, GB/s", "ratio", ""]]
    for row in rows:
        medians = (statistics.median(rates) / 1e9 for rates in (row.lane_rates, row.raw_rates))
        cells.append(
            [row.lane, format_bytes(row.page_bytes), row.urgency]
            + [f"{median:.2f}" for median in medians]
            + [f"{row.ratio:.2f}", row.verdict(target)]
        )
    print("\n".join(format_rows(cells)))
    missed = [row for row in rows if row.verdict(target) == "MISSED"]
    for row in missed:
        print(
            f"MISSED: {row.lane} ({row.urgency}) at {format_bytes(row.page_bytes)}: {row.ratio:.2f}"
        )
    judged = sum(row.page_bytes >= JUDGED_BYTES for row in rows)
    print(f"target {target:g} of raw: {judged - len(missed)} of {judged} rows met it")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
