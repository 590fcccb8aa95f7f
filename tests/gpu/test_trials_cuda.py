"""Trials that only a GPU can show: late copies, page-locked bytes, overlap, neighbours.

Copies are made late by sleep kernels on their own streams, and memory that was given up is filled
with NaN by its next user, so that whoever reads or frees too early computes something else.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import tvm_pager
from tests.gpu.harness import (
    MIB,
    SLEEP_CYCLES,
    build,
    differences,
    open_pager,
    play,
    run_plain,
    same,
    settled_bytes,
)
from tests.gpu.programs import Streams, Trained
from tests.interpreter import start_program
from tests.parity.programs import Program
from tools.overlap import busy_seconds, merge, overlap, read_step
from tvm_pager.memory import Tier
from tvm_pager.transfer.device_copy import CudaCopier, stream_of
from tvm_pager.transfer.raw_bytes import RawDispatch
from tvm_pager.transfer.slab import HostSlab
from tvm_pager.transfer.torch_backend import TorchBackend

pytestmark = pytest.mark.gpu

MS = SLEEP_CYCLES // 100  # cycles of a sleep kernel: about a millisecond
NAN = 0xFF  # as every byte of a float


@dataclass(eq=False)
class Activations(Program):
    """Most of the memory is what forward saves; the program itself drops it at once."""

    num_steps: int = 20
    width: int = 1024
    rows: int = 2048
    depth: int = 8

    def build_model(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.depth)])

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x = torch.randn(self.rows, self.width)
        for layer in model:
            made = layer(x)
            del x
            x = F.gelu(made)
            del made
        return x.square().mean()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Call it with cycles: a sleep kernel of that length comes before each copy from then on."""
    num_copies = [0]
    copy = CudaCopier.copy

    def make_late(cycles: int) -> None:
        def late(self: CudaCopier, *args: Any, **options: Any) -> None:
            with torch.cuda.stream(self.stream):
                # The first ones by a tenth of a second: far longer than a step's launches take.
                torch.cuda._sleep(SLEEP_CYCLES if num_copies[0] < 8 else cycles)
            num_copies[0] += 1
            copy(self, *args, **options)

        monkeypatch.setattr(CudaCopier, "copy", late)

    yield make_late
    assert num_copies[0] > 8, "nothing was late"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a page gives up is filled at once by whoever gets it next on its stream."""
    num_filled, release = [0, 0], TorchBackend.release_device

    def release_and_fill(
        self: TorchBackend,
        memory: Any,
        after: tuple[Any, ...] = (),
        tickets: tuple[Any, ...] = (),
        executor: Any = None,
    ) -> None:
        nbytes, place = memory.nbytes(), memory.data_ptr()
        release(self, memory, after, tickets, executor)
        home = stream_of(self.current_executor() if executor is None else executor, self.device)
        with torch.cuda.stream(home), torch.inference_mode(mode=False), RawDispatch():
            taken = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            taken.fill_(NAN)
            num_filled[0] += 1
            num_filled[1] += taken.data_ptr() == place
            del taken

    monkeypatch.setattr(TorchBackend, "release_device", release_and_fill)
    yield
    assert num_filled[1] > 0, f"{num_filled}: the memory was never reused"


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
@pytest.mark.usefixtures("poisoned")
def test_activations_whose_copies_are_late_are_reused_only_after_them(
    nvme: bool, late_copies: Callable[[int], None], tmp_path: Path
) -> None:
    """Trial 4: gradients became NaN, because memory was reused before its copy had ended."""
    late_copies(4 * MS if nvme else 10 * MS)
    program = Activations(num_steps=5 if nvme else 20)
    same(program, tmp_path, fraction=0.4, nvme=nvme, segment_bytes="32MiB")


@pytest.mark.usefixtures("poisoned")
def test_five_hundred_steps_behind_late_copies_are_bitwise_equal(
    late_copies: Callable[[int], None], tmp_path: Path
) -> None:
    late_copies(MS // 4)
    program = Activations(num_steps=500, width=768, rows=1024, depth=6)
    stats = same(program, tmp_path, fraction=0.5, segment_bytes="32MiB")
    assert stats.num_evictions > 1000


@pytest.mark.filterwarnings("ignore::UserWarning")  # autograd's, on gradients of other streams
@pytest.mark.usefixtures("poisoned")
def test_a_pager_opened_under_a_side_stream_asks_for_the_stream_of_each_access(
    late_copies: Callable[[int], None], tmp_path: Path
) -> None:
    """Trial 6: the stream was taken once, where the offloader was made."""
    program = Streams()
    run_plain(program)
    plain, need = run_plain(program)
    late_copies(MS)
    budget = need.budget_bytes(0.4) + 64 * MIB  # another stream has a workspace of cuBLAS
    host = 64 * MIB + 2 * need.peak_bytes
    settled_bytes()
    with torch.cuda.stream(torch.cuda.Stream()):
        pager = tvm_pager.Pager(budget, host, torch_device="cuda", segment_bytes="1MiB")
    with pager:
        built = build(program)
        with torch.device("cuda"):
            result = play(program, *built)
        stats = pager.stats()
        del built
        gc.collect()
        pager.check_invariants()
    assert stats.num_evictions > 0, str(stats)
    assert differences(plain, result) == []


# --- host memory ----------------------------------------------------------------------------------


def memory_of_process() -> dict[str, int]:
    """Bytes by the kernel's names: locked, pinned, anonymous and shared."""
    names = ("VmLck", "VmPin", "RssAnon", "RssShmem")
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return {name: int(fields[name]) * 1024 for name in names}


