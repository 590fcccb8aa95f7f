"""What `verify` reads of a script, when, and under which name."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tvm_pager import Pager
from tvm_pager.runtime.storage import page_of
from tvm_pager.verify import tensor_bytes
from tvm_pager.verify.module_names import ModuleNames
from tvm_pager.verify.record import Record, read_lines, read_records, write_line
from tvm_pager.verify.recorder import Recorder
from tvm_pager.verify.tensor_bytes import describe, is_readable, leaves, parts, read_bytes
from tvm_pager.verify.watch import StopRun, Watch

# --- bytes -------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> str:
    return describe(tensor)[2]


def test_a_digest_sees_every_bit_and_no_layout() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    flipped = tensor.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    assert digest(flipped) != digest(tensor)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert digest(conjugate) == digest(torch.tensor([1 - 2j]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nans[0]) != digest(nans[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 33)])
def test_bytes_come_in_pieces_in_logical_order(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_bytes, "PIECE_BYTES", 32)
    tensor = torch.randint(0, 2, shape).to(dtype)
    expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    pieces: list[bytes] = []
    read_bytes(tensor, lambda data: pieces.append(bytes(data)))
    assert b"".join(pieces) == expected
    assert max(map(len, pieces), default=0) <= 32
    assert describe(tensor)[2] == hashlib.blake2b(expected, digest_size=16).hexdigest()


def test_reading_a_page_leaves_its_copies_below_the_device_and_makes_no_page() -> None:
    options: dict[str, Any] = {"torch_device": "cpu", "device": "1MiB", "host": "8MiB"}
    plain = torch.arange(1000.0).reshape(10, 100)
    with Pager(**options) as pager:
        paged = torch.arange(1000.0).reshape(10, 100)
        page = page_of(paged)
        assert page is not None
        pager.evict_all()
        num_pages = pager.stats().num_pages
        views = [(paged, plain), (paged.t(), plain.t())]
        assert [digest(mine) for mine, _ in views] == [digest(theirs) for _, theirs in views]
        assert page.has_copies  # or a fault in one of them would be repaired by looking
        seen: list[int] = []
        read_bytes(paged, lambda _: seen.append(pager.stats().num_pages))
        assert seen == [num_pages]
        assert pager.stats().num_exposed == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_and_subclasses_are_read_by_their_parts() -> None:
    names = [name for name, _ in parts("w", torch.eye(3).to_sparse())]
    assert names == ["w (indices)", "w (values)"]
    rows = torch.eye(3).to_sparse_csr()
    assert [name for name, _ in parts("w", rows)] == [
        "w (crow_indices)",
        "w (col_indices)",
        "w (values)",
    ]
    two = TwoTensor(torch.ones(2), torch.zeros(2))
    assert [(name, digest(part)) for name, part in parts("w", two)] == [
        ("w (a)", digest(torch.ones(2))),
        ("w (b)", digest(torch.zeros(2))),
    ]


def test_what_cannot_be_read_says_so() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
        kind, shape, text = describe(fake)
    assert (kind, shape, is_readable(text)) == ("FakeTensor", (3,), False)
    assert is_readable(digest(torch.ones(3, device="meta")))


@dataclass
class Both:
    left: torch.Tensor
    right: float


def test_leaves_have_the_path_that_a_reader_would_write() -> None:
    one = torch.ones(1)
    point = namedtuple("point", "x y")
    value = OrderedDict(
        loss=one, logits=[one, (one, 3)], cache={0: one}, named=point(one, "text"), nothing=None
    )
    named = [name for name, _ in leaves("out", value)]
    assert named == [
        *("out.loss", "out.logits[0]", "out.logits[1][0]", "out.logits[1][1]"),
        *("out.cache[0]", "out.named.x"),
    ]
    assert [name for name, _ in leaves("out", Both(one, 2.0))] == ["out.left", "out.right"]
    circle: list[Any] = [one]
    circle.append(circle)
    assert len(list(leaves("out", circle))) < 20


# --- steps -------------------------------------------------------------------------------------


class Notes:
    """A sink that keeps where it was called."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def record(self, step: int, phase: str, name: str, value: Any) -> None:
        self.places.append(f"{step} {phase} {name}")


