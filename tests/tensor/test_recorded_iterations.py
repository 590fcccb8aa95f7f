"""What a real program's iteration looks like when it was recorded, and where iterations begin."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tvm_pager
from tests.trials.harness import KIB, batch, mlp, small_pager
from tvm_pager.memory import PageState, Tier
from tvm_pager.planning import PageKind, Phase, Trace
from tvm_pager.runtime.storage import page_of
from tvm_pager.transfer.protocol import Priority


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad()
    model(batch(index)).square().mean().backward()
    optimizer.step()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of a step of training; everything fits."""
    with small_pager(tmp_path_factory.mktemp("trace"), device=4 << 20) as pager:
        model = mlp(3)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        pager.record()
        for index in range(4):
            train_step(model, optimizer, index)
        model(batch(9))  # the next iteration has begun
        found = pager.trace()
        del model, optimizer
    assert found is not None
    return found


def test_an_operation_has_its_phase_and_module(trace: Trace) -> None:
    phases = [op.phase for op in trace.ops if op.name.startswith("aten::")]
    num_behind = phases[::-1].index(Phase.UPDATE)
    assert 0 < num_behind < 10  # what brings the next batch
    assert set(phases[-num_behind:]) == {Phase.FORWARD}
    assert sorted(phases[:-num_behind]) == phases[:-num_behind]  # forward, backward, update
    assert set(phases) == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}
    products = [op for op in trace.ops if op.name in ("aten::addmm.default", "aten::mm.default")]
    paths = [trace.modules[op.module] for op in products]
    assert paths == ["0", "2", "4", "4", "4", "2", "2", "0"]
    assert all(op.module == -1 for op in trace.ops if op.phase is Phase.UPDATE)


def test_pages_have_names_kinds_and_dtypes(trace: Trace) -> None:
    named = {page.name: page for page in trace.pages if page.name}
    assert set(named) == {f"{i}.{what}" for i in (0, 2, 4) for what in ("weight", "bias")}
    assert {page.kind for page in named.values()} == {PageKind.PARAM}
    assert {page.dtype for page in named.values()} == {"float32"}
    kinds = {page.kind for page in trace.pages}
    assert {PageKind.ACTIVATION, PageKind.GRAD, PageKind.OPT_STATE, PageKind.TEMPORARY} <= kinds


def test_what_lives_on_is_known_in_the_next_iteration(trace: Trace) -> None:
    left = [page for page in trace.pages if page.died is None]
    assert all(page.becomes is not None for page in left)
    grads = [page for page in trace.pages if page.kind is PageKind.GRAD and page.born is not None]
    assert len(grads) == 6
    # By zero_grad, before the next iteration's first operation.
    updates = [index for index, op in enumerate(trace.ops) if op.phase is Phase.UPDATE]
    assert all(grad.died is not None and grad.died > updates[-1] for grad in grads)


