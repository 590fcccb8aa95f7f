"""The soak ends well on a short run, and says by name what differs, grows or stays behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import soak
from tools.soak_training import SCALES, Training

SHORT = ["--seed", "11", "--iterations", "12", "--every", "2"]
CALM = soak.Sample(0, 300 << 20, 0, 32 << 20, 1 << 20, 1 << 20, 32 << 20, 100, 0, 5, 8)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_a_short_soak_changes_budgets_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "soak.json"
    arguments = ["--iterations", "60", "--every", "10", "--seed", "1", "--nvme", str(tmp_path)]
    assert soak.main([*arguments, "--json", str(json_file)]) == 0
    out = capsys.readouterr().out
    assert "seed 1: losses and weights bitwise equal, nothing drifts" in out
    assert "host_run" in out
    figures = json.loads(json_file.read_text())
    assert figures["problems"] == []
    assert [sample["iteration"] for sample in figures["samples"]] == [10, 20, 30, 40, 50, 60]
    chance = figures["chance"]
    assert min(chance[name] for name in ("device", "host", "prefetched", "evict_all")) > 0
    assert len({sample["mapped_bytes"] for sample in figures["samples"]}) > 1, (
        "the slab is the same"
    )
    assert list(tmp_path.iterdir()) == [json_file]


def test_a_seed_makes_the_same_shapes_and_changes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for name in ("one", "two"):
        json_file = tmp_path / name
        assert soak.main([*SHORT, "--check", "1", "--json", str(json_file)]) == 0
        found.append(json.loads(json_file.read_text())["chance"])
        # How many of the pages asked for are still on their way out when they are asked for is a
        # matter of threads.
        assert 0 < found[-1].pop("prefetched") <= found[-1]["asked"]
    assert found[0] == found[1]
    assert soak.main(["--iterations", "1"]) == 0
    assert "seed" in capsys.readouterr().out


def test_a_page_that_is_kept_each_iteration_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, step = [], Training.step

    def leaking(self: Training, iteration: int, before: Any) -> str:
        kept.append(torch.ones(8))
        return step(self, iteration, before)

    monkeypatch.setattr(Training, "step", leaking)
    assert soak.main(SHORT) == 1
    assert "FAILED: num_pages grew by 6 from iteration 6 to 12" in capsys.readouterr().out


def test_a_loss_that_differs_in_one_bit_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, calls = Training.step, itertools.count()

    def wrong(self: Training, iteration: int, before: Any) -> str:
        loss = float.fromhex(step(self, iteration, before))
        is_paged = next(calls) >= 12
        return (loss * (1 + 2**-24) if is_paged and iteration == 7 else loss).hex()

    monkeypatch.setattr(Training, "step", wrong)
    assert soak.main(SHORT) == 1
    out = capsys.readouterr().out
    assert "FAILED: 1 of 12 losses differ, the first at iteration 7" in out
    assert "weights or optimizer states differ" not in out


def test_a_thread_and_a_file_that_stay_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = threading.Event()
    started: list[Any] = []
    run_paged = soak.run_paged

    def untidy(*args: Any) -> Any:
        result = run_paged(*args)
        started.append((tmp_path / "kept").open("w"))
        started.append(threading.Thread(target=ending.wait, name="tvm_pager-kept"))
        started[-1].start()
        return result

    monkeypatch.setattr(soak, "run_paged", untidy)
    try:
        assert soak.main(SHORT) == 1
    finally:
        ending.set()
        started[1].join()
        started[0].close()
    out = capsys.readouterr().out
    assert "FAILED: 1 threads are left after close" in out
    assert "FAILED: 1 files are left open after close" in out


# --- drift ---


def series(name: str, values: list[int]) -> list[soak.Sample]:
    return [
        dataclasses.replace(CALM, **{"iteration": 50 * i, name: value})
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rss_bytes", [(300 + i) << 20 for i in range(30)]),
        ("device_bytes", [1000 + 512 * i for i in range(30)]),
        ("file_bytes", [(32 + i // 10) << 20 for i in range(30)]),
        ("mapped_bytes", [(1 << 20) + (i << 16) for i in range(30)]),
        ("host_run_bytes", [(2 << 20) - (i << 15) for i in range(30)]),
        ("nvme_run_bytes", [(32 << 20) - (i << 19) for i in range(30)]),
        ("num_pages", [100 + i // 3 for i in range(30)]),
        ("num_threads", [5 + i // 5 for i in range(30)]),
        ("num_files", [8 + i // 5 for i in range(30)]),
    ],
)
def test_each_column_that_drifts_is_named(name: str, values: list[int]) -> None:
    (found,) = soak.drifts(series(name, values), SCALES["cpu"])
    assert found.startswith(name)
    assert "from iteration 500 to 1450" in found


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rss_bytes", [(200 + 10 * i) << 20 for i in range(10)] + [300 << 20] * 20),  # warm-up
        ("rss_bytes", [(300 + 20 * (i % 3)) << 20 for i in range(30)]),  # noise
        ("num_threads", [4 + 3 * (i % 2) for i in range(30)]),
        ("num_pages", [100] * 30),
        ("nvme_run_bytes", [(32 << 20) - (i % 5 << 20) for i in range(30)]),
        ("num_pages", [100, 101]),  # too few to tell
    ],
)
def test_warm_up_and_noise_are_no_drift(name: str, values: list[int]) -> None:
    assert soak.drifts(series(name, values), SCALES["cpu"]) == []


def test_a_transfer_that_never_ends_is_found() -> None:
    (found,) = soak.drifts(series("num_tickets", [0, 0, 1, 0]), SCALES["cpu"])
    assert "at iterations [100]" in found
