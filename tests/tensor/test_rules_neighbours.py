"""One test per rule about other parts of torch that see, replace or compile operations."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tvm_pager
from tests.trials.harness import (
    Run,
    assert_nothing_left,
    batch,
    data_bytes,
    everything,
    mlp,
    same,
    seed_all,
    small_pager,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_pass_through(tmp_path: Path) -> None:
    def f(run: Run) -> Any:
        indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
        values = torch.arange(1.0, 4.0)
        sparse = torch.sparse_coo_tensor(indices, values, (3, 3))
        dense = batch(0, rows=3, width=3)
        run.evict()
        product = sparse @ dense
        run.evict()
        again = (sparse + sparse).coalesce()
        run.evict()
        rows = sparse.to_sparse_csr()
        run.evict()
        values.mul_(1.0)
        back = (rows.to_dense(), again.to_dense(), dense.to_sparse().to_dense())
        return sparse, product, again, back

    same(f, tmp_path, check=2)


@pytest.mark.timeout(120)
def test_compilation_over_paged_parameters_is_refused_by_name(tmp_path: Path) -> None:
    model = mlp(num_layers=1)
    with small_pager(tmp_path) as pager:
        tvm_pager.page(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch does not like global module hooks
            compiled = torch.compile(model, backend="eager")
            with pytest.raises(tvm_pager.PagerError, match=r"torch\.compile"):
                compiled(batch(0))
        pager.evict_all()
        assert model(batch(0)).shape == (8, 64)  # the plain call works
        del compiled, model
        torch._dynamo.reset()
    assert_nothing_left(tmp_path)


class Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def one_step(run: Run, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(run, model, optimizer, steps=2)
    return losses, everything(model, optimizer)


@pytest.mark.parametrize("where", ["above", "below"])
def test_other_dispatch_modes_see_each_operation_once(where: str, tmp_path: Path) -> None:
    seed_all(0)
    with Listening() as expected:
        one_step(Run(None), mlp(num_layers=2))

    seed_all(0)
    got = Listening()
    if where == "above":
        with small_pager(tmp_path) as pager, got:
            one_step(Run(pager), mlp(num_layers=2))
    else:
        with got, small_pager(tmp_path) as pager:
            one_step(Run(pager), mlp(num_layers=2))
    known = set(expected.names) - {"aten.detach.default"}  # nn.Parameter makes one of a subclass
    wanted = [name for name in expected.names if name in known]
    assert [name for name in got.names if name in known] == wanted
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("where", ["above", "below"])
def test_floating_point_operations_are_counted_once(where: str, tmp_path: Path) -> None:
    seed_all(0)
    with FlopCounterMode(display=False) as expected:
        one_step(Run(None), mlp(num_layers=2))
    seed_all(0)
    got = FlopCounterMode(display=False)
    if where == "above":
        with small_pager(tmp_path) as pager, got:
            one_step(Run(pager), mlp(num_layers=2))
    else:
        with got, small_pager(tmp_path) as pager:
            one_step(Run(pager), mlp(num_layers=2))
    assert got.get_total_flops() == expected.get_total_flops() > 0
    assert got.get_flop_counts()["Global"] == expected.get_flop_counts()["Global"]
    assert_nothing_left(tmp_path)


def test_a_mode_that_computes_may_use_pages(tmp_path: Path) -> None:
    """A mode that replaces an operation by others sees, and gives back, tensors that are pages."""

    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            return out + out if func is torch.ops.aten.tanh.default else out

    def f(run: Run) -> Any:
        model = mlp(num_layers=2)
        with Doubling():
            out = model(batch(0))
            run.evict()
            out.sum().backward()
        return out, everything(model)

    same(f, tmp_path)


# --- other pagers ---


@pytest.fixture
def two_pagers(tmp_path: Path) -> Iterator[list[Any]]:
    """Neither of them is entered."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(small_pager(tmp_path, check=2)))
            for _ in range(2)
        ]
    assert_nothing_left(tmp_path)


def write_list(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch._foreach_add_([a, a.t()], [b, b])


ACROSS_PAGERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "operands": torch.add,
    "an operand written": lambda a, b: a.add_(b),
    "matrices": torch.mm,
    "a list": lambda a, b: torch.cat([a, a, b]),
    "a list that is written": write_list,
    "a list beside an operand": lambda a, b: torch.ops.aten.index(a, [b.long() * 0]),
    "out": lambda a, b: torch.neg(b, out=a),
    "a storage": lambda a, b: a.set_(b),
    "an index": lambda a, b: b[a > 0],
    "views": lambda a, b: a[2:] * b.t()[2:],
}


