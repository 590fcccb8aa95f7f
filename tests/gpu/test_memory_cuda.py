"""A device budget is a promise about the process: torch's own allocator is the witness."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tvm_pager
from tests.gpu.harness import (
    MIB,
    build,
    differences,
    open_pager,
    play,
    run_plain,
    settled_bytes,
)
from tests.gpu.programs import Trained
from tvm_pager.memory import Tier
from tvm_pager.transfer.slab import CudaLocker

pytestmark = pytest.mark.gpu

NEED_BYTES = 2048 * MIB  # about what `large` needs in plain torch


def large() -> Trained:
    """400 MiB of weights, as much of gradients, twice as much of states, and foreach temporaries.

    Large, because the allocator maps its segments in steps of 20 MiB, and a limit is on those.
    """
    return Trained(width=2048, depth=24)


def limit_process_to(nbytes: int) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))


@pytest.mark.parametrize("is_limited", [False, True], ids=["measured", "enforced"])
def test_training_stays_within_a_third_of_what_plain_torch_needs(
    is_limited: bool, tmp_path: Path
) -> None:
    """Enforced: torch's allocator itself refuses more than a twentieth above the budget."""
    run_plain(Trained(num_steps=1))  # cuBLAS, in this thread and in autograd's
    plain, need = run_plain(large())
    assert need.peak_bytes > 0.8 * NEED_BYTES
    budget_bytes = need.budget_bytes(1 / 3)
    before = settled_bytes()
    assert before <= need.base_bytes
    if is_limited:
        limit_process_to(int(1.05 * budget_bytes))
    with open_pager(tmp_path, device=budget_bytes, host=need.peak_bytes * 5 // 4) as pager:
        torch.cuda.reset_peak_memory_stats()
        program = large()
        built = build(program)
        with torch.device("cuda"):
            result = play(program, *built)
        peak_bytes = torch.cuda.max_memory_allocated()
        reserved_bytes = torch.cuda.max_memory_reserved()
        stats = pager.stats()
        del built
        gc.collect()
    assert peak_bytes <= budget_bytes, f"{(peak_bytes - budget_bytes) / MIB:.1f} MiB over\n{stats}"
    if is_limited:
        assert reserved_bytes <= 1.05 * budget_bytes
    assert stats.device_peak_bytes <= budget_bytes - before
    assert stats.num_evictions > 0
    assert differences(plain, result) == []
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert settled_bytes() == before, "device memory is left after close"


def test_adopting_a_model_larger_than_the_budget(tmp_path: Path) -> None:
    """Its bytes are on the device already, so they are no obstacle but what has to leave."""
    base_bytes = settled_bytes()
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, device="cuda") for _ in range(12)])
    expected = [p.detach().cpu() for p in model.parameters()]
    budget_bytes = base_bytes + 80 * MIB  # of 192
    with open_pager(tmp_path, device=budget_bytes) as pager:
        tvm_pager.page(model)
        stats = pager.stats()
        assert stats.num_pages == 24
        assert torch.cuda.memory_allocated() <= budget_bytes, str(stats)
        for parameter, before in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.detach().cpu(), before)
        assert torch.cuda.memory_allocated() <= budget_bytes
        del model, parameter
        gc.collect()
    assert settled_bytes() == base_bytes


def test_cpu_tensors_and_copies_to_the_cpu_take_no_device_budget(tmp_path: Path) -> None:
    with open_pager(tmp_path, device=settled_bytes() + 48 * MIB) as pager:
        first = torch.full((8 * MIB,), 3.0, device="cuda")  # 32 MiB
        pager.evict_all()
        big = torch.ones(64 * MIB)  # 256 MiB of ordinary memory
        big.mul_(2)
        assert pager.stats().num_faults == 0
        copy = first.cpu()
        assert torch.equal(copy, torch.full((8 * MIB,), 3.0))
        moved = first[:MIB].to("cpu", torch.float64)
        assert moved.dtype is torch.float64
        assert float(big[0]) == 2.0
        del first


