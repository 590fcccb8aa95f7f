"""Section G of the trials, touches: a weight may be read from anywhere, and whatever hangs on it.

Offloading by module hooks puts a weight in place for its module's forward alone.
"""

from __future__ import annotations

import copy
import io
import operator
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.quantised import Quantised
from tests.trials.harness import (
    KIB,
    Run,
    batch,
    everything,
    mlp,
    same,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENTER = pytest.mark.parametrize("enter", [True, False], ids=["made inside", "adopted"])


def printed(model: nn.Sequential, x: torch.Tensor) -> str:
    text = io.StringIO()
    print(model[0].weight, model[0].bias, f"{model[0].weight.sum():.3f}", file=text)
    return text.getvalue()


def saved(model: nn.Sequential, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(model[0].weight, file)
    file.seek(0)
    return torch.load(file)


def in_a_graph_of_another(model: nn.Sequential, x: torch.Tensor) -> Any:
    loss = (model[2](x) * model[0].weight.mean()).square().sum()
    return torch.autograd.grad(loss, [model[0].weight, model[2].weight])


# Each touch is the first use of the weight since everything left the device.
TOUCHES: dict[str, Callable[[nn.Sequential, torch.Tensor], Any]] = {
    "linear": lambda model, x: F.linear(x, model[0].weight, model[0].bias),
    "matmul": lambda model, x: model[0].weight @ model[2].weight.t(),
    "graph": in_a_graph_of_another,
    "item": lambda model, x: model[0].weight[3, 5].item(),
    "float": lambda model, x: float(model[0].bias.detach()[0]),
    "bool": lambda model, x: bool(model[0].bias[0] > 0),
    "tolist": lambda model, x: model[0].weight.tolist(),
    "numpy": lambda model, x: model[0].weight.detach().numpy().copy(),
    "asarray": lambda model, x: np.asarray(model[0].weight.detach()).copy(),
    "print": printed,
    "repr of a module": lambda model, x: repr(model),
    "iteration": lambda model, x: [row.sum() for row in model[0].weight],
    "contains": lambda model, x: model[0].bias[1].item() in model[0].bias,
    "equal": lambda model, x: torch.equal(model[0].weight, model[2].weight),
    "allclose": lambda model, x: torch.allclose(model[0].weight, model[0].weight + 0),
    "operator": lambda model, x: operator.neg(model[0].weight),
    "data": lambda model, x: model[0].weight.data.clone(),
    "copy": lambda model, x: copy.deepcopy(model[0].weight),
    "vector": lambda model, x: nn.utils.parameters_to_vector(model.parameters()),
    "norm": lambda model, x: nn.utils.get_total_norm(model.parameters()),
    "state dict": lambda model, x: {k: v + 0 for k, v in model.state_dict().items()},
    "save": saved,
}


@ENTER
@pytest.mark.parametrize("touch", TOUCHES)
def test_a_weight_can_be_read_outside_its_modules_forward(
    touch: str, enter: bool, tmp_path: Path
) -> None:
    """Trial 48: read anywhere but in its owner's forward, an offloaded weight was a meta tensor."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        run.page(model)
        run.evict()
        first = TOUCHES[touch](model, batch(0))
        run.evict()
        second = TOUCHES[touch](model, batch(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(run, model, optimizer, steps=1)
        return first, second, losses, everything(model)

    same(f, tmp_path, enter=enter, device=80 * KIB)


def with_module_hooks(run: Run, model: nn.Sequential, seen: list[float]) -> None:
    """Each module reads the other one's weight, before and after its forward and its backward."""

    def read(*call: Any) -> None:
        run.evict()
        seen.append(sum(module.weight.sum().item() for module in (model[0], model[2])))

    for module in (model[0], model[2]):
        module.register_forward_pre_hook(read)
        module.register_forward_hook(read)
        module.register_full_backward_pre_hook(read)
        module.register_full_backward_hook(read)
        module.register_state_dict_pre_hook(read)


def with_tensor_hooks(run: Run, model: nn.Sequential, seen: list[float]) -> None:
    """A gradient depends on the other weight; an update is made as soon as a gradient is there."""

    def add_other(gradient: torch.Tensor, other: nn.Parameter) -> torch.Tensor:
        run.evict()
        return gradient + other.detach().mean()

    def update(parameter: torch.Tensor) -> None:
        run.evict()
        with torch.no_grad():
            parameter.sub_(0.01 * parameter.grad)
        seen.append(parameter.norm().item())

    first, second = model[0].weight, model[2].weight
    first.register_hook(lambda gradient: add_other(gradient, second))
    second.register_hook(lambda gradient: add_other(gradient, first))
    for parameter in (first, second):
        parameter.register_post_accumulate_grad_hook(update)


def with_optimizer_hooks(run: Run, model: nn.Sequential, seen: list[float]) -> None:
    def read(*call: Any) -> None:
        run.evict()
        seen.append(float(nn.utils.get_total_norm(model.parameters())))

    model.optimizer.register_step_pre_hook(read)  # type: ignore[operator, union-attr]
    model.optimizer.register_step_post_hook(read)  # type: ignore[operator, union-attr]


@ENTER
@pytest.mark.parametrize("register", [with_module_hooks, with_tensor_hooks, with_optimizer_hooks])
def test_hooks_may_read_any_weight(
    register: Callable[..., None], enter: bool, tmp_path: Path
) -> None:
    """Trial 48, hooks: what they read is there, whichever module or optimizer calls them."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.optimizer = optimizer  # type: ignore[assignment]
        run.page(model, optimizer)
        seen: list[float] = []
        register(run, model, seen)
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            loss = model(batch(step).requires_grad_()).square().mean()
            run.evict()
            loss.backward()
            run.evict()
            optimizer.step()
            losses.append(loss.item())
        model.state_dict()
        assert seen
        return losses, seen, everything(model, optimizer)

    same(f, tmp_path, enter=enter, device=96 * KIB)


# --- what hangs on a weight ---


def quantised_model() -> nn.Sequential:
    model = mlp(num_layers=3)
    for index in (0, 2):
        weight = Quantised.of(model[index].weight.detach())
        model[index].weight = nn.Parameter(weight, requires_grad=False)
    return model


@ENTER
@pytest.mark.parametrize("move", ["none", "double", "copy", "state dict"])
def test_a_weight_of_two_fields_is_kept_whole(
    move: str, enter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial 48, subclasses: a payload was quantised again, or its side tensors were left behind.

    Made inside, the fields are pages; an adopted one stays unpaged as a whole, with one notice.
    """

    def f(run: Run) -> Any:
        model = quantised_model()
        notices = len(run.pager.stats().notices) if run.pager else 0
        run.page(model)
        if run.pager and not enter:
            said = run.pager.stats().notices[notices:]
            assert len(said) == 1
            assert "Quantised" in said[0]
            assert "0.weight" in said[0]
        run.evict()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = train(run, model, optimizer, steps=2)
        run.evict()
        if move == "double":
            with monkeypatch.context() as patch:
                # Without it torch leaves the old fields on the new weight.
                patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
                model.double()
        elif move == "copy":
            model = copy.deepcopy(model)
        elif move == "state dict":
            model.load_state_dict(
                {k: v.clone() for k, v in model.state_dict().items()}, assign=True
            )
        run.evict()
        out = model(batch(5).to(model[4].weight.dtype))
        weights = [model[index].weight for index in (0, 2)]
        assert all(type(weight) is Quantised for weight in weights)
        fields = [(weight.payload, weight.scales) for weight in weights]
        if run.pager:
            assert run.pager.is_paged(fields[0][0]) == enter
        return losses, out, fields, model[4].weight

    same(f, tmp_path, enter=enter, device=96 * KIB)


@dataclass
class State:
    """What a library hangs on a weight: side tensors and settings."""

    scales: torch.Tensor
    bits: int


def facts(weight: Any) -> Any:
    state = getattr(weight, "qstate", None)
    return None if state is None else (state.scales, state.bits)


@ENTER
def test_attributes_stay_with_their_weight(enter: bool, tmp_path: Path) -> None:
    """Trial 48, attributes: the state that a quantised weight carries was lost on the way."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        weight: Any = model[0].weight
        weight.qstate = State(torch.rand(64), 8)
        model.register_buffer("table", torch.arange(16.0))
        model.table.qstate = State(torch.rand(16), 4)  # type: ignore[union-attr]
        state = weight.qstate
        run.page(model, state.scales)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(run, model, optimizer, steps=2)
        run.evict()
        assert model[0].weight is weight
        assert weight.qstate is state
        seen = [facts(weight), facts(model.table), (weight.detach() * state.scales).sum()]
        file = io.BytesIO()
        torch.save([weight, model.table], file)
        file.seek(0)
        seen += [facts(loaded) for loaded in torch.load(file, weights_only=False)]
        seen += [facts(copy.deepcopy(weight)), facts(weight.detach()), facts(weight.clone())]
        if not enter:
            run.unpage(model)
            assert weight.qstate is state
            run.page(model)
        model.double()
        run.evict()
        seen += [facts(model[0].weight), facts(model.table)]
        return losses, seen, everything(model)

    same(f, tmp_path, enter=enter, device=96 * KIB)


@ENTER
def test_a_copied_parameter_is_a_fresh_one_as_in_plain_torch(enter: bool, tmp_path: Path) -> None:
    """Trial 25, kind: torch copies neither gradient nor attributes of a Parameter.

    An attribute may be anything, also what cannot be copied. Plain tensors take both along.
    """

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        leaf = torch.ones(8, requires_grad=True)
        run.page(model, leaf)
        model(batch(0)).sum().backward()
        (leaf * 3).sum().backward()
        weight: Any = model[0].weight
        weight.qstate = threading.Lock()  # has no copy
        leaf.note = "kept"  # type: ignore[attr-defined]
        run.evict()
        twin, twin_leaf = copy.deepcopy((model, leaf))
        assert isinstance(twin[0].weight, nn.Parameter)
        assert not hasattr(twin[0].weight, "qstate")
        assert [p.grad for p in twin.parameters()] == [None] * 4
        assert twin_leaf.note == "kept"  # type: ignore[attr-defined]
        run.evict()
        return twin_leaf, twin_leaf.grad, everything(twin), everything(model)

    same(f, tmp_path, enter=enter)


class QuantisedParameter(nn.Parameter):
    """A Parameter of a class of its own, with its quantisation state in a field."""

    def __new__(
        cls, data: torch.Tensor, requires_grad: bool = False, qstate: State | None = None
    ) -> QuantisedParameter:
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.qstate = qstate
        return self

    def opened(self) -> torch.Tensor:
        assert self.qstate is not None
        return self.float() * self.qstate.scales


def test_a_parameter_of_another_class_keeps_class_and_fields(tmp_path: Path) -> None:
    """Trial 48, subclasses: it stays unpaged as a whole, said once by name; the rest is paged."""

    def f(run: Run) -> Any:
        model = mlp(num_layers=3)
        for index in (0, 2):
            integers = (model[index].weight.detach() * 100).round().to(torch.int8)
            state = State(torch.full((64, 1), 0.01), 8)
            model[index].weight = QuantisedParameter(integers, qstate=state)
        notices = len(run.pager.stats().notices) if run.pager else 0
        run.page(model)
        if run.pager:
            said = run.pager.stats().notices[notices:]
            assert len(said) == 1
            assert "QuantisedParameter" in said[0]
            assert run.pager.is_paged(model[4].weight)
            assert not run.pager.is_paged(model[0].weight)
        run.evict()
        x = batch(0)
        for index in (0, 2):
            assert type(model[index].weight) is QuantisedParameter
            x = torch.tanh(F.linear(x, model[index].weight.opened(), model[index].bias))
            run.evict()
        out = model[4](x)
        out.sum().backward()
        return out, [facts(model[index].weight) for index in (0, 2)], everything(model)

    same(f, tmp_path, enter=False, device=96 * KIB)