@pytest.mark.parametrize("operation", ACROSS_PAGERS)
def test_operands_of_two_pagers_are_refused_by_name(operation: str, two_pagers: list[Any]) -> None:
    """Neither pager could make room for the other's page, nor keep it while the operation runs."""
    a, b = (torch.full((8, 8), value) for value in (1.0, 2.0))
    for pager, tensor in zip(two_pagers, (a, b), strict=True):
        pager.page(tensor)
        pager.evict_all()
    with pytest.raises(tvm_pager.PagerError, match=r"^aten::[\w.]+ got operands of two pagers"):
        ACROSS_PAGERS[operation](a, b)
    for pager, tensor, value in zip(two_pagers, (a, b), (1.0, 2.0), strict=True):
        assert pager.is_paged(tensor)
        assert tensor.tolist() == [[value] * 8] * 8
        pager.evict_all()
        assert pager.residency(tensor).name == "HOST"
        assert (tensor + tensor).sum().item() == 128 * value, "each goes on with its own"
        pager.check_invariants()
    for remedied in (two_pagers[1].recover(b), b):  # as the error says
        tvm_pager.unpage(remedied)
        assert (a + remedied).sum().item() == 64 * 3.0


# --- memory of others ---


@pytest.fixture
def numpy_operators() -> Iterator[Any]:
    """Custom operators whose results lie in memory that torch did not allocate."""
    library = torch.library.Library("tvm_pager_neighbours", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.define("both(Tensor x) -> (Tensor, Tensor[])")

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x.tolist(), dtype=np.float32) * 2)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        raw = bytearray(np.asarray(x.tolist(), dtype=np.float32).tobytes())
        return x + 1, [torch.frombuffer(raw, dtype=torch.float32), doubled(x)]

    library.impl("doubled", doubled, "CompositeExplicitAutograd")
    library.impl("both", both, "CompositeExplicitAutograd")
    yield torch.ops.tvm_pager_neighbours
    library._destroy()


def from_file(x: torch.Tensor, path: Path) -> torch.Tensor:
    with path.open("wb") as file:
        file.write(data_bytes(x))
    return torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype)


@pytest.mark.parametrize("kind", ["one", "nested", "file", "numpy", "buffer", "dlpack"])
def test_results_in_memory_that_torch_cannot_resize_stay_unpaged(
    kind: str, numpy_operators: Any, tmp_path: Path
) -> None:
    """One notice, where an operator of torch's has seen it at all: `frombuffer` asks none."""
    make: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "one": numpy_operators.doubled,
        "nested": lambda x: numpy_operators.both(x)[1][0],
        "file": lambda x: from_file(x, tmp_path / f"numbers {next(names)}"),
        "numpy": lambda x: torch.from_numpy(np.asarray(x.tolist(), dtype=np.float32)),
        "buffer": lambda x: torch.frombuffer(bytearray(data_bytes(x)), dtype=torch.float32),
        "dlpack": lambda x: torch.from_dlpack(np.asarray(x.tolist(), dtype=np.float32)),
    }
    names = itertools.count()

    def f(run: Run) -> Any:
        notices = len(run.pager.stats().notices) if run.pager else 0
        x = torch.arange(1024.0)
        foreign = [make[kind](x) for _ in range(2)]
        addresses = [t.data_ptr() for t in foreign]
        run.evict()
        views = [foreign[0][1:], foreign[0].view(32, 32).t(), foreign[0].detach()]
        views[1].mul_(x.view(32, 32))
        run.evict()
        out = foreign[0] + foreign[1] * x
        torch.add(x, 1, out=foreign[1])
        run.evict()
        assert [t.data_ptr() for t in foreign] == addresses, "it was moved"
        if run.pager:
            assert not any(run.pager.is_paged(t) for t in foreign + views)
            assert run.pager.is_paged(out)
            said = len(run.pager.stats().notices) - notices
            assert said == (1 if kind in ("one", "nested", "file", "numpy") else 0)
        return x, foreign, views, out

    same(f, tmp_path, check=2)
