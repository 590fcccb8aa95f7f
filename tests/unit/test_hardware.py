"""The hardware profile: times that grow with bytes, files that come back exactly or are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tvm_pager.errors import ConfigError
from tvm_pager.planning import HardwareProfile
from tvm_pager.planning.hardware.profile import (
    DeviceRates,
    DiskRates,
    HostRates,
    MachineFacts,
    MatmulRates,
    Overheads,
)
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate, Point

KIB, MIB = 1 << 10, 1 << 20
RATES = st.floats(1e-3, 1e15)
CHUNKS = [64 * KIB, 256 * KIB, MIB, 2 * MIB, 8 * MIB, 32 * MIB]


def curve(rates: dict[int, float]) -> Curve:
    return Curve(tuple(Point(x, Figure.of([rate])) for x, rate in sorted(rates.items())))


@st.composite
def figures(draw: st.DrawFn) -> Figure:
    return Figure.of(draw(st.lists(RATES, min_size=1, max_size=5)))


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    chosen = sorted(draw(st.sets(st.integers(1, 1 << 40), min_size=1, max_size=6)))
    return Curve(tuple(Point(x, draw(figures())) for x in chosen))


@st.composite
def links(draw: st.DrawFn) -> LinkRate:
    return LinkRate.fitted(draw(curves()), draw(curves()))


names = st.text(max_size=20)
counts = st.integers(1, 1 << 60)
profiles = st.builds(
    HardwareProfile,
    machine=st.builds(
        MachineFacts,
        key=names,
        device_names=st.lists(names, max_size=3).map(tuple),
        driver=st.none() | names,
        torch_version=names,
        cuda_version=st.none() | names,
        python_version=names,
        kernel=names,
        nvme_device=st.none() | names,
        measured_at=names,
        measure_s=RATES,
        is_quick=st.booleans(),
    ),
    device=st.builds(
        DeviceRates,
        name=names,
        is_stand_in=st.booleans(),
        total_bytes=counts,
        free_bytes=counts,
        matmul_flop_per_s=st.builds(
            MatmulRates,
            fp32=figures(),
            tf32=st.none() | figures(),
            bf16=figures(),
            fp16=figures(),
        ),
        copy_bytes_per_s=figures(),
        adamw_params_per_s=figures(),
    ),
    host=st.builds(
        HostRates,
        cpu_name=names,
        num_cores=counts,
        num_numa_nodes=st.none() | counts,
        physical_bytes=counts,
        available_bytes=counts,
        memcpy_bytes_per_s=curves(),
        adamw_params_per_s=curves(),
        bf16_to_fp32_per_s=curves(),
        fp32_to_bf16_per_s=curves(),
    ),
    overheads=st.builds(
        Overheads,
        launch_ns=figures(),
        dispatched_ns=figures(),
        empty_h2d_ns=figures(),
        empty_d2h_ns=figures(),
    ),
    h2d=links(),
    d2h=links(),
    duplex_total_bytes_per_s=curves(),
    disks=st.lists(
        st.builds(
            DiskRates,
            engine=names,
            io=st.sampled_from(["direct", "buffered"]),
            num_threads=counts,
            read=links(),
            write=links(),
            duplex_total_bytes_per_s=figures(),
        ),
        max_size=2,
    ).map(tuple),
    notices=st.lists(names, max_size=2).map(tuple),
)


def make_profile(disks: tuple[DiskRates, ...] = ()) -> HardwareProfile:
    one, link = Figure.of([1.0, 2.0, 4.0]), LinkRate.fitted(curve({MIB: 1e9}), curve({MIB: 5e8}))
    by_threads = curve({1: 1e9, 4: 3e9})
    return HardwareProfile(
        machine=MachineFacts(
            "k", ("GPU",), "580.1", "2.11.0", "13.0", "3.12.0", "6.1", None, "2026-01-01", 1.5, True
        ),
        device=DeviceRates(
            "GPU", False, 1 << 37, 1 << 36, MatmulRates(one, None, one, one), one, one
        ),
        host=HostRates(
            "CPU", 4, None, 1 << 35, 1 << 34, by_threads, by_threads, by_threads, by_threads
        ),
        overheads=Overheads(one, one, one, one),
        h2d=link,
        d2h=link,
        duplex_total_bytes_per_s=curve({MIB: 1e9}),
        disks=disks,
        notices=(),
    )


# --- figures and curves --------------------------------------------------------------------------


def test_a_figure_is_the_median_with_the_extremes() -> None:
    assert Figure.of([3.0, 1.0, 2.0]) == Figure(2.0, 1.0, 3.0)
    assert Figure.of([4, 2]).median == 3.0
    assert Figure(2.0, 1.0, 3.0).spread == 1.0


@pytest.mark.parametrize(
    "values", [(0.0, 0.0, 1.0), (2.0, 3.0, 4.0), (2.0, 1.0, 1.5), (math.nan, 1.0, 2.0)]
)
def test_a_figure_that_cannot_have_been_measured_is_refused(
    values: tuple[float, float, float],
) -> None:
    with pytest.raises(ValueError, match="0 < low <= median <= high"):
        Figure(*values)


def test_a_curve_is_read_between_its_points_and_held_beyond_them() -> None:
    rates = curve({1: 10.0, 4: 30.0})
    assert [rates.at(x) for x in (1, 2, 4, 100)] == [10.0, 20.0, 30.0, 30.0]
    assert curve({8: 5.0}).at(1) == 5.0


@pytest.mark.parametrize("xs", [(), (2, 1), (1, 1), (0, 1)])
def test_a_curve_without_order_is_refused(xs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rise from 1"):
        Curve(tuple(Point(x, Figure.of([1.0])) for x in xs))


@given(curves(), st.integers(1, 1 << 45))
def test_a_curve_stays_within_its_extremes(rates: Curve, x: int) -> None:
    medians = [point.figure.median for point in rates.points]
    assert min(medians) <= rates.at(x) <= max(medians)


# --- the time of a transfer ----------------------------------------------------------------------


def test_the_fit_finds_latency_and_rate_of_a_link_that_has_both() -> None:
    latency_s, bytes_per_s = 6.5e-6, 49e9
    rates = {c: c / (latency_s + c / bytes_per_s) for c in CHUNKS}
    link = LinkRate.fitted(curve(rates), curve({32 * MIB: 40e9}))
    assert link.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert link.fit_error == pytest.approx(0.0, abs=1e-6)
    assert link.seconds(64 * KIB, 64 * KIB) == pytest.approx(64 * KIB / rates[64 * KIB])


def test_the_fit_of_rates_measured_on_a_gpu_is_off_by_a_tenth_at_most() -> None:
    gpu = {64 * KIB: 8.3e9, MIB: 42e9, 2 * MIB: 44e9, 8 * MIB: 47e9, 32 * MIB: 48.7e9}
    link = LinkRate.fitted(curve(gpu), curve(gpu))
    assert link.fit_error < 0.1
    assert 5e-6 < link.latency_s < 8e-6
    assert 47e9 < link.bytes_per_s < 51e9


@pytest.mark.parametrize(
    "rates",
    [
        {MIB: 1e9},
        {MIB: 2e9, 2 * MIB: 1e9},  # slower in larger chunks: no latency could explain it
        {MIB: 1e9, 2 * MIB: 9e9},  # faster than any latency could explain
    ],
)
def test_the_fit_never_gives_a_negative_latency_or_no_rate(rates: dict[int, float]) -> None:
    link = LinkRate.fitted(curve(rates), curve(rates))
    assert link.latency_s >= 0
    assert 0 < link.bytes_per_s <= 2 * max(rates.values()) * (1 + 1e-9)


def test_each_chunk_pays_its_latency() -> None:
    link = LinkRate(curve({MIB: 1e9}), curve({MIB: 1e9}), latency_s=1e-3, bytes_per_s=1e9)
    assert link.seconds(4 * MIB, MIB) == pytest.approx(4e-3 + 4 * MIB / 1e9)
    assert link.seconds(4 * MIB + 1, MIB) == pytest.approx(5e-3 + (4 * MIB + 1) / 1e9)
    assert link.seconds(MIB) == link.seconds(MIB, MIB)  # the largest measured size
    assert link.seconds(0) == 0.0


def test_a_busy_opposite_direction_slows_by_what_was_measured_near_that_chunk_size() -> None:
    link = LinkRate.fitted(
        curve({64 * KIB: 8e9, MIB: 40e9, 32 * MIB: 50e9}), curve({MIB: 30e9, 32 * MIB: 40e9})
    )
    assert link.duplex_slowdown(32 * MIB) == pytest.approx(1.25)
    assert link.duplex_slowdown(64 * KIB) == pytest.approx(40 / 30)
    alone_s, duplex_s = link.seconds(1 << 30, MIB), link.seconds(1 << 30, MIB, True)
    assert duplex_s == pytest.approx(alone_s * 40 / 30)
    faster = LinkRate.fitted(curve({MIB: 1e9}), curve({MIB: 2e9}))
    assert faster.duplex_slowdown(MIB) == 1.0  # noise must not make sharing a gain


@pytest.mark.parametrize(("nbytes", "chunk_bytes"), [(-1, MIB), (1, 0), (1, -5)])
def test_senseless_sizes_are_refused(nbytes: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        make_profile().h2d.seconds(nbytes, chunk_bytes)


@given(links(), st.lists(st.integers(1, 1 << 50), min_size=2), st.integers(1, 1 << 40), st.data())
def test_more_bytes_never_take_less_time(
    link: LinkRate, sizes: list[int], chunk_bytes: int, data: st.DataObject
) -> None:
    is_duplex = data.draw(st.booleans())
    chunk = data.draw(st.sampled_from([None, chunk_bytes]))
    times = [link.seconds(nbytes, chunk, is_duplex) for nbytes in sorted(sizes)]
    assert all(0 < a <= b and math.isfinite(b) for a, b in itertools.pairwise(times))
    assert link.seconds(sizes[0], chunk, True) >= link.seconds(sizes[0], chunk)


# --- files ---------------------------------------------------------------------------------------


@given(profiles)
@example(make_profile())
def test_a_profile_comes_back_from_json_exactly(profile: HardwareProfile) -> None:
    assert HardwareProfile.from_dict(json.loads(profile.to_json())) == profile


def test_a_saved_profile_is_private_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("the one before")
    path.chmod(0o644)
    make_profile().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert HardwareProfile.load(path) == make_profile()
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("the one before")

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(ConfigError, match=r"profile\.json.*No space left"):
        make_profile().save(path)
    assert path.read_text() == "the one before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.*No such file"):
        make_profile().save(tmp_path / "absent" / "profile.json")
    with pytest.raises(ConfigError, match=r"absent.*No such file"):
        HardwareProfile.load(tmp_path / "absent" / "profile.json")


def change(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    target = values
    for name in parents:
        target = target[name]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return values


@pytest.mark.parametrize(
    ("field", "value", "mentions"),
    [
        ("version", 99, "version 99"),
        ("version", None, "version None"),
        ("version", True, "version True"),
        ("h2d", None, "h2d"),
        ("h2d", 3, "h2d"),
        ("colour", "red", "colour"),
        ("h2d.latency_s", -1.0, "h2d.*latency_s"),
        ("h2d.latency_s", "fast", "h2d.latency_s"),
        ("h2d.bytes_per_s", 0.0, "h2d.*bytes_per_s"),
        ("h2d.bytes_per_s", math.nan, "h2d.bytes_per_s"),
        ("h2d.bytes_per_s", 10**400, "h2d.bytes_per_s"),
        ("h2d.by_chunk.points", [], "h2d.by_chunk"),
        ("h2d.by_chunk.points", "many", "h2d.by_chunk.points"),
        ("h2d.by_chunk.points", [3], r"h2d.by_chunk.points\[0\]"),
        ("device.is_stand_in", 1, "device.is_stand_in"),
        ("device.total_bytes", 1.5, "device.total_bytes"),
        ("device.total_bytes", True, "device.total_bytes"),
        ("device.total_bytes", -1, "device.*total_bytes"),
        ("host.num_cores", 0, "host.*num_cores"),
        ("machine.driver", 580, "machine.driver"),
        ("overheads.launch_ns.low", 0.0, "overheads.launch_ns"),
        ("disks", {}, "disks"),
    ],
)
def test_a_broken_field_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, mentions: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(change(json.loads(make_profile().to_json()), field, value)))
    with pytest.raises(ConfigError, match=mentions) as caught:
        HardwareProfile.load(path)
    assert str(path) in str(caught.value)
    assert "tvm-pager profile --refresh" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00", "[" * 100_000, '{"version": 1'])
def test_a_file_that_holds_no_profile_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        HardwareProfile.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"profile\.json"):
        HardwareProfile.load(path)


@given(st.data())
def test_a_truncated_file_is_refused(data: st.DataObject) -> None:
    text = make_profile().to_json().strip()
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ConfigError):
        HardwareProfile.from_json(text[:cut])


def test_the_disk_of_an_engine_is_found_by_name() -> None:
    link = make_profile().h2d
    disks = tuple(
        DiskRates(engine, "direct", 4, link, link, Figure.of([1.0])) for engine in ("raw", "posix")
    )
    profile = make_profile(disks)
    assert profile.disk("posix") is disks[1]
    with pytest.raises(ConfigError, match=r"kvikio.*raw, posix"):
        profile.disk("kvikio")
    with pytest.raises(ConfigError, match="--nvme"):
        make_profile().disk("raw")


def test_a_profile_is_a_value() -> None:
    assert hash(make_profile()) == hash(make_profile())
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_profile().notices = ("changed",)  # type: ignore[misc]
