"""The torch backend is none of torch's business: no mode, transform or gradient matters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.small_backends import (
    MIB,
    Make,
    alias,
    bytes_of,
    page_of,
    run,
    wipe,
)
from tvm_pager.transfer.protocol import Lane
from tvm_pager.transfer.raw_bytes import RawDispatch, raw_alias

# --- torch's modes --------------------------------------------------------------------------------


class SeesNoDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the backend dispatched {func}")


class SeesNoFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the backend called {func}")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def inside(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Runs work inside a functorch transform."""

    def runner(work: Callable[[], None]) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            work()
            return x.sum()

        transform(function)(torch.ones(2, 3))

    return runner


def within(make_context: Callable[[], Any]) -> Any:
    def runner(work: Callable[[], None]) -> None:
        with make_context():
            work()

    return runner


MODES = {
    "plain": within(contextlib.nullcontext),
    "grad": within(torch.enable_grad),
    "no_grad": within(torch.no_grad),
    "inference": within(torch.inference_mode),
    "meta device": within(lambda: torch.device("meta")),
    "deterministic": within(deterministic),
    "default dtype": within(default_dtype),
    "autocast": within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "dispatch mode": within(SeesNoDispatch),
    "function mode": within(SeesNoFunction),
    "fake tensors": within(FakeTensorMode),
    "anomaly": within(lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
    "func.grad": inside(torch.func.grad),
    "vmap": inside(torch.vmap),
    "functionalize": inside(torch.func.functionalize),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("nbytes", [513, 2 * MIB + 5])
@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_torch_matters(make: Make, mode: str, nbytes: int) -> None:
    backend = make()
    data = bytes_of(nbytes)
    storage = page_of(backend, data)

    def work() -> None:  # regions and staging are mapped in here as well
        run(backend, Lane.D2H, storage, nbytes, 4096)
        backend.release_device(storage)
        backend.allocate_device(storage, nbytes)
        run(backend, Lane.H2D, storage, nbytes, 4096)
        run(backend, Lane.H2N, None, nbytes, 4096)
        run(backend, Lane.D2N, storage, nbytes, 4 * MIB)
        backend.release_device(storage)
        backend.allocate_device(storage, nbytes)
        run(backend, Lane.N2D, storage, nbytes, 4096)

    MODES[mode](work)
    assert torch.equal(alias(storage).cpu(), data)
    work()  # what was mapped under the mode serves without it
    assert torch.equal(alias(storage).cpu(), data)
    alias(storage).fill_(0)
    run(backend, Lane.N2D, storage, nbytes, 4 * MIB)
    assert torch.equal(alias(storage).cpu(), data)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
def test_raw_copies_pass_by_every_mode(device: str, mode: str) -> None:
    storage = torch.UntypedStorage(1000, device=device)
    data, result = bytes_of(1000), torch.zeros(1000, dtype=torch.uint8)

    def work() -> None:
        with RawDispatch():
            raw = raw_alias(storage, torch.device(device))
            raw.copy_(data)
            result[100:].copy_(raw[100:])

    MODES[mode](work)
    assert torch.equal(result[100:], data[100:])
    assert int(result[:100].sum()) == 0
    assert result._version == 0


def test_autograd_does_not_notice(make: Make) -> None:
    backend = make()
    weight = torch.randn(64, 64, device=backend.device, requires_grad=True)
    middle = weight * 2
    loss = (middle * middle).sum()
    version, storage = middle._version, middle.untyped_storage()
    nbytes = storage.nbytes()
    run(backend, Lane.D2H, storage, nbytes, 0)
    wipe(backend, storage, nbytes)
    versions_after_wipe = middle._version
    run(backend, Lane.H2D, storage, nbytes, 0)
    assert middle._version == versions_after_wipe == version
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, 8 * weight.detach())
