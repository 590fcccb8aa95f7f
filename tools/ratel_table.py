"""Compares the iteration-time model with the step times that Ratel published.

    python tools/ratel_table.py

Given, all from the paper, its artifact or data sheets: GPT of 13.0e9 parameters (40 layers of width
5120), sequence 1024, one RTX 4090, 1 to 12 striped Intel D7-P5510 drives of 7.0 GB/s read and 4.3
GB/s write each (data sheet of that family); 18 and 20 GB/s over the link and groups of 700 M
parameters, both as in the artifact; 3.6e9 parameters/s of Adam on the host, measured by others on
another processor; 2 bytes per weight and gradient and 12 of states per parameter, all on the
drives; host memory for whatever is swapped. Published TFLOPS are turned into seconds with 6
floating point operations per parameter and token.

Fitted: one number, the device's rate, on the two cells with 12 drives.

What can be swapped, in units of one block input (2 bytes x tokens x width): the input itself
always, then by falling benefit the outputs of MLP-down (1 unit), attention-out (1), QKV (3) and
MLP-up (4).

The cell that fits worst (batch 32, 6 drives, about -15 %) is where disk and device are equally
busy: a maximum says that they overlap fully, which real ones do not. Without the ends of the
pipeline the model says -16 % there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

from tvm_pager.planning.cost.iteration_model import (
    IterationRates,
    IterationWork,
    SwapCandidate,
    SwapChoice,
    choose_swaps,
)

__all__ = ["PUBLISHED_TFLOPS", "Cell", "cells", "fit_device_rate", "main"]

NUM_PARAMS = 13.0e9
NUM_LAYERS = 40
WIDTH = 5120
SEQUENCE = 1024
DRIVE_READ, DRIVE_WRITE = 7.0e9, 4.3e9
LINK_OUT, LINK_IN = 18e9, 20e9
GROUP_PARAMS = 700e6
ADAM_PARAMS_PER_S = 3.6e9
LINEARS = ((1, 8), (1, 2), (3, 6), (4, 8))  # units of bytes, 24ths of the forward work

PUBLISHED_TFLOPS = {  # by batch, then by number of drives
    32: {1: 37.5, 2: 64.3, 3: 81.1, 6: 121.7, 12: 142.0},
    64: {1: 70.3, 2: 111.7, 3: 136.3, 6: 151.5, 12: 148.2},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table; times in seconds."""

    batch: int
    num_drives: int
    published_s: float
    predicted_s: float
    choice: SwapChoice

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted_s / self.published_s - 1


def published_s(batch: int, num_drives: int) -> float:
    """The published step time."""
    flop = 6 * NUM_PARAMS * batch * SEQUENCE
    return flop / (PUBLISHED_TFLOPS[batch][num_drives] * 1e12)


def predict(batch: int, num_drives: int, device_flop_per_s: float) -> SwapChoice:
    """What the model chooses and says for one cell."""
    forward_s = 2 * NUM_PARAMS * batch * SEQUENCE / device_flop_per_s
    layer_unit = 2 * batch * SEQUENCE * WIDTH
    candidates = [
        SwapCandidate(
            kind * NUM_LAYERS + layer, units * layer_unit, forward_s * share / 24 / NUM_LAYERS
        )
        for kind, (units, share) in enumerate(LINEARS)
        for layer in range(NUM_LAYERS)
    ]
    work = IterationWork(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        update_s=NUM_PARAMS / ADAM_PARAMS_PER_S,
        weight_bytes=int(2 * NUM_PARAMS),
        grad_bytes=int(2 * NUM_PARAMS),
        disk_weight_bytes=int(2 * NUM_PARAMS),
        disk_state_bytes=int(12 * NUM_PARAMS),
        kept_swap_bytes=layer_unit * NUM_LAYERS,
        num_groups=NUM_PARAMS / GROUP_PARAMS,
    )
    rates = IterationRates(LINK_OUT, LINK_IN, num_drives * DRIVE_READ, num_drives * DRIVE_WRITE)
    return choose_swaps(work, rates, candidates)


def fit_device_rate() -> float:
    """The device's floating point operations/s that fit the two cells with 12 drives best."""

    def misfit(rate: float) -> float:
        return sum(
            math.log(predict(batch, 12, rate).time.seconds / published_s(batch, 12)) ** 2
            for batch in PUBLISHED_TFLOPS
        )

    return min((tenths * 1e11 for tenths in range(1300, 1900)), key=misfit)


def cells(device_flop_per_s: float) -> Iterator[Cell]:
    """All cells, by batch and number of drives."""
    for batch, row in PUBLISHED_TFLOPS.items():
        for num_drives in row:
            choice = predict(batch, num_drives, device_flop_per_s)
            yield Cell(
                batch, num_drives, published_s(batch, num_drives), choice.time.seconds, choice
            )


def main() -> int:
    """Prints the table and returns 0."""
    rate = fit_device_rate()
    print(f"fitted on the cells with 12 drives: {rate / 1e12:.1f} TFLOPS")
    print("batch drives published predicted  error  swapped  limited by (forward, backward)")
    for cell in cells(rate):
        limits = ", ".join(cell.choice.time.busiest)
        print(
            f"{cell.batch:5d} {cell.num_drives:6d} {cell.published_s:7.1f} s "
            f"{cell.predicted_s:7.1f} s {cell.error:+6.1%} "
            f"{cell.choice.swap_bytes / 1e9:5.0f} GB  {limits}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
