"""What the launching threads do in a training step of a Llama whose pages are all resident.

    python tools/profile_dispatch.py --model 0.95b                  # both kernels, in turns
    python tools/profile_dispatch.py --model 0.95b --deterministic  # deterministic ones only

More options: bench_llama.py. Processor time is of all threads, and grows beside a busy neighbour;
host time by operator includes the launch, and 1 us of timing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it runs as a script

import tvm_pager
from tools import bench_llama
from tvm_pager.runtime import dispatch, execution, paged_tensor


def profile(trainer: bench_llama.Trainer, num_steps: int) -> list[Counter[str]]:
    """By operator: nanoseconds, all calls, those off the fast path, first of their signature."""
    ns, every, general, first = counters = [Counter[str]() for _ in range(4)]

    def timed(owner: Any, func: Any, *rest: Any) -> Any:
        started_ns = time.perf_counter_ns()
        out = dispatch.dispatch(owner, func, *rest)
        ns[str(func)] += time.perf_counter_ns() - started_ns
        every[str(func)] += 1
        return out

    def counted(counter: Counter[str], run: Any, func: Any, *rest: Any) -> Any:
        counter[str(getattr(func, "func", func))] += 1
        return run(func, *rest)

    hooks = (
        patch.object(paged_tensor.PagedTensor, "__torch_dispatch__", classmethod(timed)),
        patch.object(dispatch, "run_operator", partial(counted, general, dispatch.run_operator)),
        patch.object(execution, "_run_measured", partial(counted, first, execution._run_measured)),
    )
    with hooks[0], hooks[1], hooks[2]:
        bench_llama.time_block(trainer, num_steps)
    return counters


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Leaves torch with the last kind of kernels."""
    given = sys.argv[1:] if argv is None else argv
    args = bench_llama._parse([text for text in given if text != "--deterministic"])
    kinds = (True,) if "--deterministic" in given else (False, True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # as in bench_llama.py
    trainer, device = bench_llama.Trainer(args), args.torch_device
    pager = tvm_pager.page(trainer.model, trainer.optimizer, torch_device=device, host="1GiB")
    blocks: dict[bool, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for kind in kinds * (args.blocks + 1):
        torch.use_deterministic_algorithms(kind)
        cpu_s, wall_s = time.process_time(), bench_llama.time_block(trainer, args.steps)
        blocks[kind].append((wall_s, (time.process_time() - cpu_s) / args.steps))
    for kind in kinds:
        torch.use_deterministic_algorithms(kind)
        wall, cpu = zip(*blocks[kind][1:], strict=True)  # the first one warms up
        counters = profile(trainer, args.steps)
        ns, num, off, first = (counter.total() / args.steps for counter in counters)
        print(f"{'deterministic' if kind else 'any'} kernels, s a step: {median(wall):.4f}, least "
              f"{min(wall):.4f}; processor {median(cpu):.4f}, least {min(cpu):.4f}\n{num:,.0f} "
              f"operations in {ns / 1e6:.1f} ms: {num - off:,.0f} fast, {off - first:,.0f} "
              f"general, {first:,.0f} measured")  # fmt: skip
        for func, _ in counters[0].most_common(16):
            ns, num, off, first = (counter[func] / args.steps for counter in counters)
            print(f"{ns / 1e6:9.2f} ms, {num:5.0f} x {ns / num / 1e3:6.1f} us, {off - first:.0f} "
                  f"general, {first:.0f} measured: {func}")  # fmt: skip
    pager.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