@contextlib.contextmanager
def watching(num_steps: int = 1000) -> Iterator[list[str]]:
    notes = Notes()
    with contextlib.suppress(StopRun), Watch(notes, num_steps):
        yield notes.places


def test_each_step_has_outputs_loss_buffers_gradients_weights_and_states_in_order() -> None:
    with watching() as places:
        model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3, affine=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            nn.functional.mse_loss(model(torch.randn(4, 2)), torch.ones(4, 3)).backward()
            optimizer.step()
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    step = [
        "forward output Sequential",
        "loss loss",
        *(f"buffer {name}" for name in buffers),
        "gradient 0.weight",
        "weight 0.weight",
        "optimizer state momentum_buffer of 0.weight",
    ]
    initial = [f"1 initial value {name}" for name in ["0.weight", *buffers]]
    assert places == [*initial, *(f"1 {what}" for what in step), *(f"2 {what}" for what in step)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> int:
    """Trains as a framework does that handles every exception; gives the steps it saw end."""
    num_done = 0
    for _ in range(num_steps):
        with contextlib.suppress(Exception):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            num_done += 1
    return num_done


def test_the_script_is_stopped_through_whatever_handles_exceptions() -> None:
    with watching(num_steps=3) as places:
        model = nn.Linear(2, 2)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 9)
        pytest.fail("the script went on")
    assert {place.split()[0] for place in places} == {"1", "2", "3"}


def test_a_script_that_swallows_the_stop_is_stopped_again_and_seen_no_more() -> None:
    with watching(num_steps=1) as places:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num_stops = 0
        for _ in range(3):
            try:
                train(model, optimizer, 1)
            except BaseException:
                num_stops += 1
    assert num_stops == 3
    assert {place.split()[0] for place in places} == {"1"}


def test_without_an_optimizer_each_call_of_a_model_is_a_step() -> None:
    with watching(num_steps=2) as places:
        model, activation = nn.Sequential(nn.Linear(2, 2)), nn.ReLU()
        for _ in range(5):
            activation(model(torch.ones(1, 2)))
    assert [place for place in places if "output" in place] == [
        "1 forward output Sequential",
        "2 forward output ReLU",
        "2 forward output Sequential",
    ]


def test_a_call_that_raised_is_no_step() -> None:
    with watching(num_steps=2) as places:
        model = nn.Linear(2, 2)
        for width in (3, 3, 2):
            with contextlib.suppress(RuntimeError):
                model(torch.ones(1, width))
    assert [place for place in places if "output" in place] == ["1 forward output Linear"]


def test_calls_before_the_first_optimizer_step_are_no_steps_of_their_own() -> None:
    with watching(num_steps=2) as places:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert {place.split()[0] for place in places} == {"1"}
    assert places.count("1 loss loss") == 4


def test_recomputation_other_threads_and_failed_calls_are_not_looked_at() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(str(x.shape))

    with watching() as places:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="Size"):
            nn.Sequential(Fails())(torch.ones(1))
        x = torch.ones(1, 2, requires_grad=True)
        checkpoint(lambda y: model(model(y)), x, use_reentrant=False).sum().backward()
        checkpoint(lambda y: model(y), x, use_reentrant=True).sum().backward()
        thread = threading.Thread(target=lambda: model(torch.ones(1, 2)))
        thread.start()
        thread.join()
        optimizer.step()
    assert places.count("1 forward output Linear") == 3
    assert places.count("1 loss loss") == 2


def test_an_optimizer_inside_another_is_one_step_and_one_that_raised_may_try_again() -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            inner.step()
            if len(tries) == 1:
                raise ValueError("not yet")

    tries = [1]
    model = nn.Linear(2, 2)
    with watching() as places:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = Outer(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="not yet"):
            outer.step()
        tries.append(2)
        outer.step()
        inner.step()
    assert places.count("1 gradient weight") == 2  # before each try
    assert places.count("1 weight weight") == 1
    assert places.count("2 weight weight") == 1
    assert "3 " not in "".join(places)


