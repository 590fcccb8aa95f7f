"""Traces recorded without memory: the same operations, lifetimes and peak as with memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tvm_pager
from tvm_pager.demo.footprint import Footprint
from tvm_pager.errors import TraceError
from tvm_pager.estimate import trace
from tvm_pager.memory import PageKind
from tvm_pager.planning import Phase, Trace
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.testing.machines import example_profile

PROFILE = example_profile()
Build = Callable[[], Callable[[], object]]


class Net(torch.nn.Module):
    def __init__(self, width: int = 64, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 4 * width)
        self.norm = torch.nn.BatchNorm1d(4 * width)
        self.second = torch.nn.Linear(4 * width, width)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            return self.second(checkpoint(self.hidden, x, use_reentrant=False))
        return self.second(self.hidden(x))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.first(x)))


def training(
    optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> Callable[[], Callable[[], object]]:
    def build() -> Callable[[], object]:
        model = Net(**options)
        made = optimizer(model.parameters())
        batch = torch.randn(32, 64)

        def step() -> None:
            loss = model(batch).square().mean()
            loss.backward()
            made.step()
            made.zero_grad()

        return step

    return build


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def pages_of(found: Trace, kind: PageKind) -> list[int]:
    return [number for number, page in enumerate(found.pages) if page.kind is kind]


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_peak_is_that_of_the_real_run(is_checkpointed: bool) -> None:
    build = training(adamw, width=64, is_checkpointed=is_checkpointed)
    predicted = TraceIndex(trace(build, PROFILE)).peak_bytes
    with Footprint() as footprint:
        step = build()
        step()
        step()
    del step
    gc.collect()
    # The trace counts frames of 512 bytes, and leaves AdamW's counters (4 bytes each) out.
    assert footprint.peak_bytes - 24 <= predicted <= footprint.peak_bytes + 60 * 512


class Seen(TorchDispatchMode):
    """Names of the operations that touch tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":
            self.names.append(f"{func.name()}{'' if '.' in func.name() else '.default'}")
        return func(*args, **(kwargs or {}))


def test_operations_are_those_that_run_on_paged_tensors() -> None:
    found = trace(training(sgd), PROFILE)
    with tvm_pager.Pager(torch_device="cpu", device="64MiB", host="16MiB"):
        step = training(sgd)()
        step()
        with Seen() as seen:
            step()
        del step
    assert [op.name for op in found.ops] == seen.names


def test_pages_are_numbered_by_first_mention() -> None:
    found = trace(training(sgd), PROFILE)
    mentioned = dict.fromkeys(page for op in found.ops for page in (*op.reads, *op.creates))
    assert list(mentioned) == list(range(len(mentioned)))
    unmentioned = found.pages[len(mentioned) :]
    assert all(page.born is None for page in unmentioned)


def test_kinds_names_and_dtypes_are_learned() -> None:
    found = trace(training(adamw), PROFILE)
    parameters = pages_of(found, PageKind.PARAM)
    names = [found.pages[number].name for number in parameters]
    assert sorted(names) == sorted(name for name, _ in Net().named_parameters())
    buffers = pages_of(found, PageKind.BUFFER)
    assert {found.pages[n].name for n in buffers} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert len(pages_of(found, PageKind.OPT_STATE)) == 2 * len(parameters)  # counters are no pages
    assert len(pages_of(found, PageKind.GRAD)) == 2 * len(parameters)  # old ones and new ones
    made = [found.ops[page.born].phase for page in found.pages if page.born is not None]
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE} == set(made)
    for number in pages_of(found, PageKind.ACTIVATION):
        phases = [found.ops[use].phase for use in TraceIndex(found).uses(number)]
        assert phases[0] is Phase.FORWARD
        assert Phase.BACKWARD in phases
    assert {page.dtype for page in found.pages} >= {"float32", "int64"}


def test_an_iteration_begins_as_it_ends() -> None:
    found = trace(training(adamw), PROFILE)
    for number, page in enumerate(found.pages):
        if page.kind in {PageKind.PARAM, PageKind.OPT_STATE, PageKind.BUFFER}:
            assert (page.born, page.died, page.becomes) == (None, None, number)
        elif page.kind is PageKind.GRAD and page.born is not None:
            assert page.becomes is not None
            old = found.pages[page.becomes]
            # `zero_grad` follows the boundary, the end of `optimizer.step()`.
            assert (old.kind, old.nbytes, old.died) == (PageKind.GRAD, page.nbytes, 0)
        elif page.died is None and page.born is not None:
            assert page.becomes is not None
    ends = [page.becomes for page in found.pages if page.died is None]
    starts = [number for number, page in enumerate(found.pages) if page.born is None]
    assert sorted(number for number in ends if number is not None) == starts
    at_begin = sum(found.pages[number].frame_bytes for number in starts)
    assert TraceIndex(found).alive_bytes[-1] == at_begin


