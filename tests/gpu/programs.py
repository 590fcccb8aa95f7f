"""Programs of a few hundred MiB, beside which the workspaces of cuBLAS are small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.programs import MLP, Program
from tests.parity.programs_text import hugging_face
from tests.parity.programs_training import Scaled
from tvm_pager.runtime.storage import storage_of

WIDTH, DEPTH = 1024, 16  # weights of 4 MiB, 64 MiB of them


@dataclass(eq=False)
class Trained(MLP):
    """The MLP under any optimizer; `make` takes the parameters."""

    num_steps: int = 2
    width: int = WIDTH
    depth: int = DEPTH
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make(model.parameters())


@dataclass(eq=False)
class HalfPrecision(Scaled):
    """fp16 autocast under a GradScaler; the second step overflows and must be skipped."""

    num_steps: int = 3
    width: int = WIDTH
    depth: int = DEPTH

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        with torch.autocast("cuda", torch.float16):
            return F.cross_entropy(model(x).float(), target)


@dataclass(eq=False)
class Convolutions(Program):
    """channels_last, BatchNorm: most of the memory is activations."""

    num_blocks: int = 8
    channels: int = 64
    batch: int = 32

    def build_model(self) -> nn.Module:
        blocks = [
            nn.Sequential(
                nn.Conv2d(self.channels, self.channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(self.channels),
                nn.ReLU(),
            )
            for _ in range(self.num_blocks)
        ]
        first = nn.Conv2d(3, self.channels, 3, padding=1)
        model = nn.Sequential(first, *blocks, nn.Conv2d(self.channels, 10, 1))
        return model.to(memory_format=torch.channels_last)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x = torch.randn(self.batch, 3, 32, 32).to(memory_format=torch.channels_last)
        logits = model(x).mean((2, 3))
        return F.cross_entropy(logits, torch.randint(0, 10, (self.batch,)))


class Recurrences(nn.Module):
    """LSTMs one after the other, because each is one kernel that names all of its weights."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.rnns = nn.ModuleList([nn.LSTM(width, width) for _ in range(num_layers)])
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for rnn in self.rnns:
            x = x + rnn(x)[0]
        return self.head(x)


@dataclass(eq=False)
class CudnnLSTM(Program):
    """cuDNN flattens an LSTM's weights into one storage, so they are one page. No dropout: its
    state is the process's, and no two runs of plain torch draw the same."""

    num_steps: int = 2
    width: int = 1024
    num_layers: int = 5

    def build_model(self) -> nn.Module:
        return Recurrences(self.width, self.num_layers)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        tokens = torch.randint(0, 256, (8, 4))
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        # Below `untyped_storage()`, which would keep the pages on the device from here on.
        storages = [{storage_of(p)._cdata for p in rnn.parameters()} for rnn in model.rnns]
        return loss, [len(shared) for shared in storages]


@dataclass(eq=False)
class Llama(Program):
    """A Hugging Face Llama of 27 M parameters.

    `dtype` is that of the parameters; with `autocast` they are fp32 and the work is bf16.
    """

    num_steps: int = 2
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    checkpointed: bool = False
    num_layers: int = 8
    vocabulary: int = 4096
    batch: int = 2
    seq: int = 128

    def build_model(self) -> nn.Module:
        transformers = hugging_face()
        config = transformers.LlamaConfig(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=self.num_layers,
            num_attention_heads=8, num_key_value_heads=4, vocab_size=self.vocabulary,
            max_position_embeddings=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0,
            attn_implementation="sdpa",
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to(self.dtype)
        if self.checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None)  # its newer name
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        tokens = torch.randint(2, self.vocabulary, (self.batch, self.seq))
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@dataclass(eq=False)
class Generation(Llama):
    """Greedy, then sampled decoding with a KV cache that outweighs a layer."""

    num_layers: int = 12
    batch: int = 8
    seq: int = 512

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters())

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        model.eval()
        prompt = torch.randint(2, self.vocabulary, (self.batch, self.seq))
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=step_index == 1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return {"tokens": made.sequences, "scores": made.scores, "list": made.sequences.tolist()}


@functools.cache
def stream(name: str) -> torch.cuda.Stream:
    """The same stream in each run: another one would bring a cuBLAS workspace of its own."""
    return torch.cuda.Stream()


def on_recompute_stream(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    outer, inner = torch.cuda.current_stream(), stream("recompute")
    inner.wait_stream(outer)
    with torch.cuda.stream(inner):
        x.record_stream(inner)
        y = block(x)
    outer.wait_stream(inner)
    y.record_stream(outer)
    return y


@dataclass(eq=False)
class Streams(MLP):
    """Forward, backward and recomputation on streams of their own, waiting as a user must."""

    width: int = WIDTH
    depth: int = DEPTH

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x, target = self.batch()
        x = model[0](x)
        for block in model[1:-1]:
            x = checkpoint(on_recompute_stream, block, x, use_reentrant=False)
        return F.cross_entropy(model[-1](x), target)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        outer, forward, backward = torch.cuda.current_stream(), stream("fwd"), stream("bwd")
        optimizer.zero_grad()
        forward.wait_stream(outer)
        with torch.cuda.stream(forward):
            loss = self.loss(model, step_index)
        backward.wait_stream(forward)
        with torch.cuda.stream(backward):
            loss.backward()
            optimizer.step()
        loss = loss.detach()
        loss.record_stream(outer)
        outer.wait_stream(backward)
        return loss
