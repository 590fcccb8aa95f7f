"""Section C of the trials, saving: to the same place again, with copies on their way, and back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.trials.harness import (
    KIB,
    Run,
    assert_equal,
    assert_nothing_left,
    assert_within_budgets,
    everything,
    frozen,
    mlp,
    same,
    small_pager,
    train,
)
from tvm_pager.errors import TransferError
from tvm_pager.memory import PageState

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.timeout(60)  # loading used to hang


def start_write_backs(run: Run) -> None:
    """Puts every dirty page on its way down, and waits for none of them."""
    if run.pager is None:
        return
    core = run.pager._core
    with core.lock:
        core.drain()
        for page in list(core.table.pages.values()):
            if page.state is PageState.RESIDENT and not page.is_clean and not page.pins:
                try:
                    core.mover.start_write_back(page)
                except TransferError:  # no room below for all of them at once
                    return


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts by dotted name."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else ()
    return {k: t for key, item in items for k, t in flat(item, f"{name}.{key}").items()}


class TorchFile:
    """One file of `torch.save`."""

    device = 96 * KIB

    def save(self, state: dict[str, Any], path: Path) -> None:
        torch.save(state, path)

    def load(self, state: dict[str, Any], path: Path) -> dict[str, Any]:
        return torch.load(path)


class Safetensors:
    """One file. Written from the addresses of all tensors, so they must be there together."""

    device = 320 * KIB

    def save(self, state: dict[str, Any], path: Path) -> None:
        save_file(flat(state), path)

    def load(self, state: dict[str, Any], path: Path) -> dict[str, Any]:
        for name, tensor in load_file(path).items():
            flat(state)[name].copy_(tensor)
        return state


class Folder:
    """A directory of torch.distributed.checkpoint, which the second save finds there already."""

    device = 96 * KIB

    def save(self, state: dict[str, Any], path: Path) -> None:
        dcp.save(state, checkpoint_id=path, no_dist=True)

    def load(self, state: dict[str, Any], path: Path) -> dict[str, Any]:
        dcp.load(state, checkpoint_id=path, no_dist=True)
        return state


FORMATS = pytest.mark.parametrize("format", [TorchFile(), Safetensors(), Folder()], ids=type)


@FORMATS
@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_second_save_to_the_same_path_can_be_loaded_and_trained_on(
    format: Any, enter: bool, tmp_path: Path
) -> None:
    """Trial 23: saving with states on disk raced for a directory; loading hung in backward.

    Each save comes while copies are on their way down; the load finds pages off the device.
    """

    def f(run: Run) -> Any:
        path = tmp_path / ("paged" if run.pager else "plain")
        model = mlp(num_layers=3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.page(model, optimizer)
        seen = []
        losses = []
        for step in (0, 2):
            losses += train(run, model, optimizer, steps=2, first=step)
            start_write_backs(run)
            format.save(state_of(model, optimizer), path)
            run.evict()
            seen.append({name: t + 0 for name, t in flat(state_of(model, optimizer)).items()})
        losses += train(run, model, optimizer, steps=2, first=4)  # to be undone
        start_write_backs(run)
        run.evict()
        state = format.load(state_of(model, optimizer), path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        seen.append({name: t + 0 for name, t in flat(state_of(model, optimizer)).items()})
        run.evict()
        losses += train(run, model, optimizer, steps=2, first=4)  # once more, the same
        assert losses[-2:] == losses[-4:-2]
        return losses, seen, everything(model, optimizer)

    same(f, tmp_path, enter=enter, device=format.device)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("format", [TorchFile(), Folder()], ids=type)
def test_a_save_in_another_thread_is_a_snapshot_of_weights_that_rest(
    format: Any, tmp_path: Path
) -> None:
    """Trial 23, second half: it waits for pages that this thread pushes out all the while."""
    with small_pager(tmp_path, device=format.device) as pager:
        run = Run(pager)
        model = mlp(num_layers=3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(run, model, optimizer, steps=2)
        expected = frozen(flat(state_of(model, optimizer)), version=False)
        failures: list[BaseException] = []

        def save_twice(state: dict[str, Any]) -> None:
            try:
                for _ in range(2):
                    format.save(state, tmp_path / "saved")
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=save_twice, args=[state_of(model, optimizer)])
        thread.start()
        num_evicted = 0
        is_alive = True
        while is_alive:
            is_alive = thread.is_alive()
            num_evicted += pager.evict_all() > 0
            start_write_backs(run)
        thread.join()
        assert not failures
        assert num_evicted
        pager.check_invariants()
        loaded = format.load(state_of(model, optimizer), tmp_path / "saved")
        assert_equal(expected, frozen(flat(loaded), version=False))
        losses = train(run, model, optimizer, steps=1, first=2)
        assert len(losses) == 1
        assert_within_budgets(pager.stats())
        del model, optimizer, loaded
    assert_nothing_left(tmp_path)