def test_page_locked_slabs_take_what_was_asked_for_and_give_it_back() -> None:
    """Trial 39: 1.2 times a power of two cost two times it."""
    torch.empty(1, pin_memory=True)  # CUDA's own
    statistics = getattr(torch.cuda, "host_memory_stats", dict)  # of torch's rounding allocator
    sizes = [int(1.2 * 2**power) // 4096 * 4096 for power in range(24, 29)]
    asked = sum(sizes)  # 624 MiB
    gc.collect()
    before, pinned_before = memory_of_process(), dict(statistics())
    slabs = [HostSlab(size, page_lock=True) for size in sizes]
    for slab, size in zip(slabs, sizes, strict=True):
        slab.grow(size)
        assert all(view.is_pinned() for view in slab.view(0, size))
    after = memory_of_process()
    assert sum(slab.locked_bytes for slab in slabs) == asked
    for name, nbytes in after.items():
        assert nbytes - before[name] <= 1.05 * asked, name
    assert max(after[name] - before[name] for name in after) > 0.95 * asked, "nothing was counted"
    allocated = "allocated_bytes.current"
    assert statistics().get(allocated, 0) == pinned_before.get(allocated, 0)
    for slab in slabs:
        slab.close()
    slabs.clear()
    gc.collect()
    for name, nbytes in memory_of_process().items():
        assert nbytes - before[name] <= 0.05 * asked, f"{name}: not given back"


# --- overlap --------------------------------------------------------------------------------------

WIDTH, ROWS, NUM_LAYERS = 2048, 8192, 48  # weights of 16 MiB; a layer computes longer than it loads
WEIGHT_BYTES, ACTIVATION_BYTES = 4 * WIDTH * WIDTH, 4 * WIDTH * ROWS


def prefetch_the_next(pager: Any, layers: list[nn.Linear], budget: int) -> list[int]:
    """Registers hooks; gives [prefetches started, layers run], counted from now on.

    A prefetch evicts nothing, so the hook makes room for it as any program can.
    """
    count = [0, 0]

    def before_forward(layer: nn.Module, inputs: Any) -> None:
        following = layers[(layers.index(layer) + 1) % len(layers)]
        room = pager._core.admission.largest_need_bytes + 2 * WEIGHT_BYTES
        pager.set_budgets(device=budget - room)
        pager.set_budgets(device=budget)
        count[0] += pager.prefetch(following.weight)
        count[1] += 1

    for layer in layers:
        layer.register_forward_pre_hook(before_forward)
    return count


def test_weights_that_are_prefetched_arrive_while_the_layer_before_computes(tmp_path: Path) -> None:
    """Trial 41: copies overlapped with nothing. Here more than half of their time must."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device="cuda", generator=generator)

    def run(layers: list[nn.Linear]) -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y

    run([nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")])  # cuBLAS
    budget = settled_bytes() + 40 * WEIGHT_BYTES + 2 * ACTIVATION_BYTES
    torch.manual_seed(1)
    plain = [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(NUM_LAYERS)]
    with torch.inference_mode():
        expected = run(plain).cpu()
    weights = [layer.weight.detach().cpu() for layer in plain]
    del plain
    host = NUM_LAYERS * WEIGHT_BYTES + 512 * MIB
    # A policy on demand: what is prefetched here is what the program asks for.
    options = {"device": budget, "host": host, "policy": "lru"}
    with open_pager(tmp_path, **options) as pager, torch.inference_mode():
        with torch.inference_mode(mode=False), torch.no_grad():
            layers = [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in weights]
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.copy_(weight)
        pager._backend.grow_host(pager._backend.host_capacity_bytes)
        run(layers)  # the largest operation becomes known, every weight gets its copy below
        count = prefetch_the_next(pager, layers, budget)
        run(layers)
        torch.cuda.synchronize()
        moved = pager.stats().bytes_by_lane["h2d"]
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            got = run(layers)
            torch.cuda.synchronize()
        assert torch.equal(got.cpu(), expected)
        assert pager.stats().bytes_by_lane["h2d"] - moved > NUM_LAYERS // 2 * WEIGHT_BYTES
        assert count[0] > 0.8 * count[1], f"{count}: too few were prefetched to show anything"
        del layers, layer, got
    spans, _ = read_step(profiler)
    copies = merge(spans["in"])
    beside = busy_seconds(overlap(copies, spans["kernels"]))
    assert busy_seconds(copies) > 0
    assert beside > 0.5 * busy_seconds(copies), f"{beside:.4f} of {busy_seconds(copies):.4f} s"


# --- neighbours -----------------------------------------------------------------------------------

NEIGHBOUR = """
import sys, torch
held = []
for line in sys.stdin:
    held.append(torch.empty(int(line), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    print("held", flush=True)
"""


class Neighbour:
    """Another process that takes device memory when it is told to."""

    def __init__(self) -> None:
        self._process = start_program(NEIGHBOUR)

    def take(self, nbytes: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{nbytes}\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        if told != "held\n":
            assert self._process.stderr is not None
            raise AssertionError(f"the neighbour ended: {self._process.stderr.read()[-1000:]}")

    def end(self) -> None:
        """Idempotent."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate(timeout=60)


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    other = Neighbour()
    yield other
    other.end()


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def until_free(nbytes: int) -> None:
    """What a process held is free a little after its end."""
    deadline_s = time.monotonic() + 30
    while free_bytes() < nbytes:
        assert time.monotonic() < deadline_s, f"{free_bytes()} of {nbytes} bytes are free"
        time.sleep(0.05)


@dataclass(eq=False)
class Crowded(Trained):
    """800 MiB of weights and states; something happens before some of its steps."""

    num_steps: int = 6
    width: int = 2048
    depth: int = 12
    before: Callable[[int], None] = lambda index: None

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        self.before(step_index)
        return super().step(model, optimizer, step_index)


def test_a_neighbour_that_takes_nearly_all_of_the_device_makes_the_budget_shrink(
    neighbour: Neighbour, tmp_path: Path
) -> None:
    """Trial 51: all of the memory was taken, whoever else wanted some, until somebody died."""
    run_plain(Trained(num_steps=1))
    plain, need = run_plain(Crowded())
    asked = need.base_bytes + 2 * need.peak_bytes  # no page has to leave, until others come
    neighbour.take(int(0.4 * free_bytes()))
    free_at_first = free_bytes()
    seen: list[tuple[int, int]] = []  # budget and evictions before each step

    def before(index: int) -> None:
        stats = pager.stats()
        seen.append((stats.device_budget_bytes, stats.num_evictions))
        if index == 2:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            neighbour.take(free_bytes() - 96 * MIB)
            pager.step()  # where the budget is adapted; so does the end of `optimizer.step()`
        elif index == 5:
            neighbour.end()
            until_free(free_at_first // 2)

    host = 2 * need.peak_bytes + 64 * MIB
    with open_pager(tmp_path, device=asked, host=host, headroom="64MiB") as pager:
        program = Crowded(before=before)
        built = build(program)
        with torch.device("cuda"):
            result = play(program, *built)
        stats = pager.stats()
        weight = next(built[0].parameters())
        assert pager.residency(weight) in (Tier.DEVICE, Tier.HOST)
        pager.check_invariants()
        del built, program, weight
        gc.collect()
    budgets, evictions = zip(*seen, strict=True)
    assert budgets[:3] == (asked,) * 3, str(stats)
    assert evictions[2] == 0, "it paged before it had to"
    assert all(budget < 0.7 * asked for budget in budgets[3:]), str(seen)
    assert evictions[5] > 0, str(seen)
    assert stats.device_budget_bytes == asked, "what is free again is used again"
    shrunk = [notice for notice in stats.notices if "taken by others" in notice]
    assert shrunk, stats.notices
    assert "the device budget is now" in shrunk[0]
    assert differences(plain, result) == []
