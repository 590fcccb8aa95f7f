"""Measures training steps of a Llama: what paging costs when everything fits, and when it does not.

    python tools/bench_llama.py --model 3.5b                              # plain against dispatched
    python tools/bench_llama.py --model 3.5b --budgets 36GB,20GB,14GB --host 60GiB
    python tools/bench_llama.py --model tiny --torch-device cpu --budgets 12MB --host 16MiB

Without a budget two copies of the model train in turns, blocks of steps of plain torch and blocks
with all tensors paged and resident, so that clocks and neighbours hit both alike; the ratio is
given per pair of blocks. Each budget then gets a model of its own. The optimizer is AdamW with
foreach=False everywhere: the loop over single tensors is what torch takes for paged parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import tvm_pager
from tvm_pager.units import format_bytes, parse_bytes

__all__ = ["MODELS", "building", "fix_kernels", "main", "make_llama", "synchronise"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

# Layers chosen for the size in the name: 940 M and 3,500 M parameters, embeddings untied. What is
# "thin" has the operations of the last, on next to no bytes.
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "vocab_size": 500},
    "thin": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 16}
    | {"num_attention_heads": 4, "vocab_size": 128},
    "0.95b": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16}
    | {"num_attention_heads": 16, "vocab_size": 32000},
    "3.5b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "vocab_size": 32000},
}
_MAX_HOST_BYTES = 100 * 2**30


@contextlib.contextmanager
def building(torch_device: str, dtype: torch.dtype) -> Iterator[None]:
    """What is made inside lies on the device, has that dtype, and the same weights each time."""
    torch.manual_seed(0)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(torch_device):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def make_llama(name: str, sequence: int) -> torch.nn.Module:
    """One of `MODELS`, for sequences up to that length, 4096 at least."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = MODELS[name]
    config = LlamaConfig(
        **shape,
        num_key_value_heads=shape["num_attention_heads"],
        max_position_embeddings=max(4096, sequence),
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model


def fix_kernels() -> None:
    """So that equal bits mean something: the same kernels, and none that adds in any order."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


class Trainer:
    """One model, its optimizer and its batch; `step()` is a user's training step."""

    def __init__(self, args: argparse.Namespace) -> None:
        with building(args.torch_device, getattr(torch, args.dtype)):
            self.model = make_llama(args.model, args.seq)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        generator = torch.Generator().manual_seed(1)
        vocabulary = MODELS[args.model]["vocab_size"]
        ids = torch.randint(0, vocabulary, (args.batch, args.seq), generator=generator)
        self.ids = ids.to(args.torch_device)
        self.losses: list[torch.Tensor] = []

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())  # read later: reading waits for the device


def time_block(trainer: Trainer, num_steps: int) -> float:
    """Gives the seconds per step of one block, finished work only."""
    synchronise()
    started_s = time.perf_counter()
    for _ in range(num_steps):
        trainer.step()
    synchronise()
    return (time.perf_counter() - started_s) / num_steps


def compare_resident(args: argparse.Namespace) -> dict[str, Any]:
    """Times plain against paged-and-resident, in turns."""
    plain = Trainer(args)
    for _ in range(args.warmup):
        plain.step()
    dispatched = Trainer(args)
    pager = tvm_pager.page(
        dispatched.model, dispatched.optimizer, torch_device=args.torch_device, host="1GiB"
    )
    times: dict[str, list[float]] = {"plain": [], "dispatched": []}
    try:
        for _ in range(args.warmup):
            dispatched.step()
        for _ in range(args.blocks):
            times["plain"].append(time_block(plain, args.steps))
            times["dispatched"].append(time_block(dispatched, args.steps))
        stats = pager.stats().to_dict()
        losses = [[float(loss) for loss in t.losses] for t in (plain, dispatched)]
    finally:
        pager.close()
    ratios = [d / p for d, p in zip(times["dispatched"], times["plain"], strict=True)]
    return {
        "num_parameters": plain.num_parameters,
        "block_s": times,
        "plain_s": statistics.median(times["plain"]),
        "dispatched_s": statistics.median(times["dispatched"]),
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "operations_per_step": stats["num_operations"] / (args.warmup + args.blocks * args.steps),
        "losses_equal": losses[0] == losses[1],
        "last_losses": [losses[0][-1], losses[1][-1]],
        "evictions": stats["num_evictions"],  # 0, or it did not fit after all
    }