def test_what_dies_before_the_next_model_dies_in_its_own_iteration(tmp_path: Path) -> None:
    with small_pager(tmp_path, device=4 << 20) as pager:
        model, inputs = mlp(3), batch(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pager.record()
        for _ in range(4):
            model(inputs).square().mean().backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None  # no operation comes behind it, and before the next entry
        found = pager.trace()
        del model, optimizer, inputs
    assert found is not None
    grads = [page for page in found.pages if page.kind is PageKind.GRAD]
    assert len(grads) == 6
    assert all(page.born is not None and page.died == len(found.ops) for page in grads), grads


def test_what_dies_on_its_way_down_dies_in_its_own_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy holds the memory that it reads, so the death is seen when the copy has ended."""
    with small_pager(tmp_path, device=4 << 20, check=0) as pager:
        model, inputs, core = mlp(3), batch(0), pager._core
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        store = pager._backend._routes.store
        write = store.write
        is_free = threading.Event()

        def write_later(*args: Any) -> Any:
            is_free.wait(10)
            return write(*args)

        monkeypatch.setattr(store, "write", write_later)
        pager.record()
        for _ in range(4):
            loss = model(inputs).square().mean()  # what was recorded before has ended
            is_free.clear()
            loss.backward()
            optimizer.step()
            for parameter in model.parameters():
                with core.lock:
                    page = page_of(parameter.grad)
                    core.mover.start_write_back(page, Tier.NVME, Priority.WRITE_BACK)
                    assert page.state is PageState.WRITING_BACK
                parameter.grad = None
            threading.Timer(0.2, is_free.set).start()
        is_free.set()
        found = pager.trace()
        del model, optimizer, inputs, page, parameter, loss
    assert found is not None
    grads = [page for page in found.pages if page.kind is PageKind.GRAD]
    assert len(grads) == 6
    assert all(page.born is not None and page.died == len(found.ops) for page in grads), grads


def test_times_writes_and_replayability_are_taken_down(trace: Trace) -> None:
    assert trace.launch_ns > 0
    assert all(op.compute_ns > 0 for op in trace.ops if op.name == "aten::addmm.default")
    for op in trace.ops:
        if op.name == "aten::addcdiv_.default":
            assert op.writes == op.reads[:1]
            assert not op.is_replayable
        if op.name == "aten::addmm.default":
            assert not op.writes
            assert op.is_replayable
    assert trace.facts["device"] == "cpu"


def num_iterations(pager: Any) -> int:
    return int(pager._core.iterations.outcomes.counts["iterations"])


def test_each_call_of_a_model_without_gradients_is_an_iteration(tmp_path: Path) -> None:
    options = {"device": 48 * KIB, "host": 1024 * KIB, "policy": "lookahead"}
    with small_pager(tmp_path, **options) as pager:
        model = mlp(6)
        with torch.inference_mode():
            for index in range(8):
                model(batch(index))
        assert num_iterations(pager) == 7  # the first one begins with the program
        assert pager.stats().plans.startswith("plans: 4 of 7 iterations")


def test_a_teacher_that_runs_once_in_a_step_is_a_part_of_it(tmp_path: Path) -> None:
    options = {"device": 48 * KIB, "host": 1024 * KIB, "policy": "lookahead"}
    with small_pager(tmp_path, **options) as pager:
        teacher, student = mlp(4), mlp(3)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for index in range(7):
            with torch.no_grad():
                wanted = teacher(batch(index))
            (student(batch(index)) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        del wanted
        assert num_iterations(pager) == 6
        assert ", 1 traces" in pager.stats().plans


def test_two_optimizers_of_one_model_make_one_iteration(tmp_path: Path) -> None:
    options = {"device": 48 * KIB, "host": 1024 * KIB, "policy": "lookahead"}
    with small_pager(tmp_path, **options) as pager:
        model = mlp(4)
        parameters = list(model.parameters())
        optimizers = [
            torch.optim.SGD(parameters[:4], lr=0.1),
            torch.optim.AdamW(parameters[4:], lr=0.1),
        ]
        for index in range(7):
            model(batch(index)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert num_iterations(pager) == 6
        assert ", 1 traces" in pager.stats().plans


def test_an_error_inside_a_step_of_an_optimizer_ends_no_boundaries(tmp_path: Path) -> None:
    options = {"device": 48 * KIB, "host": 1024 * KIB, "policy": "lookahead"}
    with small_pager(tmp_path, **options) as pager:
        model = mlp(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            raise ValueError("bad batch")

        train_step(model, optimizer, 0)
        with pytest.raises(ValueError, match="bad batch"):
            optimizer.step(closure)
        for index in range(6):
            train_step(model, optimizer, index)
        assert num_iterations(pager) >= 5


@pytest.mark.parametrize("is_paged", [False, True], ids=["plain", "of another pager"])
def test_the_optimizer_of_another_model_ends_no_iteration(tmp_path: Path, is_paged: bool) -> None:
    other, model = mlp(1), mlp(2)
    others_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pager = tvm_pager.page(model, optimizer, torch_device="cpu", host=256 * KIB, policy="belady")
    others_pager = (
        tvm_pager.page(other, others_optimizer, torch_device="cpu", host=256 * KIB)
        if is_paged
        else None
    )
    try:
        pager.record()  # else nobody asks where an iteration ends
        for index in range(4):
            train_step(model, optimizer, index)
            train_step(other, others_optimizer, index)
        assert num_iterations(pager) == 3  # the fourth lasts until the model is called again
    finally:
        pager.close()
        if others_pager is not None:
            others_pager.close()


class Forgetful(torch.optim.SGD):
    """Drops its gradients as soon as they are used."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


@pytest.mark.parametrize("kind", [torch.optim.SGD, Forgetful])
def test_an_unpaged_head_on_a_paged_model_ends_iterations(
    tmp_path: Path, kind: type[torch.optim.SGD]
) -> None:
    model, head = mlp(2), torch.nn.Linear(64, 64)
    optimizer = kind(head.parameters(), lr=0.1)
    pager = tvm_pager.page(model, torch_device="cpu", host=256 * KIB, policy="lru")
    try:
        pager.record()
        for index in range(4):
            head(model(batch(index))).square().mean().backward()
            optimizer.step()
            assert pager._context.record.num_updating == 0
        assert num_iterations(pager) == 3  # the fourth lasts until the model is called again
    finally:
        pager.close()
