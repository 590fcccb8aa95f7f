"""How long an operation takes on a device that is not here: a roofline over a hardware profile.

[Note: Roofline]
    An operation takes the longer of its arithmetic at the rate of its dtype and of its bytes at the
    device's copy rate, and at least what the shortest kernel takes. Bytes are those of the tensors
    it reads and writes, not of their pages. Where no kernel runs (a view) it takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from tvm_pager.errors import ConfigError
from tvm_pager.runtime.storage import storage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.planning import HardwareProfile
    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["DEFAULT_EFFICIENCY", "OpTimes"]

_aten = torch.ops.aten

# What runs on a CPU in the place of a device's kernel -> the operator whose arithmetic it does.
_COUNTERPARTS: Final = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
# Read as many bytes of their first operand as they give, whatever its size.
_GATHERS: Final = frozenset({_aten.embedding, _aten.gather, _aten.index, _aten.index_select}) | {
    _aten.nll_loss_forward
}
_OVERWRITES: Final = frozenset(
    {_aten.copy_, _aten.fill_, _aten.zero_}
)  # do not read what they write
_MIN_KERNEL_NS: Final = 2000  # an empty kernel, back to back with others

# Llama 3.5B on an H200: 0.37 s modelled at 1.0, 0.36 s of kernels measured.
DEFAULT_EFFICIENCY: Final = 1.0


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Models device times; see [Note: Roofline].

    Attributes:
        profile: of the device.
        efficiency: what share of the measured rates operations of a real model reach, in (0, 1].
            The profile's rates are those of large square matrices and of large copies.

    Raises:
        ConfigError: no such efficiency.
    """

    profile: HardwareProfile
    efficiency: float = DEFAULT_EFFICIENCY

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"efficiency={self.efficiency} must be above 0 and at most 1")

    def nanoseconds(
        self,
        plan: OperatorPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        operands: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> int:
        """Device time of one call that runs a kernel.

        Args:
            plan: of the operator.
            args: of the call.
            kwargs: of the call.
            out: its result.
            operands: tensors among the arguments.
            written: those of them that it writes.
        """
        packet = plan.operator.overloadpacket
        results = () if written else _tensors_of(out)
        given_bytes = sum(map(_bytes_of, results))
        read_bytes = [_bytes_of(value) for value in operands]
        if packet in _GATHERS:
            read_bytes[0] = min(read_bytes[0], given_bytes)
        elif packet in _OVERWRITES:
            read_bytes[0] = 0
        moved_bytes = sum(read_bytes) + sum(map(_bytes_of, written)) + given_bytes
        # The profile counts the bytes of a copy once; the device reads and writes each.
        seconds = moved_bytes / (2 * self.profile.device.copy_bytes_per_s.median)
        formula = flop_registry.get(_COUNTERPARTS.get(packet, packet))
        if formula is not None:
            flop = formula(*args, **kwargs, out_val=out)
            seconds = max(seconds, flop / self._flop_per_s(operands[0].dtype))
        return max(round(seconds / self.efficiency * 1e9), _MIN_KERNEL_NS)

    def _flop_per_s(self, dtype: torch.dtype) -> float:
        rates = self.profile.device.matmul_flop_per_s
        if dtype is torch.bfloat16:
            return rates.bf16.median
        return rates.fp16.median if dtype is torch.float16 else rates.fp32.median


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that an operation on the tensor moves; broadcast ones count once."""
    return min(tensor.numel() * tensor.element_size(), storage_of(tensor).nbytes())


def _tensors_of(out: Any) -> Sequence[torch.Tensor]:
    items = out if isinstance(out, (tuple, list)) else (out,)
    return [item for item in items if isinstance(item, torch.Tensor)]
