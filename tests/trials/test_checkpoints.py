"""Section C of the trials: state_dict, checkpoints, copies, and the way back to plain torch."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import tvm_pager
from tests.interpreter import run_program
from tests.trials.harness import (
    KIB,
    Run,
    assert_equal,
    assert_nothing_left,
    batch,
    everything,
    frozen,
    mlp,
    same,
    small_pager,
    spill_folder,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path


class LowRank(nn.Module):
    """An adapter made as the usual libraries make it: sizes and dtype are read from the weight."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        rows, columns = base.weight.shape
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, columns, dtype=base.weight.dtype) * 0.1)
        self.b = nn.Parameter(torch.zeros(rows, rank, dtype=base.weight.dtype))
        base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
def test_adapters_fit_weights_that_are_paged_out(enter: bool, tmp_path: Path) -> None:
    """Trial 21: placeholders of shape [0] broke adapter injection, and adapter checkpoints.

    A weight that is paged out has its true shape, dtype, numel and requires_grad.
    """

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        run.page(model)
        run.evict()
        facts = [
            (name, tuple(p.shape), p.numel(), str(p.dtype), p.requires_grad, p.dim(), p.nbytes)
            for name, p in model.named_parameters()
        ]
        model[0], model[2] = LowRank(model[0]), LowRank(model[2])
        adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(adapters.values(), lr=0.01)
        losses = train(run, model, optimizer)
        file = io.BytesIO()
        torch.save({name: p.detach() for name, p in adapters.items()}, file)
        trained = {name: p.detach().clone() for name, p in adapters.items()}
        train(run, model, optimizer, steps=1, first=3)
        file.seek(0)
        missing, unexpected = model.load_state_dict(torch.load(file), strict=False)
        assert not unexpected
        assert sorted(missing) == sorted(set(model.state_dict()) - set(adapters))
        run.evict()
        losses += train(run, model, optimizer, steps=1, first=3)
        return facts, losses, trained, everything(model, optimizer)

    same(f, tmp_path, enter=enter, device=56 * KIB)


RESUMABLE = """
import json, os, signal, sys
import torch, tvm_pager
from tests.trials.harness import Run, batch, mlp, train
torch.set_num_threads(1)
spill, path, mode = sys.argv[1:]
torch.manual_seed(0)
pager = tvm_pager.Pager(device="64KiB", host="256KiB", nvme=spill, nvme_bytes="16MiB",
                        torch_device="cpu", engine="posix", segment_bytes="4KiB")
with pager:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0
    if mode == "load":
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = 3
    losses = train(Run(pager), model, optimizer, steps=3, first=first)
    assert pager.stats().nvme_peak_bytes > 0
    pager.evict_all()
    if mode == "save":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    print(json.dumps([loss.hex() for loss in losses]), flush=True)
    if mode == "save":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(120)
def test_training_resumes_in_another_process_after_a_kill(tmp_path: Path) -> None:
    """Trial 22: swap files were named by object address: more disk at each run, states not found.

    Run, save, kill; a new process loads and goes on. The losses are those of an unbroken run in
    plain torch, and neither the kill nor the clean exit leaves a file.
    """
    spill, path = spill_folder(tmp_path), tmp_path / "checkpoint.pt"
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    unbroken = [loss.hex() for loss in train(Run(None), model, optimizer, steps=6)]

    killed = run_program(RESUMABLE, spill, path, "save")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert json.loads(killed.stdout) == unbroken[:3]
    assert sorted(os.listdir(spill)) == []
    resumed = run_program(RESUMABLE, spill, path, "load")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout) == unbroken[3:]
    assert sorted(os.listdir(spill)) == []


def test_optimizer_states_are_in_the_usual_state_dict(tmp_path: Path) -> None:
    """Trial 22, second half: and five pagers after each other need no more disk than one."""

    def f(run: Run) -> Any:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(run, model, optimizer)
        run.evict()
        return optimizer.state_dict(), model.state_dict()

    peaks = [same(f, tmp_path, device=76 * KIB).nvme_peak_bytes for _ in range(5)]
    assert peaks[0] > 0
    assert len(set(peaks)) == 1


def same_copy(original: nn.Module, copied: nn.Module) -> None:
    assert_equal(
        frozen(original.state_dict(), version=False), frozen(copied.state_dict(), version=False)
    )
    assert [type(p).__name__ for p in original.parameters()] == [
        type(p).__name__ for p in copied.parameters()
    ]


@pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])
def test_copies_are_independent(enter: bool, tmp_path: Path) -> None:
    """Trial 25: deepcopy of wrapper tensors failed, or dropped attributes, or shared the memory."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.page(model, optimizer)
        train(run, model, optimizer, steps=2)
        run.evict()
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        same_copy(model, twin)
        assert twin_optimizer.param_groups[0]["params"][0] is twin[0].weight
        run.evict()
        with torch.no_grad():
            for p in twin.parameters():
                p.fill_(2.0)
        losses = train(run, model, optimizer, steps=1, first=2)
        other_losses = train(run, twin, twin_optimizer, steps=1, first=2)
        return losses, other_losses, everything(model, optimizer), everything(twin, twin_optimizer)

    same(f, tmp_path, enter=enter)


