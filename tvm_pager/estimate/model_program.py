"""A language model by its configuration, as a program that `trace` can run without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from tvm_pager.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

__all__ = ["OPTIMIZERS", "ModelProgram", "read_config"]

# The loop over single tensors is what torch takes for paged parameters.
OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
}


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """Training steps, or calls for inference, of a causal language model of transformers.

    Attributes:
        config: as in the model's `config.json`.
        batch: sequences.
        seq: tokens of each.
        dtype: of weights, gradients and optimizer states, as torch calls it.
        optimizer: one of `OPTIMIZERS`, or None for inference.
        is_checkpointed: whether backward computes each layer's activations again.

    Raises:
        ConfigError: it cannot be run so.
    """

    config: Mapping[str, Any]
    batch: int
    seq: int
    dtype: str = "bfloat16"
    optimizer: str | None = "adamw"
    is_checkpointed: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.seq < 1:
            raise ConfigError(f"batch={self.batch} and seq={self.seq} must be at least 1")
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype={self.dtype!r}: give one such as bfloat16 or float32")
        most = self.config.get("max_position_embeddings", self.seq)
        if not isinstance(most, int) or self.seq > most:
            raise ConfigError(
                f"seq={self.seq}, but the configuration has max_position_embeddings={most}; "
                "shorten the sequence or change the configuration"
            )

    def build(self) -> Callable[[], object]:
        """Makes the model and returns its step; under a fake mode without a byte of weights.

        Raises:
            ConfigError: transformers is missing or does not know the model.
        """
        model = self._model()
        ids = torch.randint(0, model.config.vocab_size, (self.batch, self.seq))
        if self.optimizer is None:
            model.eval()

            @torch.no_grad()
            def call() -> object:
                return model(input_ids=ids, use_cache=False).logits

            return call
        model.train()
        if self.is_checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)()  # the older name of it
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _model(self) -> Any:
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise ConfigError(
                f"models are built by transformers, which cannot be imported ({error}): "
                "pip install 'transformers>=5'"
            ) from error
        options = dict(self.config)
        model_type = options.pop("model_type", None)
        try:
            config = AutoConfig.for_model(model_type, **options)
            make: Any = AutoModelForCausalLM.from_config
            return make(config, dtype=getattr(torch, self.dtype))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"transformers makes no causal language model of this configuration "
                f"(model_type={model_type!r}): {error}"
            ) from error


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a `config.json`.

    Raises:
        ConfigError: the file cannot be read or holds no JSON object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: one JSON object is needed, as in a config.json")
    return values
