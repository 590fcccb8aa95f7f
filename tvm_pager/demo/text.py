"""Real text that every machine has: sources of Python's standard library, the same each time.

Imports the standard library only.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_pager.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PROMPT", "build_batches", "encode_bytes", "read_sources"]

PROMPT = "The capital of France is"

# Long, prose-rich modules that have been there for as long as Python 3.11, in the order of use.
_MODULES = (
    "argparse.py",
    "difflib.py",
    "statistics.py",
    "tarfile.py",
    "random.py",
    "heapq.py",
    "textwrap.py",
    "fractions.py",
)


def read_sources() -> list[str]:
    """Reads the chosen sources.

    Raises:
        ConfigError: this Python comes without the sources of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [
        path.read_text(encoding="utf-8")
        for path in (folder / name for name in _MODULES)
        if path.is_file()
    ]
    if not texts:
        raise ConfigError(
            f"the demo trains on the sources of Python's library, and {folder} holds none of "
            f"{', '.join(_MODULES)}: use a Python that was installed with them"
        )
    return texts


def encode_bytes(text: str) -> list[int]:
    """Stands in for a tokenizer: one token per UTF-8 byte."""
    return list(text.encode("utf-8"))


def build_batches(
    encode: Callable[[str], list[int]],
    *,
    num_steps: int,
    batch: int,
    seq: int,
    seed: int,
) -> list[list[list[int]]]:
    """Cuts the sources into token ids, shape (num_steps, batch, seq), the same for the same seed.

    Each sequence starts at another place of another source; a source that is too short goes on with
    the next one.
    """
    # What is encoded at once is bounded: tokenizers get slow on whole modules, and a token stands
    # for one character at least.
    texts = read_sources()
    sequences: list[list[int]] = []
    for index in range(num_steps * batch):
        text = texts[(seed + index) % len(texts)]
        start = (seed + index) // len(texts) * 4 * seq % max(1, len(text) - 4 * seq)
        ids = encode(text[start : start + 8 * seq])[:seq]
        while len(ids) < seq:
            ids += encode("\n".join(texts)[: 8 * seq])[: seq - len(ids)]
        sequences.append(ids)
    return [sequences[step * batch : (step + 1) * batch] for step in range(num_steps)]
