"""Functions that read an operand by pointer, outside dispatch, give the same bits over pages.

Each case runs plain, then over pages that have all left the device before each call, and again with
everything pushed off the device after each single operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

from tests.trials.harness import Run, assert_equal, frozen, small_pager


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    """A packed sequence made by hand: data and batch sizes."""
    return torch.arange(18.0).reshape(6, 3) / 10, ints(3, 2, 1)


def recurrent(make: Callable[..., Any]) -> Callable[..., Any]:
    """Output, last state and all gradients of a recurrent module over a packed sequence."""

    def call(run: Run, data: torch.Tensor, batch_sizes: torch.Tensor) -> Any:
        module = make(3, 4, num_layers=2, bidirectional=True)
        data.requires_grad_()
        sequence = rnn.PackedSequence(data, batch_sizes)
        assert int(batch_sizes[0]) == 3  # else the module's own check would bring it in
        run.evict()
        out, state = module(sequence)
        run.evict()
        out.data.sum().backward()
        return out, state, data.grad, [parameter.grad for parameter in module.parameters()]

    return call


def relu_rnn(*args: Any, **kwargs: Any) -> nn.RNN:
    return nn.RNN(*args, nonlinearity="relu", **kwargs)


def packing(run: Run, padded: torch.Tensor, lengths: torch.Tensor) -> Any:
    padded.requires_grad_()
    sequence = rnn.pack_padded_sequence(padded, lengths, enforce_sorted=False)
    run.evict()
    sequence.data.square().sum().backward()
    return sequence, padded.grad


def ctc(run: Run, scores: torch.Tensor, *labels_and_lengths: torch.Tensor) -> Any:
    scores.requires_grad_()
    loss = F.ctc_loss(scores.log_softmax(2), *labels_and_lengths)
    run.evict()
    loss.backward()
    return loss, scores.grad


def bags(run: Run, indices: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> Any:
    weight.requires_grad_()
    out = F.embedding_bag(indices, weight, offsets)
    run.evict()
    out.sum().backward()
    return out, weight.grad


def sobol(run: Run) -> Any:
    engine = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
    drawn = []
    for num in (4, 3):
        run.evict()
        drawn.append(engine.draw(num))
    run.evict()
    engine.fast_forward(5)
    run.evict()
    drawn.append(engine.draw(2))
    return drawn, engine.quasi, engine.sobolstate


def padded_encoder(run: Run) -> Any:
    """Its fast path works on nested tensors."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    inputs = torch.rand(2, 3, 8)
    padding = torch.tensor([[False, False, True], [False, True, True]])
    run.evict()
    with torch.no_grad():
        return encoder(inputs, src_key_padding_mask=padding)


