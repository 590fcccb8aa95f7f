"""How many bytes a plain run needs: the oracle that says a budget is a tight one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.parity.harness import BUILD_SEED, STEP_SEED

if TYPE_CHECKING:
    from tests.parity.programs import Program

GRAIN_BYTES = 512  # what one small tensor takes on a device


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES


@dataclass
class Footprint(TorchDispatchMode):
    """Follows storages from the operation that makes them until nothing refers to them."""

    live_bytes: int = 0
    peak_bytes: int = 0
    largest_operation_bytes: int = 0  # lists, which a pager splits, left out
    largest_operation: str = ""
    num_operations: int = 0
    seen: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def _forget(self, key: int, num_bytes: int) -> None:
        del self.seen[key]
        self.live_bytes -= num_bytes

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), rounded(storage.nbytes())
        if key not in self.seen:
            self.seen[key] = weakref.ref(storage, lambda _: self._forget(key, num_bytes))
            self.live_bytes += num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = {}
        for leaf in tree_iter((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                storages[id(storage)] = storage
        for storage in storages.values():
            self._see(storage)
        self.num_operations += 1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        named_bytes = sum(rounded(storage.nbytes()) for storage in storages.values())
        is_list = func.name().startswith(("aten::_foreach", "aten::_fused", "aten::_amp_foreach"))
        if named_bytes > self.largest_operation_bytes and not is_list:
            self.largest_operation_bytes, self.largest_operation = named_bytes, func.name()
        return out


def measure(program: Program) -> Footprint:
    """Runs a program in plain torch, the model's construction included."""
    torch.manual_seed(BUILD_SEED)
    with Footprint() as footprint:
        model, optimizer = program.build()
        torch.manual_seed(STEP_SEED)
        program.start(model, optimizer)
        for step_index in range(program.num_steps):
            program.step(model, optimizer, step_index)
    return footprint
