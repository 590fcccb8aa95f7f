"""transformers makes the masks that it would make of tensors with values.

With fake tensors it cannot read whether the positions of a batch are those of packed sequences, so
it takes them for that and masks explicitly, layer by layer: 0.5 GB more of 49 for a Llama 3.5B.
What one has in a loop are sequences that are not packed, and no mask is made.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["eager_masks"]

_MODULE = "transformers.masking_utils"


@contextlib.contextmanager
def eager_masks() -> Iterator[None]:
    """Takes all sequences for unpacked while it is entered.

    Does nothing where transformers is not loaded, or is of a version that does not ask.
    """
    module: Any = sys.modules.get(_MODULE)
    find = getattr(module, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return

    @functools.wraps(find)
    def find_none(*args: Any, **kwargs: Any) -> None:
        find(*args, **kwargs)  # for its operations

    module.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        module.find_packed_sequence_indices = find