def int8_linear(run: Run, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    quantized, offsets, scale, zero_point = torch.fbgemm_linear_quantize_weight(weight)
    matrix = torch.fbgemm_pack_quantized_matrix(quantized)
    run.evict()
    return torch.fbgemm_linear_int8_weight_fp32_activation(
        inputs, quantized, matrix, offsets, scale, zero_point, bias
    )


def half_linear(run: Run, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    matrix = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    run.evict()
    return torch.fbgemm_linear_fp16_weight_fp32_activation(inputs, matrix, bias)


# Name -> what makes the operands, and the call; both see the same generator state in each run.
CASES: dict[str, tuple[Callable[[], tuple[torch.Tensor, ...]], Callable[..., Any]]] = {
    "tensor_split": (
        lambda: (torch.arange(12.0).reshape(6, 2), ints(1, 3)),
        lambda _, x, at: torch.tensor_split(x, at),
    ),
    "tensor_split sections": (
        lambda: (torch.arange(12.0), torch.tensor(3)),
        lambda _, x, num: x.tensor_split(num, dim=0),
    ),
    "LSTM": (packed, recurrent(nn.LSTM)),
    "GRU": (packed, recurrent(nn.GRU)),
    "RNN tanh": (packed, recurrent(nn.RNN)),
    "RNN relu": (packed, recurrent(relu_rnn)),
    "pad_packed_sequence": (
        packed,
        lambda _, *parts: rnn.pad_packed_sequence(rnn.PackedSequence(*parts)),
    ),
    "unpack_sequence": (packed, lambda _, *parts: rnn.unpack_sequence(rnn.PackedSequence(*parts))),
    "pack_padded_sequence": (
        lambda: (torch.arange(24.0).reshape(4, 3, 2), ints(2, 4, 1)),
        packing,
    ),
    "unpad_sequence": (
        lambda: (torch.arange(12.0).reshape(3, 4), ints(2, 4, 1)),
        lambda _, x, lengths: rnn.unpad_sequence(x, lengths, batch_first=True),
    ),
    "pack_sequence": (
        lambda: (torch.arange(3.0), torch.arange(2.0)),
        lambda _, *parts: rnn.pack_sequence(parts),
    ),
    "repeat_interleave": (
        lambda: (torch.arange(3.0), ints(1, 2, 3)),
        lambda _, x, times: torch.repeat_interleave(x, times, output_size=6),
    ),
    "histogramdd": (
        lambda: (torch.rand(9, 2), torch.tensor([0.0, 0.3, 1.0]), torch.tensor([0.0, 0.5, 1.0])),
        lambda _, x, *bins: torch.histogramdd(x, bins),
    ),
    "segment_reduce": (
        lambda: (torch.rand(6), ints(1, 2, 3)),
        lambda _, x, lengths: torch.segment_reduce(x, "sum", lengths=lengths),
    ),
    "ctc_loss": (
        lambda: (torch.rand(10, 2, 5), ints(1, 2, 3, 1, 2), ints(10, 9), ints(3, 2)),
        ctc,
    ),
    "embedding_bag": (lambda: (ints(1, 2, 0, 3), torch.rand(5, 3), ints(0, 2)), bags),
    "one_hot": (lambda: (ints(1, 2, 0),), lambda _, x: F.one_hot(x)),
    "bincount": (
        lambda: (ints(1, 2, 0, 2), torch.rand(4)),
        lambda _, x, weights: torch.bincount(x, weights),
    ),
    "quantile": (
        lambda: (torch.rand(9), torch.tensor([0.1, 0.5])),
        lambda _, x, q: torch.quantile(x, q),
    ),
    "slice": (
        lambda: (torch.arange(9.0), torch.tensor(2), torch.tensor(5)),
        lambda _, x, start, end: x[start:end],
    ),
    "sizes": (
        lambda: (torch.tensor(2), torch.tensor(3)),
        lambda _, rows, columns: torch.zeros(rows, columns),
    ),
    "tensor of integers": (
        lambda: (torch.tensor(2), torch.tensor(3)),
        lambda _, *items: torch.tensor(items),
    ),
    "tensor of floats": (
        lambda: (torch.tensor(2.5), torch.tensor(3.0)),
        lambda _, *items: torch.tensor([items]),
    ),
    "tensor of booleans": (
        lambda: (torch.tensor(True), torch.tensor(False)),
        lambda _, *items: torch.tensor(items),
    ),
    "tensor of complex": (
        lambda: (torch.tensor(2.5j), torch.tensor(1.0)),
        lambda _, *items: torch.tensor(items),
    ),
    "Sobol sequence": (tuple, lambda run: sobol(run)),
    "reshape from a tensor": (
        lambda: (torch.arange(6.0), ints(2, 3)),
        lambda _, x, shape: torch._reshape_from_tensor(x, shape),
    ),
    "row-wise pruning": (
        lambda: (torch.rand(3, 2), torch.tensor([True, False, True])),
        lambda _, x, mask: torch._rowwise_prune(x, mask, torch.int64),
    ),
    "quantization parameters": (
        lambda: (torch.rand(6),),
        lambda _, x: torch.choose_qparams_optimized(x, 6, 100, 0.16, 8),
    ),
    "saturation": (
        lambda: (torch.rand(2, 3) * 1e6,),
        lambda _, x: (torch._saturate_weight_to_fp16(x), x),
    ),
    "int8 linear": (lambda: (torch.rand(2, 4), torch.rand(3, 4), torch.rand(3)), int8_linear),
    "half linear": (lambda: (torch.rand(2, 4), torch.rand(3, 4), torch.rand(3)), half_linear),
    "quantization per channel": (
        lambda: (torch.rand(4, 2), torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.int64)),
        lambda _, x, *scales: torch.quantize_per_channel(x, *scales, 0, torch.qint8).dequantize(),
    ),
    "nested tensor": (
        lambda: (torch.rand(3, 2), torch.rand(1, 2)),
        lambda _, *parts: torch.nested.as_nested_tensor(list(parts)).to_padded_tensor(0.0),
    ),
    "nested view": (
        lambda: (
            torch.rand(8),
            ints(3, 2, 1, 2).view(2, 2),
            ints(2, 1, 2, 1).view(2, 2),
            ints(0, 6),
        ),
        lambda _, *parts: torch._nested_view_from_buffer(*parts).unbind(),
    ),
    "nested encoder": (tuple, lambda run: padded_encoder(run)),
}


def outcome(name: str, run: Run, *, each: bool = False) -> Any:
    make, call = CASES[name]
    torch.manual_seed(0)
    operands = make()
    run.evict()
    with run.evicting_each() if each else contextlib.nullcontext():
        out = call(run, *operands)
    run.evict()
    return frozen(pytree.tree_leaves((out, operands)), version=False)


@pytest.mark.filterwarnings(
    "ignore:FOUND weight out of range",
    "ignore:fbgemm",
    "ignore:The PyTorch API of nested",
    "ignore:torch.quantize_per_tensor",
)
@pytest.mark.parametrize("each", [False, True], ids=["before", "each"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_read_by_pointer_is_in_place(name: str, each: bool, tmp_path: Path) -> None:
    expected = outcome(name, Run(None))
    with small_pager(tmp_path, device="1MiB", host="1MiB") as pager:
        got = outcome(name, Run(pager), each=each)
        pager.check_invariants()
        assert pager.stats().num_evictions > 0
    assert_equal(expected, got)


@pytest.mark.parametrize("name", ["tensor_split", "pad_packed_sequence", "Sobol sequence"])
def test_inference_mode_gives_the_same(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        expected = outcome(name, Run(None))
        with small_pager(tmp_path, device="1MiB", host="1MiB") as pager:
            assert_equal(expected, outcome(name, Run(pager)))


def test_a_read_operand_is_not_written_back_again(pager: Any) -> None:
    x, at = torch.arange(6.0), ints(2, 4)
    pager.evict_all()
    num_write_backs = pager.stats().num_write_backs
    torch.tensor_split(x, at)
    pager.evict_all()
    assert pager.residency(at).name == "HOST"
    assert pager.stats().num_write_backs == num_write_backs


def test_torchs_own_kernels_are_back_after_the_last_pager(tmp_path: Path) -> None:
    def is_covered() -> bool:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return has_kernel("aten::lstm.data", "AutogradCPU")

    assert not is_covered()
    x = torch.arange(6.0, requires_grad=True)
    with contextlib.closing(small_pager(tmp_path)), small_pager(tmp_path):
        assert is_covered()
        plain = torch.tensor_split(x.detach().requires_grad_(), ints(2))
    assert not is_covered()
    first, _ = torch.tensor_split(x, torch.tensor([2]))
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert plain[0].tolist() == [0.0, 1.0]
