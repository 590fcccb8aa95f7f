"""Section D of the trials, weights in files: read when they are used, and where they lie."""

from __future__ import annotations

import json
import os
import struct
import textwrap
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import tvm_pager
from tests.interpreter import run_program
from tests.trials.harness import KIB, batch, bytes_written, mlp, small_pager
from tvm_pager.errors import ConfigError, PagerError, TransferError


def saved(model: nn.Module, tmp_path: Path, name: str = "model.safetensors") -> Path:
    path = tmp_path / name
    safetensors.torch.save_file(model.state_dict(), path)
    return path


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return mlp()


def test_a_checkpoint_larger_than_memory_runs_and_spills_nothing(tmp_path: Path) -> None:
    """Trial 36: offload first needed everything in RAM, or filled RAM while the disk stayed empty.

    512 MiB of weights, budgets of 48 MiB and 16 MiB; in a process of its own, whose memory may grow
    by 200 MiB.
    """
    script = """
        import json, resource, sys, torch, tvm_pager
        from torch import nn
        torch.set_num_threads(1)
        torch.ones(8, 8) @ torch.ones(8, 8)
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with tvm_pager.Pager(
            "48MiB", "16MiB", sys.argv[2], nvme_bytes="64MiB", torch_device="cpu"
        ) as pager:
            before = peak()
            with torch.device("meta"):
                model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(32)])
            report = pager.load(model, sys.argv[1])
            with torch.no_grad():
                out = model(torch.ones(1, 2048))
            stats = pager.stats()
            result = dict(grown=peak() - before, total=float(out.sum()),
                          lanes=stats.bytes_by_lane, backed=report.file_backed_bytes)
        print(json.dumps(result))
    """
    weight = torch.eye(2048) * 2  # exact in any order of summation
    names = [f"{index}.weight" for index in range(32)]
    path = tmp_path / "model.safetensors"
    header = {
        name: {
            "dtype": "F32",
            "shape": [2048, 2048],
            "data_offsets": [index * weight.nbytes, (index + 1) * weight.nbytes],
        }
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in names:
            file.write(weight.numpy().data)
    spill = tmp_path / "spill"
    spill.mkdir(mode=0o700)
    run = run_program(textwrap.dedent(script), path, spill)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["total"] == 2048 * 2.0**32
    assert result["backed"] == 512 << 20
    assert result["grown"] <= 200 << 20, f"{result['grown'] >> 20} MiB"
    assert result["lanes"]["n2d"] == 512 << 20
    assert sum(result["lanes"][lane] for lane in ("d2h", "h2n", "d2n")) < 1 << 20


@pytest.mark.parametrize("where", ["meta", "same dtype", "paged", "other dtype", "shared"])
def test_whatever_the_model_was_built_on_it_gets_the_files_values(
    where: str, tmp_path: Path
) -> None:
    original = mlp()
    path = saved(original, tmp_path)
    with small_pager(tmp_path, check=2) as pager:
        model = on_meta() if where == "meta" else mlp()
        if where == "other dtype":
            model = model.double()
        kept = model[0].weight.detach() if where == "shared" else None
        before = [id(parameter) for parameter in model.parameters()]
        report = pager.load(model, path)
        assert [id(parameter) for parameter in model.parameters()] == before
        assert report.missing_keys == report.unexpected_keys == []
        assert (report.file_backed_bytes > 0) == (where != "other dtype")
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.requires_grad
            expected = original.state_dict()[name].to(parameter.dtype)
            assert torch.equal(parameter.detach(), expected), name
        if kept is not None:
            assert torch.equal(kept, original[0].weight)
        pager.check_invariants()


def test_training_loaded_weights_equals_plain_torch(tmp_path: Path) -> None:
    """Frozen layers stay in the file; trained ones become ordinary pages at their first write."""
    original = mlp()
    path = saved(original, tmp_path)

    def train(model: nn.Sequential) -> list[torch.Tensor]:
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        return losses

    with small_pager(tmp_path, check=1) as pager:
        model = on_meta()
        pager.load(model, path)
        losses = train(model)
        weights = [parameter.detach() for parameter in model.parameters()]
        pager.evict_all()
        expected = train(original)
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        for got, want in zip(weights, original.parameters(), strict=True):
            assert torch.equal(got, want)
        pager.check_invariants()


def test_frozen_weights_are_read_and_never_written(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path)
    with small_pager(tmp_path) as pager:
        model = on_meta().requires_grad_(False)
        pager.load(model, path)
        for step in range(3):
            pager.evict_all()
            before = bytes_written(pager.stats())
            model(batch(step))
            pager.evict_all()
            activations = 8 * 64 * 4 * 8  # of one pass at most
            assert bytes_written(pager.stats()) - before <= activations


def test_tied_weights_and_shards_of_a_directory(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.embed.weight
            self.middle = nn.Linear(16, 16)

    original = Tied()
    folder = tmp_path / "shards"
    folder.mkdir()
    state = original.state_dict()
    del state["head.weight"]  # as files with tied weights have it
    items = list(state.items())
    safetensors.torch.save_file(dict(items[:1]), folder / "a-1-of-2.safetensors")
    safetensors.torch.save_file(dict(items[1:]), folder / "a-2-of-2.safetensors")
    with small_pager(tmp_path) as pager:
        with torch.device("meta"):
            model = Tied()
        pager.load(model, folder)
        assert model.head.weight is model.embed.weight
        x = torch.arange(8)
        assert torch.equal(
            model.head(model.middle(model.embed(x))),
            original.head(original.middle(original.embed(x))),
        )


def test_a_file_that_changes_under_the_model_is_an_error_not_other_weights(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path)
    with small_pager(tmp_path) as pager:
        model = on_meta()
        pager.load(model, path)
        os.utime(path, ns=(1, 1))
        with pytest.raises(TransferError, match="has changed since its tensors were loaded"):
            model(batch(0))
        pager.close(restore=False)


def test_names_and_shapes_that_do_not_match_are_told(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path)
    with small_pager(tmp_path) as pager:
        with torch.device("meta"):
            longer = mlp(num_layers=5)
            wider = mlp(width=128)
        with pytest.raises(PagerError, match=r"lacks \d tensors of it \(.*strict=False"):
            pager.load(longer, path)
        with pytest.raises(PagerError, match=r"shapes differ \(0\.weight: \(128, 128\)"):
            pager.load(wider, path)
        assert longer[0].weight.is_meta
        report = pager.load(longer, path, strict=False)
        assert report.missing_keys
        assert not longer[0].weight.is_meta


@pytest.mark.parametrize(
    "content",
    [b"", b"short", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"[]",
     struct.pack("<Q", 60) + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'],
    ids=["empty", "short", "huge header", "list", "beyond the end"],
)  # fmt: skip
def test_a_file_in_another_format_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with small_pager(tmp_path) as pager:
        with pytest.raises(ConfigError, match=r"broken\.safetensors .* is no safetensors file"):
            pager.load(on_meta(), path)
        with pytest.raises(ConfigError, match="holds no"):
            pager.load(on_meta(), tmp_path / "spill")


def test_close_without_restore_reads_nothing_back(tmp_path: Path) -> None:
    """`tvm-pager run` ends so: more live bytes than memory would fail there."""
    pager: Any = small_pager(tmp_path)
    model = mlp()
    pager.page(model)
    pager.evict_all()
    before = pager.stats().bytes_by_lane
    pager.close(restore=False)
    assert pager.closed
    assert pager.stats().bytes_by_lane == before
    with pytest.raises(tvm_pager.errors.PagerClosedError):
        model(torch.ones(1, 64))
    assert model[0].weight.nbytes < 64 * KIB
