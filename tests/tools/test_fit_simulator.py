"""Constants that are known are found again; errors are those of cells that were not fitted."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unit.small_traces import training
from tools import fit_simulator
from tools.calibration import fit
from tools.simulated_cells import Case, Simulated
from tvm_pager.planning import Limits, Trace
from tvm_pager.planning.traces.trace_file import save
from tvm_pager.simulation.simulator import SimulationOptions, SimulationResult, simulate
from tvm_pager.testing.machines import example_profile

COARSE = training(6, weight=1 << 17, activation=1 << 16, ns=2_000_000).build()
FINE = training(6, weight=1 << 12, activation=1 << 11, ns=60_000).build()  # the host is busy
POLICIES = ["lru", "lookahead", "belady"]
BUDGETS = {"700MB": 700_000_000, "1GB": 1_000_000_000, "22MB": 22_000_000}
HOST_BYTES = 8 << 30
LINK, COMPUTE, SUBMIT, LAUNCH = 0.8, 1.25, 1.7, 2.2


class Real(NamedTuple):
    """A machine that is not quite as its profile says, of which nobody knows."""

    link: float = 1
    compute: float = 1
    submit: float = 1
    launch: float = 1


@functools.cache
def measured(policy: str, budget: str, real: Real) -> SimulationResult:
    profile = example_profile()
    link = {"link_gb_per_s": 50 * real.link, "duplex_gb_per_s": 45 * real.link}
    options = SimulationOptions(
        policy=policy,
        num_iterations=10,  # as the fit: the host runs ahead, and on so small traces ever further
        num_measured=2 if policy == "lookahead" else 6,
        compute_factor=real.compute,
        submit_ns=None if real.submit == 1 else round(real.submit * 400_000),
        launch_ns=None if real.launch == 1 else round(real.launch * 20_000),
        planned_hardware=profile,
        is_awaited=False,
    )
    slow = example_profile(**link, latency_s=10e-6 / real.link)
    return simulate(trace_of(budget), slow, Limits(BUDGETS[budget], HOST_BYTES), options)


def trace_of(budget: str) -> Trace:
    return FINE if budget == "22MB" else COARSE


def cell(policy: str, result: SimulationResult) -> dict[str, Any]:
    return {
        "policy": policy,
        "bound_bytes": 1,
        "failure": "",
        "blocks": [{"is_settled": True}],
        "median_s": result.step_ns / 1e9,
        "spread": 0.02,
        "bytes_per_step": {lane: float(n) for lane, n in result.lane_bytes.items()},
    }


def bench(folder: Path, budgets: Sequence[str], real: Real | None = None) -> Path:
    """What `bench_policies --json --traces` leaves."""
    document: dict[str, Any] = {"model": "toy", "host": "8GiB", "budgets": []}
    for text in budgets:
        cells = [cell(name, measured(name, text, real or Real())) for name in POLICIES]
        cells.append({"policy": "zero_infinity", "failure": "", "bound_bytes": 10**10})
        document["budgets"].append(
            {"budget": text, "budget_bytes": BUDGETS[text], "failure": "", "cells": cells}
        )
        save(trace_of(text), folder / f"toy-{text}.trace")
    path = folder / f"bench-{'-'.join(budgets)}.json"
    path.write_text(json.dumps(document))
    return path


def fitted(folder: Path, files: list[Path], *arguments: str) -> dict[str, Any]:
    example_profile().save(folder / "profile.json")
    line = [*map(str, files), "--traces", str(folder), "--profile", str(folder / "profile.json")]
    line += ["--json", str(folder / "fit.json"), "--jobs", "1", *arguments]
    assert fit_simulator.main(line) == 0
    figures: dict[str, Any] = json.loads((folder / "fit.json").read_text())
    return figures


def refused(folder: Path, *arguments: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    example_profile().save(folder / "profile.json")
    line = ["--traces", str(folder), "--profile", str(folder / "profile.json"), "--jobs", "1"]
    assert fit_simulator.main([*map(str, arguments), *line]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_two_constants_are_found_and_explain_the_other_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Real(link=LINK, compute=COMPUTE)
    files = [bench(tmp_path, [text], real) for text in ("700MB", "1GB")]
    cells = ["--fit", "lru@700MB,lookahead@1GB"]
    figures = fitted(tmp_path, files, *cells, "--constants", "link,compute")
    assert figures["constants"]["link"] == pytest.approx(LINK, rel=0.01)
    assert figures["constants"]["compute"] == pytest.approx(COMPUTE, rel=0.01)
    assert figures["constants"]["submit"] == figures["constants"]["launch"] == 1
    assert figures["fit_error"] < 0.003
    assert not figures["at_limit"]
    assert figures["fitted_to"] == ["lru@700MB", "lookahead@1GB"]
    errors = figures["others"]["fitted"]
    assert set(errors["step"]) == {"belady@700MB", "lookahead@700MB", "lru@1GB", "belady@1GB"}
    assert max(errors["step"].values()) < 0.01
    assert max(errors["all"].values()) == max(errors["d2h"].values()) == 0
    assert min(figures["others"]["plain"]["step"].values()) > 0.1
    assert figures["step_is_held"]
    assert figures["bytes_are_held"]
    out = capsys.readouterr().out
    assert "step within 8%: held" in out
    assert "left out: zero_infinity@1GB: needs 10 GB" in out


def test_the_constants_that_explain_most_are_found_by_themselves(tmp_path: Path) -> None:
    file = bench(tmp_path, ["700MB", "1GB"], Real(compute=COMPUTE))
    figures = fitted(tmp_path, [file])
    assert figures["constants"]["compute"] == pytest.approx(COMPUTE, rel=0.01)
    assert "compute" in figures["fitted"]
    assert max(figures["others"]["fitted"]["step"].values()) < 0.01


@pytest.mark.parametrize(
    ("name", "factor", "seconds"), [("submit", SUBMIT, 400e-6), ("launch", LAUNCH, 20e-6)]
)
def test_what_a_call_costs_the_host_is_found(
    name: str, factor: float, seconds: float, tmp_path: Path
) -> None:
    file = bench(tmp_path, ["22MB"], Real(**{name: factor}))
    figures = fitted(tmp_path, [file], "--fit", "lru@22MB", "--constants", name)
    assert figures["fitted"] == [name]
    # A step is met within 0.2 %, and launches are 5 % of it.
    assert figures["physical"][f"{name}_s"] == pytest.approx(factor * seconds, rel=0.08)
    assert max(figures["others"]["fitted"]["step"].values()) < 0.01


def test_without_constants_it_is_the_simulator(tmp_path: Path) -> None:
    file = bench(tmp_path, ["700MB"])
    figures = fitted(tmp_path, [file], "--constants", "link")
    assert figures["constants"]["link"] == pytest.approx(1, abs=0.001)
    for row in figures["cells"]:
        assert row["plain"]["step_error"] == pytest.approx(0, abs=0.001)
        assert row["plain"]["bytes_errors"]["all"] == 0


def test_what_no_constant_explains_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bench(tmp_path, ["700MB"])
    document = json.loads(file.read_text())
    for values in document["budgets"][0]["cells"][:3]:
        values["median_s"] *= 5
        values["bytes_per_step"]["h2d"] *= 1.1
    file.write_text(json.dumps(document))
    figures = fitted(tmp_path, [file], "--constants", "compute", "--fit", "lru@700MB")
    assert figures["at_limit"] == ["compute"]
    assert not figures["step_is_held"]
    assert not figures["bytes_are_held"]
    out = capsys.readouterr().out
    assert "something else is missing" in out
    assert "bytes within 1%: missed by 2 of 2: lookahead@700MB, belady@700MB" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fit", "lru@700MB"], "2 constants need as many cells, not 1 (lru@700MB)"),
        (["--fit", "lru@2GB,lookahead@700MB"], "lru@2GB: no such cell has run; there are: lru@"),
        (["--fit", "zero_infinity@700MB,lru@700MB"], "zero_infinity@700MB: no such cell has run"),
        (["--fit", "lru"], "a policy, @, and a budget are needed"),
        (["--constants", "link,rust"], "one or two of link, compute, submit, launch"),
        (["--constants", "link,compute,submit"], "two cells determine no more"),
    ],
)
def test_bad_choices_are_errors(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bench(tmp_path, ["700MB"])
    assert said in refused(tmp_path, file, *arguments, capsys=capsys)


def test_bad_files_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bench(tmp_path, ["700MB"])
    (tmp_path / "toy-700MB.trace").unlink()
    said = refused(tmp_path, file, capsys=capsys)
    assert "toy-700MB.trace is missing" in said
    assert "--traces" in said
    other = tmp_path / "other.json"
    for text in ("[]", "{}", "no"):
        other.write_text(text)
        assert "not what `tools/bench_policies.py" in refused(tmp_path, other, capsys=capsys)
    assert "No such file" in refused(tmp_path, tmp_path / "none.json", capsys=capsys)


def test_bytes_on_a_disk_that_nobody_has_named_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bench(tmp_path, ["700MB"])
    document = json.loads(file.read_text())
    document["budgets"][0]["cells"][0]["bytes_per_step"]["h2n"] = 4096.0
    file.write_text(json.dumps(document))
    assert "say how much there is with --nvme" in refused(tmp_path, file, capsys=capsys)


def test_one_cell_measured_twice_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bench(tmp_path, ["700MB"])
    assert "measured twice" in refused(tmp_path, file, file, capsys=capsys)


class _Refusing:
    num_done = 0

    def run(self, wanted: list[Any]) -> list[Simulated]:
        return [Simulated(refusal="needs more") for _ in wanted]


def test_a_cell_that_the_simulator_refuses_cannot_be_fitted() -> None:
    case = Case("toy", "lru", 10, 10, 0, "raw")
    with pytest.raises(fit_simulator.PagerError, match="needs more; name another cell"):
        fit(_Refusing(), {case: 1.0}, ["link"], 1)  # type: ignore[arg-type]