WITHOUT_THE_PACKAGE = """
import hashlib, json, pickle, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tvm_pager":
            raise ImportError("a saved file must not need " + name)

sys.meta_path.insert(0, Blocked())
import torch

def describe(value):
    if isinstance(value, torch.Tensor):
        data = bytes(value.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
        return [type(value).__name__, str(value.dtype), list(value.shape), list(value.stride()),
                value.requires_grad, hashlib.sha256(data).hexdigest()]
    if isinstance(value, torch.nn.Module):
        return {name: describe(p) for name, p in value.named_parameters()}
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return repr(value)

if __name__ == "__main__":
    found = {}
    for path in sys.argv[1:]:
        if path.endswith(".pickle"):
            with open(path, "rb") as file:
                value = pickle.load(file)
        else:
            value = torch.load(path, weights_only="module" not in path)
        found[path] = describe(value)
    assert "tvm_pager" not in sys.modules
    print(json.dumps(found, sort_keys=True))
"""


@pytest.mark.timeout(120)
def test_saved_files_load_without_the_package(tmp_path: Path) -> None:
    """Trial 25, second half: what torch.save and pickle write holds plain tensors."""

    def write(run: Run, folder: Path) -> list[str]:
        folder.mkdir()
        torch.manual_seed(0)
        model = mlp(num_layers=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(run, model, optimizer, steps=2)
        optimizer.zero_grad()
        weight = model[0].weight
        values: dict[str, Any] = {
            "state.pt": model.state_dict(),
            "optimizer.pt": optimizer.state_dict(),
            "module.pt": model,
            "views.pt": [weight.detach()[3:5], weight.detach().t(), weight],
            "dtypes.pt": [weight.detach().to(d) for d in (torch.bfloat16, torch.complex64)],
            "module.pickle": model,
            "state.pickle": model.state_dict(),
            "tensor.pickle": [weight.detach()[::2], weight],
        }
        for name, value in values.items():
            run.evict()
            if name.endswith(".pickle"):
                (folder / name).write_bytes(pickle.dumps(value))
            else:
                torch.save(value, folder / name)
        return [str(folder / name) for name in values]

    plain = write(Run(None), tmp_path / "plain")
    with small_pager(tmp_path, device=80 * KIB) as pager:
        paged = write(Run(pager), tmp_path / "paged")
    assert_nothing_left(tmp_path)
    loaded = run_program(WITHOUT_THE_PACKAGE, *plain, *paged)
    assert loaded.returncode == 0, loaded.stderr
    found = json.loads(loaded.stdout)
    for left, right in zip(plain, paged, strict=True):
        assert found[left] == found[right], right
        sizes = os.path.getsize(left), os.path.getsize(right)
        assert abs(sizes[0] - sizes[1]) < 2 * KIB, f"{right}: {sizes} bytes"


def test_unpage_gives_plain_torch_back_and_page_takes_it_again(tmp_path: Path) -> None:
    """Trial 27: an offloaded model could not be made normal again; doing it twice died on meta."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        ids = [id(p) for p in model.parameters()]
        run.page(model, optimizer)
        losses = train(run, model, optimizer, steps=1)
        run.evict()
        run.unpage(model, optimizer)
        for p in model.parameters():
            assert type(p) is nn.Parameter
            assert p.grad is None or type(p.grad) is torch.Tensor
        for state in optimizer.state.values():
            assert {type(value) for value in state.values()} == {torch.Tensor}
        losses += train(run, model, optimizer, steps=1, first=1)
        run.page(model, optimizer)
        run.page(model, optimizer)  # a second time changes nothing
        losses += train(run, model, optimizer, steps=1, first=2)
        assert [id(p) for p in model.parameters()] == ids
        run.evict()
        run.unpage(model, optimizer)
        run.unpage(model, optimizer)
        assert [id(p) for p in model.parameters()] == ids
        return losses, everything(model, optimizer)

    same(f, tmp_path, enter=False, device=76 * KIB)


@pytest.mark.parametrize("move", ["half", "bfloat16", "double", "cpu", "to", "to_empty"])
def test_moves_and_casts_of_a_paged_model_mean_what_they_mean_in_torch(
    move: str, tmp_path: Path
) -> None:
    """Trial 27, second half: `.half()`, `.cpu()`, `.to()` while weights are paged out."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.page(model, optimizer)
        train(run, model, optimizer, steps=1)
        optimizer.zero_grad()
        run.evict()
        if move == "to":
            model.to("cpu", torch.float64)
        elif move == "to_empty":
            model.to_empty(device="cpu")
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(0.5)
        else:
            getattr(model, move)()
        run.evict()
        dtype = model[0].weight.dtype
        model(batch(1).to(dtype)).square().sum().backward()
        run.evict()
        optimizer.step()
        run.evict()
        return everything(model)

    same(f, tmp_path, enter=False)


def test_entering_twice_is_harmless_or_refused(tmp_path: Path) -> None:
    """Trial 27, third part: nested and double entry leave the outer pager at work."""
    with small_pager(tmp_path) as pager:
        model = mlp(num_layers=2)
        with pytest.raises(tvm_pager.PagerError, match="pager"), pager:
            pass
        pager.evict_all()
        out = model(batch(0))
        assert pager.is_paged(out)
        del model, out
    assert_nothing_left(tmp_path)
