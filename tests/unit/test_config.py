"""The config: one form per value, layers in their order, refusals by name with the remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pager.config import ENGINES, MIN_STAGING_BYTES, PagerConfig
from tvm_pager.errors import ConfigError
from tvm_pager.machine import DeviceMemory, Limit

MIB, GIB = 2**20, 2**30
NOBODY = 65534
HOST = Limit(16 * GIB, "the physical memory")
SMALL = Limit(GIB, "the physical memory")
CARD = DeviceMemory(free_bytes=9 * GIB, total_bytes=10 * GIB)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory outside pytest's private tree, so that another user can reach it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_every_option_is_documented() -> None:
    documentation = PagerConfig.__doc__ or ""
    for field in dataclasses.fields(PagerConfig):
        assert f"\n        {field.name}: " in documentation, field.name


def test_sizes_are_kept_as_bytes_or_fractions() -> None:
    config = PagerConfig(device="4GiB", host="50%", nvme="/swap", nvme_bytes=0.25)
    assert (config.device, config.host, config.nvme_bytes) == (4 * GIB, 0.5, 0.25)
    assert PagerConfig().segment_bytes == 32 * 2**20


def test_the_nvme_path_may_be_a_path_object_and_start_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert PagerConfig(nvme="~/swap").nvme == "/home/someone/swap"
    assert PagerConfig(nvme=Path("/mnt/swap")).nvme == "/mnt/swap"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "4 gigs"}, "device='4 gigs'.*accepted are"),
        ({"device": 0}, "device=0"),
        ({"host": True}, "host=True"),
        ({"host": -1}, "host=-1.*negative"),
        ({"headroom": "some"}, "headroom='some'.*accepted are"),
        ({"headroom": -1}, "headroom=-1.*negative"),
        ({"nvme": ""}, "nvme=''"),
        ({"nvme": 3}, "nvme=3"),
        ({"nvme": "a\0b"}, "NUL"),
        ({"nvme_bytes": "1GiB"}, "without nvme"),
        ({"policy": None}, "policy=None"),
        ({"policy": ""}, "policy=''"),
        ({"torch_device": 0}, "torch_device=0"),
        ({"engine": "uring"}, "engine='uring'.*auto, posix, kvikio"),
        ({"segment_bytes": "50%"}, "segment_bytes='50%'"),
        ({"segment_bytes": 1000}, "multiple of 4096"),
        ({"segment_bytes": 0}, "multiple of 4096"),
        ({"check": 3}, "0, 1 and 2"),
        ({"check": True}, "0, 1 and 2"),
        ({"strict": 1}, "True or False"),
        ({"devise": "4GiB"}, "'devise'.*known: device, headroom, host, nvme"),
    ],
)
def test_an_unusable_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagerConfig.from_dict(options)


options_strategy = st.fixed_dictionaries(
    {},
    optional={
        "device": st.one_of(st.none(), st.integers(1, 2**40), st.just("12.5%"), st.just("3GiB")),
        "headroom": st.one_of(st.none(), st.integers(0, 2**40), st.just(0.02)),
        "host": st.one_of(st.none(), st.integers(0, 2**40), st.just(0.75)),
        "nvme": st.one_of(st.none(), st.just("/swap")),
        "policy": st.sampled_from(["lru", "clock", "theirs"]),
        "engine": st.sampled_from(ENGINES),
        "segment_bytes": st.integers(1, 2**14).map(lambda count: count * 4096),
        "check": st.integers(0, 2),
        "strict": st.booleans(),
    },
)


@given(options_strategy)
def test_a_config_round_trips_through_dict_and_json(options: dict[str, Any]) -> None:
    config = PagerConfig.from_dict(options)
    assert PagerConfig.from_dict(config.to_dict()) == config
    assert PagerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.replace() == config


@given(options_strategy)
def test_the_environment_says_the_same_as_arguments(options: dict[str, Any]) -> None:
    given_options = {name: value for name, value in options.items() if value is not None}
    environ = {f"TVM_PAGER_{name.upper()}": str(value) for name, value in given_options.items()}
    assert PagerConfig.from_env(environ) == PagerConfig.from_dict(given_options)


def test_from_json_reads_a_file_and_names_it_when_it_cannot(tmp_path: Path) -> None:
    path = tmp_path / "pager.json"
    path.write_text('{"device": "4GiB", "strict": true}')
    assert PagerConfig.from_json(path) == PagerConfig(device=4 * GIB, strict=True)
    for text, message in [("{", "not JSON"), ("[1]", "one JSON object"), ('{"x": 1}', "'x'")]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            PagerConfig.from_json(path)
    with pytest.raises(ConfigError, match=r"absent\.json: No such file"):
        PagerConfig.from_json(tmp_path / "absent.json")


def test_replace_validates_again() -> None:
    config = PagerConfig(device="4GiB")
    assert config.replace(check=2) == PagerConfig(device="4GiB", check=2)
    with pytest.raises(ConfigError, match="check=9"):
        config.replace(check=9)
    with pytest.raises(ConfigError, match="'chick'"):
        config.replace(chick=1)


def test_environment_variables_that_are_empty_or_foreign_do_not_count() -> None:
    environ = {"TVM_PAGER_DEVICE": "  ", "HOME": "/root", "TVM_PAGERS": "x"}
    assert PagerConfig.from_env(environ) == PagerConfig()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("TVM_PAGER_DEVISE", "4GiB", "TVM_PAGER_.*'devise'"),
        ("TVM_PAGER_STRICT", "perhaps", "TVM_PAGER_STRICT='perhaps'"),
        ("TVM_PAGER_CHECK", "-1", "check='-1'"),
        ("TVM_PAGER_DEVICE", "lots", "device='lots'"),
    ],
)
def test_a_wrong_environment_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagerConfig.from_env({name: text})


def test_arguments_beat_the_config_beat_the_environment_beat_defaults() -> None:
    environ = {"TVM_PAGER_DEVICE": "1GiB", "TVM_PAGER_HOST": "1GiB", "TVM_PAGER_CHECK": "1"}
    options = {
        "device": "3GiB",
        "host": None,
        "policy": "lookahead",
        "check": None,
        "strict": False,
    }
    config = PagerConfig.from_options(
        options, config={"device": "2GiB", "host": "2GiB", "strict": True}, environ=environ
    )
    assert config == PagerConfig(device="3GiB", host="2GiB", check=1, strict=True)


def test_a_config_object_is_complete_so_the_environment_is_not_read(tmp_path: Path) -> None:
    environ = {"TVM_PAGER_HOST": "1GiB"}
    given_config = PagerConfig(device="2GiB", check=1)
    config = PagerConfig.from_options({"check": 2}, config=given_config, environ=environ)
    assert config == PagerConfig(device="2GiB", check=2)
    (tmp_path / "c.json").write_text('{"device": "2GiB"}')
    config = PagerConfig.from_options({}, config=tmp_path / "c.json", environ=environ)
    assert config == PagerConfig(device="2GiB", host="1GiB")


def test_unknown_arguments_are_refused_with_a_config_too() -> None:
    with pytest.raises(ConfigError, match="'devise'"):
        PagerConfig.from_options({"devise": 1}, config=PagerConfig(), environ={})
    with pytest.raises(ConfigError, match="'hots'"):
        PagerConfig.from_options({}, config={"hots": 1}, environ={})


def test_fractions_resolve_against_what_was_measured() -> None:
    budgets = PagerConfig(device=0.5, headroom=GIB, host="25%").resolve(CARD, HOST)
    assert (budgets.device_bytes, budgets.host_bytes) == (4 * GIB, 4 * GIB)
    assert (budgets.nvme_directory, budgets.nvme_bytes, budgets.nvme_free_bytes) == (None, None, 0)
    assert budgets.segment_bytes == 32 * 2**20
    assert budgets.notices == ()


def test_defaults_take_the_free_device_less_headroom_and_half_the_host() -> None:
    budgets = PagerConfig().resolve(CARD, HOST)
    assert (budgets.device_bytes, budgets.host_bytes) == (9 * GIB - 512 * MIB, 8 * GIB)
    assert PagerConfig().resolve(None, HOST).device_bytes is None


@pytest.mark.parametrize(
    ("headroom", "left_bytes"),
    [
        (None, 2 * GIB),  # 2 % of the whole card: more than 512 MiB on a large one
        (0, 0),
        ("1GiB", GIB),
        (0.25, 25 * GIB),
        ("1%", GIB),
    ],
)
def test_headroom_stays_free_where_the_budget_is_relative(
    headroom: int | float | str | None, left_bytes: int
) -> None:
    card = DeviceMemory(free_bytes=60 * GIB, total_bytes=100 * GIB)  # others hold 40 GiB of it
    config = PagerConfig(headroom=headroom)
    assert config.resolve(card, HOST).device_bytes == 60 * GIB - left_bytes
    half = config.replace(device=0.5).resolve(card, HOST)
    assert half.device_bytes == (60 * GIB - left_bytes) // 2
    given = config.replace(device="59GiB").resolve(card, HOST)
    assert given.device_bytes == 59 * GIB, "what was asked for in bytes stands"


def test_headroom_means_nothing_without_a_card() -> None:
    assert PagerConfig(headroom="1GiB").resolve(None, HOST).device_bytes is None


def test_a_device_without_more_free_memory_than_headroom_is_refused_with_the_numbers() -> None:
    card = DeviceMemory(free_bytes=400 * MIB, total_bytes=10 * GIB)
    with pytest.raises(ConfigError, match=r"400\.00 MiB of 10\.00 GiB free.*512\.00 MiB.*headroom"):
        PagerConfig().resolve(card, HOST)
    assert PagerConfig(headroom=0).resolve(card, HOST).device_bytes == 400 * MIB


def test_a_device_budget_above_what_is_free_is_told() -> None:
    """Other processes may end, and the pager evicts when the card is full: so it is no error."""
    budgets = PagerConfig(device="9.5GiB").resolve(CARD, HOST)
    assert budgets.device_bytes == 19 * GIB // 2
    (notice,) = budgets.notices
    assert "device budget of 9.50 GiB" in notice
    assert "9.00 GiB of 10.00 GiB" in notice


def test_a_fraction_of_an_unknown_or_tiny_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device: 0\.5 is a fraction"):
        PagerConfig(device=0.5).resolve(None, SMALL)
    with pytest.raises(ConfigError, match="device budget of 0 B"):
        PagerConfig(device=0.5, headroom=0).resolve(DeviceMemory(1, GIB), SMALL)


def test_a_host_budget_above_what_the_machine_allows_is_refused_with_numbers_and_reason() -> None:
    assert PagerConfig(host="16GiB").resolve(None, HOST).host_bytes == 16 * GIB
    with pytest.raises(ConfigError, match=r"host budget of 17\.00 GiB.*physical.*16\.00 GiB"):
        PagerConfig(host="17GiB").resolve(None, HOST)
    group = Limit(2 * GIB, "memory.max of the control group /job")
    with pytest.raises(ConfigError, match=r"3\.00 GiB: memory\.max of .*/job is 2\.00 GiB; give"):
        PagerConfig(host="3GiB").resolve(None, group)
    assert PagerConfig(host="50%").resolve(None, group).host_bytes == GIB


def test_the_default_host_budget_is_half_of_what_is_free_now() -> None:
    available = Limit(6 * GIB, "the memory that is available now")
    assert PagerConfig().resolve(None, HOST, available).host_bytes == 3 * GIB
    assert PagerConfig(host=0.5).resolve(None, HOST, available).host_bytes == 8 * GIB
    more = Limit(40 * GIB, "the memory that is available now")
    assert PagerConfig().resolve(None, HOST, more).host_bytes == 8 * GIB, "never above the limit"


def test_a_host_budget_above_what_is_free_now_is_told() -> None:
    """A model in ordinary memory becomes pages: what it holds now is free then."""
    available = Limit(6 * GIB, "the memory that is available now")
    budgets = PagerConfig(host="7GiB").resolve(None, HOST, available)
    assert budgets.host_bytes == 7 * GIB
    (notice,) = budgets.notices
    assert "host budget of 7.00 GiB" in notice
    assert "the memory that is available now is 6.00 GiB" in notice
    assert PagerConfig(host="6GiB").resolve(None, HOST, available).notices == ()


def test_nvme_needs_host_memory_for_staging(tmp_path: Path) -> None:
    config = PagerConfig(host=MIN_STAGING_BYTES, nvme=tmp_path)
    assert config.resolve(None, SMALL).nvme_directory == str(tmp_path)
    assert config.replace(host=0, nvme=None).resolve(None, SMALL).host_bytes == 0
    with pytest.raises(ConfigError, match=r"256\.00 KiB is needed"):
        config.replace(host=MIN_STAGING_BYTES - 1).resolve(None, SMALL)


def test_a_relative_swap_directory_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swap").mkdir()
    monkeypatch.chdir(tmp_path)
    budgets = PagerConfig(host="1MiB", nvme="swap").resolve(None, SMALL)
    assert budgets.nvme_directory == str(tmp_path / "swap")
    assert budgets.nvme_free_bytes > 0


def test_a_swap_file_larger_than_the_free_space_is_refused(tmp_path: Path) -> None:
    config = PagerConfig(host="1MiB", nvme=tmp_path, nvme_bytes="50%")
    budgets = config.resolve(None, SMALL)
    assert budgets.nvme_bytes is not None
    assert 0 < budgets.nvme_bytes < budgets.nvme_free_bytes
    with pytest.raises(ConfigError, match=r"1024\.00 PiB: .* free"):
        config.replace(nvme_bytes=2**60).resolve(None, SMALL)


def test_an_absent_swap_directory_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*mkdir"):
        PagerConfig(host="1MiB", nvme=tmp_path / "absent").resolve(None, SMALL)


def test_a_swap_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        PagerConfig(host="1MiB", nvme=tmp_path / "file").resolve(None, SMALL)


def test_a_swap_directory_that_is_not_writable_is_refused(open_directory: Path) -> None:
    config = PagerConfig(host="1MiB", nvme=open_directory)
    open_directory.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:  # root may write everywhere, so look with another user's eyes
        os.seteuid(NOBODY)
    try:
        with pytest.raises(ConfigError, match=r"not writable for user \d+; change its owner"):
            config.resolve(None, SMALL)
    finally:
        if is_root:
            os.seteuid(0)
        open_directory.chmod(0o700)


def test_a_swap_directory_that_others_can_write_is_refused_unless_sticky(tmp_path: Path) -> None:
    config = PagerConfig(host="1MiB", nvme=tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 0777.*chmod o-w"):
        config.resolve(None, SMALL)
    tmp_path.chmod(0o1777)
    assert config.resolve(None, SMALL).nvme_directory == str(tmp_path)
    tmp_path.chmod(0o775)  # a group is chosen, not everyone
    assert config.resolve(None, SMALL).nvme_directory == str(tmp_path)
