"""What a user can get wrong: refused by name, with numbers and remedy, and nothing is lost."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch import nn

import tvm_pager
from tests.quantised import Quantised
from tests.trials.harness import (
    KIB,
    assert_nothing_left,
    batch,
    mlp,
    small_pager,
)
from tvm_pager.machine import host_limit_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --- budgets ---


TOO_LARGE: dict[str, Callable[[], torch.Tensor]] = {
    "creation": lambda: torch.zeros(8192),
    "result": lambda: torch.ones(48, 1) @ torch.ones(1, 96),
    "operands": lambda: torch.dot(torch.ones(2100), torch.ones(2100)),
    "one of many": lambda: torch.cat([torch.ones(8), torch.ones(4, 1024).view(-1)]),
}


@pytest.mark.parametrize("program", TOO_LARGE)
def test_a_budget_below_one_operation_names_it_and_goes_on(program: str, tmp_path: Path) -> None:
    with small_pager(tmp_path, device=16 * KIB) as pager:
        small = torch.ones(8, 8)
        with pytest.raises(tvm_pager.BudgetError, match=r"(?s)KiB.*16\.00 KiB") as caught:
            TOO_LARGE[program]()
        assert str(caught.value).count("KiB") >= 2
        pager.check_invariants()
        assert torch.mm(small, small).sum().item() == 512.0
        del small, caught
    assert_nothing_left(tmp_path)


def test_a_module_too_large_for_the_device_is_refused_at_adoption_or_use(tmp_path: Path) -> None:
    model = nn.Linear(128, 128)  # 64 KiB in one weight
    with small_pager(tmp_path, device=32 * KIB) as pager:

        def adopt_and_run() -> None:
            tvm_pager.page(model)
            model(torch.ones(1, 128))

        with pytest.raises(tvm_pager.BudgetError, match=r"weight|addmm"):
            adopt_and_run()
        pager.check_invariants()
        assert torch.ones(16).sum().item() == 16.0
        tvm_pager.unpage(model)
    assert_nothing_left(tmp_path)
    assert model(torch.ones(1, 128)).shape == (1, 128)


@pytest.mark.parametrize(
    "options",
    [
        {"device": "twelve parsecs"},
        {"device": "-1GiB"},
        {"device": -1},
        {"device": 0},
        {"device": 1.5},
        {"device": float("nan")},
        {"device": True},
        {"device": "64KB KB"},
        {"host": "lots"},
        {"host": -5},
        {"segment_bytes": 0},
        {"segment_bytes": 1000},
        {"segment_bytes": "-4KiB"},
        {"check": 7},
        {"check": "always"},
        {"engine": "carrier pigeon"},
        {"torch_device": "abacus"},
        {"torch_device": "meta"},
        {"strict": "perhaps"},
        {"config": {"devize": "1GiB"}},
        {"config": "/there/is/no/such/file.json"},
        {"nvme_bytes": "1GiB", "nvme": None},
    ],
    ids=str,
)
def test_an_option_that_means_nothing_is_refused_by_name(
    options: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"device": "64KiB", "host": "512KiB", "torch_device": "cpu"}
    with pytest.raises(tvm_pager.ConfigError) as caught:
        tvm_pager.Pager(**(settings | options))
    text = str(caught.value)
    name, value = next(iter(options.items()))
    assert name in text or "devize" in text or "no/such/file" in text, text
    if not isinstance(value, dict):
        assert str(value) in text or "1073741824" in text, text
    assert isinstance(caught.value, ValueError)
    assert_nothing_left(tmp_path)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="devize"):
        tvm_pager.Pager(devize="1GiB")


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_budget_above_what_the_machine_allows_is_refused(tier: str, tmp_path: Path) -> None:
    """Page-locked memory that is not there, or CPU memory that stands in for a device."""
    total = psutil.virtual_memory().total
    options = {"host": 256 * KIB, "torch_device": "cpu"} | {tier: 4 * total}
    with pytest.raises(tvm_pager.ConfigError, match=tier) as caught:
        tvm_pager.Pager(**options)
    text = str(caught.value)
    assert host_limit_bytes().reason in text  # the physical memory, outside of a container
    assert text.count("iB") >= 2, "both numbers"
    assert_nothing_left(tmp_path)


def test_a_host_budget_below_staging_says_how_much_is_needed(tmp_path: Path) -> None:
    with pytest.raises(tvm_pager.ConfigError, match=r"256\.00 KiB"):
        small_pager(tmp_path, host=4 * KIB)
    assert_nothing_left(tmp_path)


# --- policies ---


def test_an_unknown_policy_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(tvm_pager.PolicyError, match="lrru") as caught:
        small_pager(tmp_path, policy="lrru")
    assert "lru" in str(caught.value).replace("lrru", "")
    assert "clock" in str(caught.value)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("policy", ["", "os:getcwd", "tvm_pager", 7])
def test_a_name_that_is_no_policy_is_refused(policy: Any, tmp_path: Path) -> None:
    with pytest.raises(tvm_pager.PagerError, match="policy"):
        small_pager(tmp_path, policy=policy)
    assert_nothing_left(tmp_path)


# --- order of calls ---


def test_pagers_do_not_nest(tmp_path: Path) -> None:
    with small_pager(tmp_path) as outer:
        tensor = torch.ones(16)
        with pytest.raises(tvm_pager.PagerError, match=r"nest|active"), small_pager(tmp_path):
            pass
        outer.evict_all()
        assert outer.is_paged(torch.ones(2))
        assert tensor.sum().item() == 16.0
        del tensor
    gc.collect()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("how", ["exit", "close"])
def test_tensors_outlive_their_pager(how: str, tmp_path: Path) -> None:
    """After the end each tensor reads as in plain torch, or says that its pager is closed."""
    pager = small_pager(tmp_path)
    model = mlp(num_layers=4)  # 64 KiB and more: not everything fits on the device at once
    expected = [p.detach().clone() for p in model.parameters()]
    if how == "exit":
        with pager:
            tvm_pager.page(model)
            loose = torch.arange(64.0)
            pager.evict_all()
    else:
        tvm_pager.page(model, pager=pager)
        loose = model[0].bias.detach() * 0 + torch.arange(64.0)
        pager.evict_all()
        pager.close()
    assert pager.closed
    for wanted, tensor in zip(
        [*expected, torch.arange(64.0)], [*model.parameters(), loose], strict=True
    ):
        try:
            values = tensor.detach().tolist()
        except tvm_pager.PagerClosedError:
            values = pager.recover(tensor).tolist()
        assert values == wanted.tolist()
    assert_nothing_left(tmp_path)
    out = model(batch(0))
    out.sum().backward()
    assert model[0].weight.grad.shape == (64, 64)
    del out
    tvm_pager.unpage(model)
    assert type(model[0].weight) is nn.Parameter


def test_a_closed_pager_refuses_work_by_name(tmp_path: Path) -> None:
    pager = small_pager(tmp_path)
    pager.close()
    pager.close()  # a second time is nothing
    assert pager.closed
    with pytest.raises(tvm_pager.PagerClosedError, match="closed"), pager:
        pass
    with pytest.raises(tvm_pager.PagerClosedError, match="closed"):
        tvm_pager.page(nn.Linear(2, 2), pager=pager)
    with pytest.raises(tvm_pager.PagerClosedError, match="closed"):
        pager.evict_all()
    assert pager.stats().num_pages == 0
    assert_nothing_left(tmp_path)


def test_an_error_inside_the_context_passes_through(tmp_path: Path) -> None:
    class UserError(Exception):
        pass

    pager = small_pager(tmp_path)
    kept = []

    def program() -> None:
        with pager:
            kept.append(torch.ones(16))
            pager.evict_all()
            raise UserError

    with pytest.raises(UserError):
        program()
    assert pager.closed
    assert kept[0].tolist() == [1.0] * 16
    assert type(torch.ones(2)) is torch.Tensor
    assert_nothing_left(tmp_path)


def test_options_beside_an_open_pager_are_refused(tmp_path: Path) -> None:
    with small_pager(tmp_path) as pager, pytest.raises(tvm_pager.ConfigError, match="device"):
        tvm_pager.page(nn.Linear(2, 2), pager=pager, device="1GiB")
    assert_nothing_left(tmp_path)


# --- what cannot be paged ---


class Foreign(torch.Tensor):
    """A subclass that knows nothing of pages."""


def unpageable(kind: str) -> torch.Tensor:
    if kind == "sparse":
        return torch.eye(3).to_sparse()
    if kind == "foreign subclass":
        return torch.eye(3).as_subclass(Foreign)
    if kind == "wrapper subclass":
        return Quantised(torch.eye(3, dtype=torch.int8), torch.tensor(2.0))
    return torch.empty(3, 3, device="meta")


@pytest.mark.parametrize("kind", ["sparse", "foreign subclass", "wrapper subclass", "meta"])
def test_what_cannot_be_paged_is_said_once_and_works(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3, bias=False)
    model.register_buffer("first", unpageable(kind))
    model.register_buffer("second", unpageable(kind))
    with small_pager(tmp_path) as pager:
        before = len(pager.stats().notices)
        try:
            tvm_pager.page(model)
            tvm_pager.page(model)
        except tvm_pager.UnpageableError as error:
            assert "first" in str(error)  # noqa: PT017 - either answer is right
            return
        notices = pager.stats().notices[before:]
        assert len(notices) == (0 if kind == "meta" else 1), notices
        assert pager.is_paged(model.weight)
        assert not pager.is_paged(model.first)
        pager.evict_all()
        if kind != "meta":
            scale = 2.0 if kind == "wrapper subclass" else 1.0
            out = torch.ones(3, 3) @ model.first
            pager.evict_all()
            assert out.tolist() == [[scale] * 3] * 3
            out = model.second @ model.weight
            pager.evict_all()
            assert out.tolist() == (model.weight * scale).tolist()
            del out
        del model
    gc.collect()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("thing", ["a string", 7, None, {"weight": 1}], ids=str)
def test_what_is_no_model_is_refused_by_type(thing: Any, tmp_path: Path) -> None:
    with small_pager(tmp_path), pytest.raises(TypeError, match=type(thing).__name__):
        tvm_pager.page(thing)
    assert_nothing_left(tmp_path)


def test_questions_about_plain_tensors_are_answered(tmp_path: Path) -> None:
    plain = torch.ones(3)
    with small_pager(tmp_path) as pager:
        assert not pager.is_paged(plain)
        with pytest.raises(tvm_pager.PagerError, match="not paged"):
            pager.residency(plain)
        assert not pager.release(plain)
        tvm_pager.unpage(nn.Linear(2, 2))
    assert_nothing_left(tmp_path)
