"""What two ranks run, each in a process of its own: `torch.distributed` as users have it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.trials.harness import KIB, batch, everything, mlp, same, small_pager

if TYPE_CHECKING:
    from tests.trials.harness import Run

__all__ = ["run_on_two_ranks", "start_and_wait", "train_data_parallel"]


def run_on_two_ranks(program: Callable[[int, Path], None], folder: Path) -> None:
    """Runs `program(rank, its folder)` on two ranks; raises what either of them raises."""
    torch.multiprocessing.spawn(_run_rank, (program, str(folder)), nprocs=2)


def _run_rank(rank: int, program: Callable[[int, Path], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    own = Path(folder) / str(rank)
    own.mkdir()
    program(rank, own)
    dist.barrier()  # none leaves while the other needs it
    dist.destroy_process_group()


def train_data_parallel(rank: int, folder: Path) -> None:
    """DDP computes the same bits over pages, which leave the device while gradients are summed."""
    for views in (False, True):
        stats = same(lambda run, views=views: _train(rank, run, views), folder, device=160 * KIB)
        assert stats.num_evictions > 50


def _train(rank: int, run: Run, gradient_as_bucket_view: bool) -> dict[str, Any]:
    model = mlp()
    parallel = DistributedDataParallel(
        model, bucket_cap_mb=0.02, gradient_as_bucket_view=gradient_as_bucket_view
    )
    optimizer = torch.optim.AdamW(parallel.parameters())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: run.evict())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = parallel(batch(2 * step + rank)).square().mean()
        run.evict()
        loss.backward()
        run.evict()
        optimizer.step()
        losses.append(loss.item())
    return everything(model, optimizer) | {"losses": losses}


def start_and_wait(rank: int, folder: Path) -> None:
    """A page may leave when its collective is done, and not before: rank 1 joins when told to."""
    store = dist.FileStore(str(folder.parent / "store"), 2)
    with small_pager(folder) as pager:
        for name, start in _STARTS.items():
            tensor = torch.full((1024,), float(rank + 1))
            pager.evict_all()
            if rank == 1:
                store.wait([name])
            wait, result = start(tensor)
            if rank == 0:
                pager.evict_all()
                assert pager.residency(result).name == "DEVICE", name
                store.set(name, "join")
            wait()
            pager.evict_all()
            assert pager.residency(result).name != "DEVICE", name
            assert (result == 3.0).all(), name


def _start(tensor: torch.Tensor) -> tuple[Callable[[], object], torch.Tensor]:
    work: Any = dist.all_reduce(tensor, async_op=True)
    return work.wait, tensor


def _start_coalesced(tensor: torch.Tensor) -> tuple[Callable[[], object], torch.Tensor]:
    # Private, and the only way to the coalesced operators.
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
        dist.all_reduce(torch.zeros(8))
        dist.all_reduce(tensor)
    return coalesced.wait, tensor


def _start_functional(tensor: torch.Tensor) -> tuple[Callable[[], object], torch.Tensor]:
    out: Any = functional.all_reduce(tensor, "sum", dist.group.WORLD)
    return out.trigger_wait, out.elem


_STARTS = {"plain": _start, "coalesced": _start_coalesced, "functional": _start_functional}
