"""The iteration-time model against the step times that Ratel published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.ratel_table import cells, fit_device_rate, main

if TYPE_CHECKING:
    import pytest


def test_one_fitted_number_predicts_every_published_step_time_within_15_percent() -> None:
    errors = {(cell.batch, cell.num_drives): cell.error for cell in cells(fit_device_rate())}
    assert len(errors) == 10
    assert max(abs(error) for error in errors.values()) < 0.15, errors
    assert sum(abs(error) for error in errors.values()) / 10 < 0.07, errors


def test_a_single_drive_is_the_bottleneck_whatever_the_batch() -> None:
    found = {(cell.batch, cell.num_drives): cell for cell in cells(159e12)}
    assert found[32, 1].choice.time.busiest[1] == found[64, 1].choice.time.busiest[1] == "disk"
    assert found[64, 12].choice.time.busiest[1] == "compute"


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