def test_operations_know_phase_and_module() -> None:
    found = trace(training(adamw), PROFILE)

    def places(name: str, phase: Phase) -> list[str]:
        return [
            found.modules[op.module]
            for op in found.ops
            if op.name == name and op.phase is phase and op.module >= 0
        ]

    assert places("aten::addmm.default", Phase.FORWARD) == ["first", "second"]
    assert places("aten::mm.default", Phase.BACKWARD) == ["second", "second", "first"]
    assert places("aten::native_batch_norm_backward.default", Phase.BACKWARD) == ["norm"]
    # Gradients, which follow the operation that made them, and the result that `relu` saved.
    detached = Counter(places("aten::detach.default", Phase.BACKWARD))
    assert detached == {"second": 2, "": 1, "norm": 2, "first": 2}
    owners = {
        found.modules[op.module] for op in found.ops if op.phase is Phase.UPDATE and op.module >= 0
    }
    assert owners == {"first", "norm", "second"}
    assert all(op.module >= 0 for op in found.ops if op.phase is Phase.UPDATE)
    phases = [op.phase for op in found.ops]
    assert phases == sorted(phases)


def test_what_checkpointing_runs_again_belongs_to_backward() -> None:
    found = trace(training(adamw, is_checkpointed=True), PROFILE)
    again = [op for op in found.ops if op.name == "aten::addmm.default"]
    assert [op.phase for op in again] == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]
    assert [found.modules[op.module] for op in again] == ["first", "second", "first"]


def test_writes_that_no_schema_declares_are_found() -> None:
    found = trace(training(adamw), PROFILE)
    (norm,) = (op for op in found.ops if "batch_norm.default" in op.name)
    written = {found.pages[number].name for number in norm.writes}
    assert written == {"norm.running_mean", "norm.running_var"}
    assert not norm.is_replayable


def test_only_what_gives_the_same_bytes_again_is_replayable() -> None:
    def build() -> Callable[[], object]:
        x = torch.ones(8, 2, 16, 16)

        def step() -> object:
            noise = torch.rand(16)
            attended = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            torch.empty(16)
            return torch.nn.functional.dropout(attended * 2, 0.5), noise.add_(1)

        return step

    replayable = {op.name: op.is_replayable for op in trace(build, PROFILE).ops}
    attention = next(name for name in replayable if "scaled_dot_product" in name)
    assert replayable[attention]
    assert replayable["aten::mul.Tensor"]
    assert not replayable["aten::rand.default"]
    assert not replayable["aten::empty.memory_format"]
    assert not replayable["aten::add_.Tensor"]


def test_without_an_optimizer_an_iteration_is_a_call() -> None:
    def build() -> Callable[[], object]:
        model = Net().eval()
        batch = torch.randn(32, 64)

        @torch.no_grad()
        def call() -> torch.Tensor:
            return model(batch)

        return call

    found = trace(build, PROFILE, facts={"model": "Net"})
    assert {op.phase for op in found.ops} == {Phase.FORWARD}
    assert not pages_of(found, PageKind.GRAD)
    assert found.facts["model"] == "Net"
    assert "fake" in found.facts["recorded"]
    assert not any(page.died is None for page in found.pages if page.born is not None)


def test_a_page_that_grows_has_its_last_size() -> None:
    def build() -> Callable[[], object]:
        def step() -> None:
            torch.empty(0).resize_(1000)

        return step

    (page,) = trace(build, PROFILE).pages
    assert page.nbytes == 4000


def test_what_piles_up_has_no_place_in_the_next_iteration() -> None:
    def build() -> Callable[[], object]:
        kept = [torch.zeros(8)]
        return lambda: kept.append(kept[-1] + 1)

    found = trace(build, PROFILE)
    becomes = [page.becomes for page in found.pages if page.becomes is not None]
    assert len(becomes) == len(set(becomes))
    assert [page.becomes for page in found.pages if page.born is not None] == [None]


def test_steps_that_differ_are_refused() -> None:
    def build() -> Callable[[], object]:
        kept: list[torch.Tensor] = [torch.zeros(1)]
        return lambda: kept.__setitem__(0, torch.zeros(kept[0].numel() + 1))

    with pytest.raises(TraceError, match=r"operation 0 was aten::zeros.* does the same each time"):
        trace(build, PROFILE)


def test_reading_a_value_is_refused_with_a_remedy() -> None:
    with pytest.raises(TraceError, match="leave such lines out"):
        trace(lambda: lambda: torch.rand(3).sum().item(), PROFILE)


def test_tensors_with_bytes_are_refused_with_a_remedy() -> None:
    outside = torch.zeros(3)
    with pytest.raises(TraceError, match=r"shape \(3,\).* inside"):
        trace(lambda: lambda: outside + 1, PROFILE)


def test_nothing_stays_registered_after_a_failure() -> None:
    calls: list[str] = []

    def build() -> Callable[[], object]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(build, PROFILE)
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: calls.append("own"))
    assert model(torch.ones(1, 2)).untyped_storage().nbytes() == 8  # and no fake mode is left
    assert calls == ["own"]
    assert not torch.nn.modules.module._global_forward_hooks
