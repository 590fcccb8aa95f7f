"""Profiles are kept per machine, found again, and replaced where they cannot be used."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.tools.profile_rig import QUICK_TINY, TINY, no_pager
from tvm_pager.errors import ConfigError
from tvm_pager.observe.profile import cache, load_or_measure
from tvm_pager.observe.profile.identity import identify
from tvm_pager.observe.profile.measure import measure

if TYPE_CHECKING:
    from tvm_pager.planning import HardwareProfile

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Real measurements without a disk, counted."""
    efforts: list[Any] = []

    def counting(*arguments: Any) -> HardwareProfile:
        efforts.append(arguments[3])
        return measure(*arguments)

    monkeypatch.setattr("tvm_pager.observe.profile.measure.measure", counting)
    return efforts


def test_a_profile_is_measured_once(tmp_path: Path, counted: list[Any]) -> None:
    directory = tmp_path / "new" / "cache"
    first = load_or_measure(no_pager, effort=TINY, torch_device="cpu", directory=directory)
    again = load_or_measure(no_pager, effort=TINY, torch_device="cpu", directory=directory)
    assert again == first
    assert len(counted) == 1
    load_or_measure(no_pager, effort=TINY, torch_device="cpu", directory=directory, is_refresh=True)
    assert len(counted) == 2
    (path,) = directory.iterdir()
    assert path.name == f"profile-{first.machine.key}.json"
    assert (path.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_quick_profile_does_not_serve_who_wants_a_full_one(
    tmp_path: Path, counted: list[Any]
) -> None:
    def load(effort: Any, **options: Any) -> HardwareProfile:
        return load_or_measure(
            no_pager, effort=effort, torch_device="cpu", directory=tmp_path, **options
        )

    quick = load(QUICK_TINY, is_quick=True)
    full = load(TINY)
    assert (quick.machine.is_quick, full.machine.is_quick) == (True, False)
    assert load(QUICK_TINY, is_quick=True) == full
    assert len(counted) == 2


@pytest.mark.parametrize("text", ["{", '{"version": 99}', "other key", "\x00"])
def test_a_file_that_cannot_be_used_is_replaced_with_one_notice(
    tmp_path: Path, counted: list[Any], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    options: dict[str, Any] = {"torch_device": "cpu", "directory": tmp_path, "effort": TINY}
    profile = load_or_measure(no_pager, **options)
    (path,) = tmp_path.iterdir()
    if text == "other key":
        machine = dataclasses.replace(profile.machine, key="other")
        text = dataclasses.replace(profile, machine=machine).to_json()
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "tvm_pager"):
        load_or_measure(no_pager, **options)
    assert len(counted) == 2
    (record,) = [r for r in caplog.records if r.name == "tvm_pager"]
    assert str(path) in record.getMessage()
    caplog.clear()
    load_or_measure(no_pager, **options)
    assert (len(counted), caplog.records) == (2, [])


def test_a_cache_that_cannot_be_written_costs_a_notice_only(
    tmp_path: Path, counted: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    load_or_measure(no_pager, effort=TINY, torch_device="cpu", directory=tmp_path / "file" / "x")
    assert [r.getMessage() for r in caplog.records if "not kept" in r.getMessage()]
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/tvm_pager"),
        ({"XDG_CACHE_HOME": "relative"}, os.path.expanduser("~/.cache/tvm_pager")),
        ({}, os.path.expanduser("~/.cache/tvm_pager")),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(environ: dict[str, str], expected: str) -> None:
    assert str(cache.cache_directory(environ)) == expected


def test_the_key_differs_with_hardware_software_and_disk() -> None:
    identity = identify(CPU, None)
    assert identity.key == identify(CPU, None).key
    changes: dict[str, Any] = {
        "torch_device": "cuda:0",
        "device_names": ("GPU",),
        "driver": "1",
        "torch_version": "1",
        "cuda_version": "1",
        "cpu_name": "1",
        "num_cores": 9999,
        "nvme_device": "1:1",
    }
    assert changes.keys() == {field.name for field in dataclasses.fields(identity)}
    keys = {dataclasses.replace(identity, **{name: value}).key for name, value in changes.items()}
    assert len({*keys, identity.key}) == len(changes) + 1


def test_two_directories_on_one_disk_are_the_same_machine(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert identify(CPU, tmp_path).key == identify(CPU, tmp_path / "a").key
    with contextlib.suppress(FileNotFoundError):
        assert identify(CPU, "/proc").key != identify(CPU, tmp_path).key
    with pytest.raises(ConfigError, match="absent"):
        identify(CPU, tmp_path / "absent")