def test_locked_host_memory_is_counted_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: dict[int, int] = {}
    lock, unlock = CudaLocker.lock, CudaLocker.unlock

    def spy_lock(self: CudaLocker, address: int, nbytes: int) -> None:
        lock(self, address, nbytes)
        locked[address] = nbytes

    def spy_unlock(self: CudaLocker, address: int, nbytes: int) -> None:
        unlock(self, address, nbytes)
        assert locked.pop(address) == nbytes

    monkeypatch.setattr(CudaLocker, "lock", spy_lock)
    monkeypatch.setattr(CudaLocker, "unlock", spy_unlock)
    host_bytes = 5 * 12 * MIB + 4096  # no power of two
    with open_pager(tmp_path, host=host_bytes, nvme_bytes="1GiB") as pager:
        backend = pager._backend
        assert 0 < backend.host_locked_bytes == sum(locked.values()) < host_bytes
        tensors = [torch.full((4 * MIB,), float(i), device="cuda") for i in range(8)]  # 128 MiB
        pager.evict_all()
        assert {pager.residency(t) for t in tensors} == {Tier.HOST, Tier.NVME}
        # Staging buffers are whole blocks of 4 KiB, page space whole blocks of 512 bytes.
        assert host_bytes - 8192 < backend.host_locked_bytes <= host_bytes
        assert backend.host_locked_bytes == sum(locked.values()) == backend.host_mapped_bytes
        view = backend._slab.view(0, 4096)[0]
        assert view.is_pinned()
        del view
        assert [float(t[-1]) for t in tensors] == [float(i) for i in range(8)]
        del tensors
    assert locked == {}
    assert backend.host_locked_bytes == backend.host_mapped_bytes == 0


def _fill_pages(num_pages: int, mib: int) -> list[torch.Tensor]:
    return [torch.full((mib * MIB // 4,), float(i), device="cuda") for i in range(num_pages)]


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda x: F.dropout(x[: 6 * MIB], 0.5), "a little: 24 MiB and a mask of 6"),
        (lambda x: F.dropout(x, 0.5), "32 MiB and a mask of 8, where an eighth of the pages is 32"),
        (lambda x: x.double() * torch.rand_like(x), "several eighths"),
        (lambda x: torch.bernoulli(x / 100, generator=_generator()), "a generator of the user's"),
    ],
    ids=["little", "more", "most", "own-generator"],
)
def test_an_operation_that_runs_out_of_memory_is_retried_with_the_same_random_numbers(
    use: Any, why: str, tmp_path: Path
) -> None:
    """The budget would allow the operation; what others hold of the card does not."""
    filler = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")  # plain: before the pager
    source = torch.full((8 * MIB,), 3.0, device="cuda")
    torch.manual_seed(11)
    expected = [use(source).cpu(), torch.rand(5, device="cuda").cpu()]
    del source
    settled_bytes()
    with open_pager(tmp_path) as pager:
        pages = _fill_pages(8, 32)
        limit_process_to(torch.cuda.memory_reserved())
        torch.manual_seed(11)
        got = [use(pages[3]).cpu(), torch.rand(5, device="cuda").cpu()]
        assert pager.stats().num_evictions > 0, f"memory was there: {why}"
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert [float(p[-1]) for p in pages] == [float(i) for i in range(8)]
        del pages
    assert all(map(torch.equal, expected, got))
    del filler


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(5)


def test_a_fetch_that_is_refused_by_the_device_evicts_more(tmp_path: Path) -> None:
    with open_pager(tmp_path) as pager:
        pages = _fill_pages(8, 32)
        pager.evict_all()
        filler = torch.empty(0, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        limit_process_to(torch.cuda.memory_reserved() + 100 * MIB)
        for turn in range(2):
            for index, page in enumerate(pages):
                assert bool((page == index).all()), turn
        assert pager.stats().num_evictions > 8
        torch.cuda.set_per_process_memory_fraction(1.0)
        del pages, page, filler


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    run_plain(Trained(num_steps=1))
    before = settled_bytes()
    with open_pager(tmp_path, device=before + 80 * MIB, nvme_bytes="1GiB", host="64MiB"):
        program = Trained(num_steps=1)
        built = build(program)
        with torch.device("cuda"):
            program.step(*built, 0)
        kept = next(built[0].parameters())
        expected = kept.detach().cpu()
        nbytes = kept.numel() * 4
        del built, program
        gc.collect()
    # What is still referred to comes back as ordinary memory, and is all that is there.
    assert settled_bytes() - before == 2 * nbytes, "a weight and its gradient"
    assert torch.equal(kept.detach().cpu(), expected)
    del kept
    assert settled_bytes() == before
