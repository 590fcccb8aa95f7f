"""Section G of the trials, trial 51: a device that holds about one tensor, and what the table says.

Also what only shows where everything is evicted all the time.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.interpreter import run_program
from tests.trials.harness import (
    KIB,
    LAYER_BYTES,
    Run,
    assert_nothing_left,
    mlp,
    seed_all,
    small_pager,
    train,
)
from tvm_pager.events import Event, EventKind
from tvm_pager.memory import FrameAllocator, PageTable
from tvm_pager.observe.fetches import FetchCounts
from tvm_pager.runtime.device_room import DeviceRoom
from tvm_pager.units import parse_bytes

if TYPE_CHECKING:
    from pathlib import Path

ONE_TENSOR = 52 * KIB  # a weight, its two states beside it in one operation, and a little


def thrash(
    tmp_path: Path, *, steps: int = 10, adopt: bool = False, **options: Any
) -> tuple[Any, nn.Module]:
    """Trains four layers where one operation fits; gives statistics and the model."""
    seed_all(0)
    settings = {"device": ONE_TENSOR, **options}
    pager = small_pager(tmp_path, **settings)
    with contextlib.closing(pager), contextlib.nullcontext() if adopt else pager:
        model = mlp(num_layers=4)
        optimizer = torch.optim.Adam(model.parameters())
        if adopt:
            pager.page(model, optimizer)
        train(Run(None), model, optimizer, steps=steps)
        return pager.stats(), model


# --- the table ---


@pytest.mark.parametrize("adopt", [False, True], ids=["context", "page()"])
def test_thrashing_is_named_in_the_table_with_its_tensors_and_a_remedy(
    adopt: bool, tmp_path: Path
) -> None:
    """Trial 51: a step was fifty times slower, and nothing said why."""
    stats, model = thrash(tmp_path, adopt=adopt)
    lines = str(stats).split("\n")
    for lane in ("device -> host", "host -> device", "host -> nvme", "nvme -> device"):
        assert any(re.match(rf"{lane} +[\d.]+ MiB$", line) for line in lines), lane
    assert any(re.search(r"; stalled for [\d.]+ m?s$", line) for line in lines)
    (first,) = [i for i, line in enumerate(lines) if line.startswith("thrashing: ")]
    ratio = float(re.fullmatch(r"thrashing: .* fetched, ([\d.]+) times .*", lines[first])[1])
    fetched = stats.bytes_by_lane["h2d"] + stats.bytes_by_lane["n2d"]
    assert ratio == pytest.approx(fetched / ONE_TENSOR, rel=0.01)
    assert ratio > 3
    top = lines[first + 2 : first + 12]
    numbers = [
        re.fullmatch(r"(\w+) (.+?)  +(\S+ \S+) +(\d+) +(\S+ \S+)  +aten::\S+", t) for t in top
    ]
    assert all(numbers), top
    counts = [int(match[4]) for match in numbers]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] > 10, "fetched more than once a step, each of them"
    names = {match[2] for match in numbers if match[1] == "param"}
    assert names <= {f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()}
    assert "2.weight (64, 64)" in names
    assert {match[1] for match in numbers} == {"param", "opt_state"}
    assert {match[3] for match in numbers if "weight" in match[2]} == {"16.00 KiB"}
    assert lines[first + 12].startswith("advice: the working set")
    assert sum(line.startswith("advice: ") for line in lines) == 1
    json.dumps(stats.to_dict())


def test_with_the_device_budget_of_the_advice_the_thrashing_ends(tmp_path: Path) -> None:
    stats, _ = thrash(tmp_path)
    advised = parse_bytes(re.search(r"give device >= (\S+ \S+),", str(stats))[1])
    assert advised < 20 * LAYER_BYTES, "the weights, gradients and states are 16"
    roomy, _ = thrash(tmp_path, device=advised)
    assert roomy.num_faults <= stats.num_faults // 50
    assert "thrashing" not in str(roomy)


def test_a_run_that_pages_a_little_gets_no_advice(tmp_path: Path) -> None:
    stats, _ = thrash(tmp_path, steps=1, device=160 * KIB)
    assert stats.num_faults > 0
    assert stats.thrashing is None
    assert "advice" not in str(stats)
    assert "fetched most" not in str(stats)


def test_what_is_sent_away_although_it_fits_is_told_apart(tmp_path: Path) -> None:
    with small_pager(tmp_path, device=64 * KIB) as pager:
        tensors = [torch.full((2 * KIB,), float(i)) for i in range(4)]  # half of the budget
        for _ in range(12):
            pager.evict_all()
            for tensor in tensors:
                tensor.mul(1)
        table = str(pager.stats())
    assert re.search(r"advice: the working set \(about 3\d\.\d\d KiB\) fits", table), table
    assert "evict_all()" in table


def test_the_command_line_prints_it_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tests.trials.harness import Run, mlp, train\n"
        "import torch\n"
        "model = mlp(num_layers=4)\n"
        "train(Run(None), model, torch.optim.Adam(model.parameters()), steps=6)\n"
    )
    program = "import sys; from tvm_pager.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--device", "52KiB", "--host", "1MiB", "--torch-device", "cpu"]
    result = run_program(program, "run", *options, script)
    assert result.returncode == 0, result.stderr
    assert "param 2.weight (64, 64)" in result.stderr
    assert result.stderr.count("advice: ") == 1


# --- the counts ---


def counts_over(num_pages: int) -> tuple[FetchCounts, PageTable]:
    frames = FrameAllocator(1 << 30, 4096)
    counts = FetchCounts()
    counts.table = PageTable(frames, FrameAllocator(0, 4096), segment_bytes=4096)
    for _ in range(num_pages):
        counts.table.create(4096, lambda: None)
    return counts, counts.table


def fetch(counts: FetchCounts, page_id: int, moment: int, lane: str = "h2d") -> None:
    counts.fetched(Event(EventKind.FETCH, page_id, 4096, lane, moment, moment + 1))


def test_the_pages_that_are_counted_are_bounded_and_the_most_fetched_stay() -> None:
    counts, table = counts_over(20_000)
    for moment in range(20_000):
        fetch(counts, 7 + moment % 5, 2 * moment)  # five that thrash
        fetch(counts, moment, 2 * moment + 1)  # and many that come once
    assert len(counts._counts) <= 4096
    found = counts.thrashing(1 << 20, 0, dict)
    assert found is not None
    assert {page.page_id for page in found.pages[:5]} == {7, 8, 9, 10, 11}
    assert {page.num_fetches for page in found.pages[:5]} == {4001}
    assert len(found.pages) == 10
    assert found.alive_bytes == 20_000 * 4096
    for page in list(table.pages.values()):
        table.free(page)
    assert counts.thrashing(1 << 20, 0, dict) == found, "the dead are told of too"


def test_a_page_that_comes_over_two_lanes_was_fetched_once() -> None:
    counts, _ = counts_over(1)
    for moment in range(10):
        fetch(counts, 0, moment, "h2d")
        fetch(counts, 0, moment, "n2d")
    fetch(counts, 0, 99, "n2h")  # not to the device
    found = counts.thrashing(4096, 1000, lambda: {0: "it"})
    assert found is not None
    (page,) = found.pages
    assert (page.num_fetches, page.fetched_bytes, page.name) == (10, 20 * 4096, "it")
    assert found.enough_bytes == 4096 + 409 + 1000


def test_many_pages_that_each_come_once_are_no_thrashing() -> None:
    counts, _ = counts_over(1000)
    for moment in range(1000):
        fetch(counts, moment, moment)
    assert counts.thrashing(4096, 0, dict) is None


# --- a device that others use too ---


def test_the_budget_follows_what_other_processes_leave_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial 51, on a device that is made up: 40 % of it is taken, then 80 %, then nothing."""
    total, free = 16 << 30, [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    seed_all(0)
    with small_pager(tmp_path) as pager:
        pager._core.budgets.set_device(total // 2)  # more than this machine may have
        pager._parts.room = DeviceRoom(pager._core, torch.device("cuda"), total // 20)
        budgets = []
        for taken in (0, 40, 80, 80, 0):
            free[0] = total * (100 - taken) // 100
            pager.step()
            budgets.append(pager.stats().device_budget_bytes)
        notices = pager.stats().notices
    assert budgets[:2] == [total // 2] * 2
    assert budgets[2] == budgets[3] == pytest.approx(0.15 * total, rel=0.01)
    assert budgets[4] == total // 2, "it grows back"
    assert len(emptied) == 1
    (notice,) = notices
    assert "device memory was taken by others: the device budget is now" in notice


# --- what only shows where everything is evicted all the time ---


@pytest.mark.parametrize("num_kept", [0, 3])
def test_a_victim_whose_last_tensor_dies_after_it_was_chosen_is_passed_over(
    num_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in flight may hold the last reference, and ends whenever it ends."""
    with small_pager(tmp_path, device=128 * KIB, check=0) as pager:
        core = pager._core
        tensors = [torch.full((4 * KIB,), float(i)) for i in range(7)]  # 16 KiB each
        victims, deaths = core.device_policy.victims, []

        def choose(*args: Any) -> Any:
            chosen = victims(*args)
            deaths.append(len(tensors))
            del tensors[num_kept:]
            return chosen

        monkeypatch.setattr(core.device_policy, "victims", choose)
        core.evictor.ahead_bytes = 64 * KIB
        big = torch.ones(16 * KIB)  # 64 KiB: the older ones have to leave
        assert deaths[0] == 7
        pager.check_invariants()
        assert [float(t.sum()) for t in tensors] == [4 * KIB * i for i in range(num_kept)]
        assert float(big.sum()) == 16 * KIB
        pager.check_invariants()


def test_many_threads_that_evict_each_others_pages_find_room(tmp_path: Path) -> None:
    """Whoever waits for an eviction may find that another thread was first: there is room now."""
    num_threads, size = 64, 4 * KIB
    failures: list[BaseException] = []
    barrier = threading.Barrier(num_threads)
    with small_pager(tmp_path, device=256 * KIB, host=512 * KIB, check=0) as pager:
        pages = [torch.full((size,), float(i)) for i in range(num_threads)]  # 1 MiB

        def work(i: int) -> None:
            barrier.wait()
            try:
                for _ in range(2):
                    pages[i].add_(1000)
                    pager.evict_all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [float(page.sum()) for page in pages] == [
            size * (2000.0 + i) for i in range(num_threads)
        ]
        pager.check_invariants()
        pages.clear()
    assert_nothing_left(tmp_path)