def measure_budget(args: argparse.Namespace, budget: str) -> dict[str, Any]:
    """Times steps under one device budget, and counts the bytes that each of them moves."""
    options: dict[str, Any] = {"device": budget, "host": args.host, "policy": args.policy}
    if args.segment_bytes:
        options["segment_bytes"] = args.segment_bytes
    _reset_peaks()
    with tvm_pager.Pager(torch_device=args.torch_device, **options) as pager:
        if args.synchronous:
            _wait_for_every_copy(pager._backend)
        started_s = time.perf_counter()
        trainer = Trainer(args)
        for _ in range(args.warmup):
            trainer.step()
        synchronise()
        ready_s = time.perf_counter() - started_s
        before = pager.stats().to_dict()
        times = [time_block(trainer, 1) for _ in range(args.budget_steps)]
        after = pager.stats().to_dict()
        losses = [float(loss) for loss in trainer.losses]
        del trainer
    gc.collect()
    moved = {
        lane: (nbytes - before["bytes_by_lane"].get(lane, 0)) / args.budget_steps
        for lane, nbytes in after["bytes_by_lane"].items()
    }
    result = {
        "budget": budget,
        "budget_bytes": parse_bytes(budget),
        "step_s": times,
        "median_s": statistics.median(times),
        "bytes_per_step": moved,
        "stall_s_per_step": (after["stall_s"] - before["stall_s"]) / args.budget_steps,
        "faults_per_step": (after["num_faults"] - before["num_faults"]) / args.budget_steps,
        "device_peak_bytes": after["device_peak_bytes"],
        "host_peak_bytes": after["host_peak_bytes"],
        "nvme_peak_bytes": after["nvme_peak_bytes"],
        "ready_s": ready_s,
        "losses": losses,
        "notices": after["notices"],
    }
    if torch.cuda.is_available():
        result["max_memory_allocated"] = torch.cuda.max_memory_allocated()
        result["max_memory_reserved"] = torch.cuda.max_memory_reserved()
    return result


def _wait_for_every_copy(backend: Any) -> None:
    """What asynchronous movement is compared with: each transfer blocks where it is submitted."""
    submit = backend.submit

    def submit_and_wait(*args: Any) -> Any:
        ticket = submit(*args)
        while not ticket.done():
            ticket.wait()
        return ticket

    backend.submit = submit_and_wait


def synchronise() -> None:
    """Waits for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peaks() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures part by part and returns 0 if none failed."""
    args = _parse(argv)
    fix_kernels()
    document: dict[str, Any] = {
        "model": args.model,
        "batch": args.batch,
        "seq": args.seq,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "torch_device": args.torch_device,
        "device_name": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "budgets": [],
        "failures": [],
    }
    print(
        f"{args.model}: batch {args.batch} x {args.seq}, {args.dtype}, {document['device_name']}, "
        f"torch {torch.__version__}",
        flush=True,
    )
    parts: list[tuple[str, Callable[[], None]]] = []
    if not args.no_resident:
        parts.append(("resident", functools.partial(_resident, args, document)))
    parts += [
        (budget, functools.partial(_budget, args, budget, document))
        for budget in filter(None, args.budgets.split(","))
    ]
    for name, part in parts:
        _reset_peaks()
        try:
            part()
        except (RuntimeError, MemoryError) as error:  # the other parts still tell something
            text = f"{name}: {type(error).__name__}: {error}"
            document["failures"].append(text)
            print(text, flush=True)
        if args.json:  # after each part, so that a time limit costs one part only
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if document["failures"] else 0


def _resident(args: argparse.Namespace, document: dict[str, Any]) -> None:
    result = document["resident"] = compare_resident(args)
    print(
        f"{result['num_parameters'] / 1e6:,.1f} M parameters; no budget: plain "
        f"{result['plain_s']:.4f} s, dispatched {result['dispatched_s']:.4f} s, ratio "
        f"{result['ratio']:.3f} ({result['ratio_least']:.3f} to {result['ratio_most']:.3f} in "
        f"{args.blocks} pairs of blocks of {args.steps} steps), "
        f"{result['operations_per_step']:,.0f} operations a step, losses "
        f"{'equal' if result['losses_equal'] else 'differ'}",
        flush=True,
    )


def _budget(args: argparse.Namespace, budget: str, document: dict[str, Any]) -> None:
    result = measure_budget(args, budget)
    document["budgets"].append(result)
    moved = ", ".join(
        f"{lane} {nbytes / 1e9:.2f} GB"
        for lane, nbytes in result["bytes_per_step"].items()
        if nbytes
    )
    print(
        f"{budget}, {args.policy}: {result['median_s']:.4f} s ({min(result['step_s']):.4f} to "
        f"{max(result['step_s']):.4f} in {args.budget_steps} steps), a step moves "
        f"{moved or 'nothing'}; stalled {result['stall_s_per_step']:.3f} s; device peak "
        f"{format_bytes(result['device_peak_bytes'])}",
        flush=True,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--model", choices=MODELS, default="3.5b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--torch-device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--warmup", type=int, default=3, help="steps before anything is timed")
    parser.add_argument("--steps", type=int, default=4, help="per block")
    parser.add_argument("--blocks", type=int, default=6, help="pairs of blocks")
    parser.add_argument("--no-resident", action="store_true", help="budgets only")
    parser.add_argument("--budgets", default="", help="device budgets, separated by commas")
    parser.add_argument("--budget-steps", type=int, default=5, help="timed steps per budget")
    parser.add_argument("--host", default="60GiB", help="page-locked memory for the budgets")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--segment-bytes", default="")
    parser.add_argument("--synchronous", action="store_true", help="wait for each copy at once")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    args = parser.parse_args(argv)
    if parse_bytes(args.host) > _MAX_HOST_BYTES:
        parser.error(f"--host {args.host}: {format_bytes(_MAX_HOST_BYTES)} at most")
    for budget in filter(None, args.budgets.split(",")):
        parse_bytes(budget)  # a typing error must not cost the minutes before it
    if not math.prod((args.batch, args.seq, args.steps, args.blocks, args.budget_steps)) > 0:
        parser.error("batch, seq, steps, blocks and budget-steps must be positive")
    return args


if __name__ == "__main__":
    sys.exit(main())
