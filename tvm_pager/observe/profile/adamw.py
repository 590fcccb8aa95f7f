"""One fused AdamW update of torch's, everything in fp32, on the host or on a device."""

from __future__ import annotations

import torch

__all__ = ["BYTES_PER_PARAM", "AdamW"]

BYTES_PER_PARAM = 16  # parameter, gradient and two moments


class AdamW:
    """The tensors of one update, and the call that `torch.optim.AdamW(fused=True)` ends in.

    Args:
        num_params: parameters, in one tensor.
        device: where everything lies.
    """

    def __init__(self, num_params: int, device: torch.device) -> None:
        # Neither zeros nor tiny numbers: those take other paths in some units.
        self._parameters, self._gradients, self._first, self._second = (
            [torch.full((num_params,), value, dtype=torch.float32, device=device)]
            for value in (1.0, 0.1, 0.1, 0.01)
        )
        self._steps = [torch.ones((), dtype=torch.float32, device=device)]

    def step(self) -> None:
        """Updates all parameters; on a GPU it only launches the kernel."""
        torch._fused_adamw_(
            self._parameters,
            self._gradients,
            self._first,
            self._second,
            [],
            self._steps,
            lr=1e-6,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