def test_numbers_and_nested_tensors_of_an_optimizer_are_states() -> None:
    with watching() as places:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert "1 optimizer state func_evals of weight" in places
    assert "1 optimizer state old_dirs[0] of weight" in places


def test_nothing_of_the_watch_stays_behind() -> None:
    hooks = [
        vars(module_hooks)[name] for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    ]
    before = [len(hook) for hook in hooks], torch.autograd.backward, torch.optim.Optimizer.__init__
    with watching():
        assert torch.autograd.backward is not before[1]
    after = [len(hook) for hook in hooks], torch.autograd.backward, torch.optim.Optimizer.__init__
    assert before == after


# --- names -------------------------------------------------------------------------------------


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2, bias=False))
        self.decoder = nn.Linear(2, 2, bias=False)


def test_a_part_that_is_called_by_itself_has_the_names_of_its_model() -> None:
    with watching() as places:
        model = Coder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.decoder(model.encoder(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert [place for place in places if "output" in place or "gradient" in place] == [
        "1 forward output encoder",
        "1 forward output decoder",
        "1 gradient encoder.0.weight",
        "1 gradient decoder.weight",
    ]


def test_further_models_have_their_class_before_their_names() -> None:
    names = ModuleNames()
    models = [nn.ReLU(), nn.Linear(1, 1, bias=False), Coder(), Coder()]
    assert [names.note_call(model) for model in models] == models
    assert names.note_call(models[1]) is None
    assert list(names.parameters().values()) == [
        *("weight", "Coder:encoder.0.weight", "Coder:decoder.weight"),
        *("Coder#2:encoder.0.weight", "Coder#2:decoder.weight"),
    ]
    assert [names.path(model) for model in models] == ["ReLU", "Linear", "Coder", "Coder#2"]
    del models[2:]
    assert list(names.parameters().values()) == ["weight"]


def test_parameters_of_no_model_have_their_place_in_the_optimizer() -> None:
    with watching() as places:
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
    assert "1 gradient parameter 0 of group 0" in places


# --- records -----------------------------------------------------------------------------------


@pytest.fixture
def files() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    with tempfile.TemporaryFile() as records, tempfile.TemporaryFile() as kept:
        yield records, kept


def test_a_record_that_differs_stops_the_run_and_keeps_the_bytes(
    files: tuple[IO[bytes], IO[bytes]],
) -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])]
    reference = iter([Record(1, "weight", "w", *describe(values[0]))] * 2)
    recorder = Recorder(*files, reference)
    recorder.record(1, "weight", "w", values[0])
    for _ in range(2):  # and again, should the script go on
        with pytest.raises(StopRun):
            recorder.record(1, "weight", "w", values[1])
    assert (recorder.found_at, recorder.is_different) == (1, True)
    files[1].seek(0)
    assert np.frombuffer(files[1].read(), np.float32).tolist() == [1.0, 3.0]
    assert [record.digest for record in read_records(files[0])] == [*map(digest, values)]


def test_a_run_can_be_stopped_at_a_record_that_is_equal(
    files: tuple[IO[bytes], IO[bytes]],
) -> None:
    recorder = Recorder(*files, keep_at=1)
    recorder.record(1, "loss", "loss", 2.5)
    with pytest.raises(StopRun):
        recorder.record(1, "loss", "loss", torch.tensor([7.0]))
    assert (recorder.found_at, recorder.is_different) == (1, False)


def test_a_line_that_was_cut_off_is_left_out(files: tuple[IO[bytes], IO[bytes]]) -> None:
    write_line(files[0], [1, "ä"])
    files[0].write(b'[2, "cut')
    files[0].flush()
    assert list(read_lines(files[0])) == [[1, "ä"]]
