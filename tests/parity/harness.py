"""Runs one program in plain torch and again under a pager, and demands the same bits.

A program is an object with `build()`, `step(model, optimizer, step_index)` and a few optional
hooks (`programs.Program`). Everything that user code can see of a tensor is compared: bytes, shape,
dtype, stride, offset, device, layout, version, leaf and gradient facts. Whatever is read here is
read through torch's public calls, so reading is under test too.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

import tvm_pager
from tests.leaks import left_behind

if TYPE_CHECKING:
    from tests.parity.programs import Program

STAGING_BYTES = 256 << 10  # part of the host budget that no page can use
NVME_BYTES = 128 << 20
READ_BYTES = 1 << 20  # reading a tensor takes this much of the device beside it
BUILD_SEED, STEP_SEED = 1234, 5678
MODES = ("adopt", "adopt_model", "context", "call")


@dataclass(frozen=True)
class Snapshot:
    """One tensor as user code sees it, with its bytes copied out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    storage_offset: int
    device: str
    layout: torch.layout
    version: int
    requires_grad: bool
    is_leaf: bool
    is_parameter: bool
    grad_fn: str
    raw: bytes = field(repr=False)


@dataclass
class Result:
    """All that one run leaves behind; every map goes from a name to a `Snapshot` or a number."""

    outputs: dict[str, Any] = field(default_factory=dict)  # losses and whatever `step` returns
    weights: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # ties, key orders, random state, groups


def read_bytes(tensor: torch.Tensor) -> bytes:
    """Copies a strided tensor's elements out in row-major order."""
    with torch.no_grad():
        tensor = torch.resolve_neg(torch.resolve_conj(tensor.detach()))
        if not tensor.numel():
            return b""
        if tensor.nbytes > READ_BYTES and tensor.ndim:
            num_parts = min(len(tensor), -(-tensor.nbytes // READ_BYTES))
            return b"".join(read_bytes(part) for part in tensor.tensor_split(num_parts))
        # The copy is one small page that dies here; an array made from the tensor itself would
        # keep the tensor's own page on the device while it lives.
        flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()


def node_name(tensor: torch.Tensor) -> str:
    """Name of the operation that autograd goes back through first; empty for a leaf."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # one view of several whose base was written in place since
        return "refused"
    if node is None:
        return ""
    # After a write to its base, torch makes a view anew: by `as_strided`, but for tensors of
    # subclasses by the view operation itself. Both give the same gradient.
    return "view" if tensor._is_view() else node.name()


def take(tensor: torch.Tensor, version_start: int = 0) -> Snapshot:
    """Snapshots a tensor; versions count from `version_start`."""
    is_strided = tensor.layout == torch.strided
    if is_strided:
        raw = read_bytes(tensor)
    else:
        parts = tensor.detach().coalesce()
        raw = read_bytes(parts.indices()) + read_bytes(parts.values())
    grad_fn = node_name(tensor)
    return Snapshot(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        stride=tuple(tensor.stride()) if is_strided else (),
        storage_offset=tensor.storage_offset() if is_strided else 0,
        device=str(tensor.device),
        layout=tensor.layout,
        version=-1 if tensor.is_inference() else tensor._version - version_start,
        requires_grad=tensor.requires_grad,
        is_leaf=grad_fn == "",
        is_parameter=isinstance(tensor, torch.nn.Parameter),
        grad_fn=grad_fn,
        raw=raw,
    )


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields whatever nested dicts, lists and tuples hold, under a dotted name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(f"{name}.{index}", item)
    else:
        yield name, value


def flatten(
    name: str, value: Any, start: Mapping[str, int] = MappingProxyType({})
) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a value as snapshots and numbers; versions count from `start`."""
    for label, leaf in leaves(name, value):
        if isinstance(leaf, torch.Tensor):
            yield label, take(leaf, start.get(label, 0))
        else:
            yield label, leaf if isinstance(leaf, int | float | str | bool | None) else repr(leaf)


def states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each parameter's optimizer state under the indices of its group and itself."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"{group_index}.{index}", dict(optimizer.state.get(parameter, {}))


def versions(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Version counters by name, so that a run compares how often each tensor was written.

    Only differences count: adoption may write the bytes once more than plain torch did.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for label, state in states(optimizer):
        named += [leaf for leaf in leaves(label, state) if isinstance(leaf[1], torch.Tensor)]
    return {name: tensor._version for name, tensor in named}


def read(model: torch.nn.Module, optimizer: torch.optim.Optimizer, start: dict[str, int]) -> Result:
    """Reads weights, gradients, buffers and optimizer states, one tensor at a time."""
    result = Result()
    ties: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        result.weights[name] = take(parameter, start.get(name, 0))
        # How often the engine wrote into a gradient is its own affair: it adds in place where it
        # may, and not to tensors of subclasses.
        grad = parameter.grad
        result.gradients[name] = None if grad is None else take(grad, grad._version)
        ties.setdefault(id(parameter), []).append(name)
    for name, buffer in model.named_buffers():
        result.buffers[name] = take(buffer, start.get(name, 0))
    for label, state in states(optimizer):
        result.states.update(flatten(label, state, start))
    for group_index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        result.facts.update(flatten(f"group.{group_index}", settings))
    result.facts["ties"] = sorted(ties.values())
    result.facts["state_dict keys"] = list(model.state_dict())
    result.facts["random state"] = take(torch.get_rng_state())
    return result


def play(program: Program, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Result:
    """Runs all steps of a program that is already built, and reads the result."""
    torch.manual_seed(STEP_SEED)
    start = versions(model, optimizer)
    program.start(model, optimizer)
    outputs: dict[str, Any] = {}
    for step_index in range(program.num_steps):
        outputs.update(flatten(f"step {step_index}", program.step(model, optimizer, step_index)))
    result = read(model, optimizer, start)
    result.outputs = outputs
    return result


def run_plain(program: Program) -> Result:
    """Runs a program in plain torch."""
    program = copy.copy(program)
    torch.manual_seed(BUILD_SEED)
    return play(program, *program.build())


_PLAIN_RESULTS: dict[str, Result] = {}


def plain_result(program: Program) -> Result:
    """The plain run does not depend on budgets, tiers or policies, so one serves all cases."""
    if program.name not in _PLAIN_RESULTS:
        _PLAIN_RESULTS[program.name] = run_plain(program)
    return _PLAIN_RESULTS[program.name]


def settle(pager: tvm_pager.Pager) -> Any:
    """Takes the statistics of a pager whose user tensors are gone, books checked."""
    gc.collect()  # modules with hooks and autograd functions are cycles
    core = pager._core
    with core.lock:
        core.flight.settle_all()  # a copy on its way down holds its page
    pager.check_invariants()
    stats = pager.stats()
    assert stats.num_pages == 0, f"pages that nothing refers to:\n{stats}"
    return stats


def run_paged(program: Program, mode: str, options: dict[str, Any]) -> tuple[Result, Any]:
    """Runs a program under a pager in one of the `MODES`; returns the result and the statistics."""
    program = copy.copy(program)
    torch.manual_seed(BUILD_SEED)
    if mode == "context":
        with tvm_pager.Pager(**options) as pager:
            model, optimizer = program.build()
            result = play(program, model, optimizer)
            del model, optimizer, program
            return result, settle(pager)
    model = program.build_model()
    if mode == "adopt_model":
        with tvm_pager.Pager(**options) as pager:
            tvm_pager.page(model)
            optimizer = program.build_optimizer(model)
            result = play(program, model, optimizer)
            del model, optimizer, program
            return result, settle(pager)
    optimizer = program.build_optimizer(model)
    if mode == "adopt":
        with tvm_pager.Pager(**options) as pager:
            tvm_pager.page(model, optimizer)
            result = play(program, model, optimizer)
            del model, optimizer, program
            return result, settle(pager)
    if mode != "call":
        raise ValueError(f"mode {mode!r} is none of {MODES}")
    pager = tvm_pager.page(model, optimizer, **options)
    with contextlib.closing(pager):
        result = play(program, model, optimizer)
        del model, optimizer, program
        return result, settle(pager)


def differences(plain: Result, paged: Result) -> list[str]:
    """Names everything that differs, and how."""
    found = []
    for part in vars(plain):
        left, right = getattr(plain, part), getattr(paged, part)
        if list(left) != list(right):
            found.append(f"{part}: names {sorted(set(left) ^ set(right))} (or their order) differ")
        for name in left.keys() & right.keys():
            expected, actual = left[name], right[name]
            if not isinstance(expected, Snapshot) or not isinstance(actual, Snapshot):
                if expected != actual and repr(expected) != repr(actual):  # NaN equals itself here
                    found.append(f"{part} {name}: plain {expected!r}, paged {actual!r}")
                continue
            for attribute in Snapshot.__dataclass_fields__:
                one, other = getattr(expected, attribute), getattr(actual, attribute)
                if one == other:
                    continue
                if attribute == "raw":
                    num_bytes = sum(a != b for a, b in zip(one, other, strict=False))
                    one, other = f"{len(one)} bytes", f"{num_bytes} of {len(other)} bytes differ"
                found.append(f"{part} {name}: {attribute}: plain {one}, paged {other}")
    return found


def moved_bytes(stats: Any, *lanes: str) -> int:
    """Bytes moved on some lanes, which need not all exist on this machine."""
    return sum(stats.bytes_by_lane.get(lane, 0) for lane in lanes)


def check_budgets(stats: Any, device_bytes: int, host_bytes: int, nvme: bool) -> None:
    """Peaks stay within the budgets."""
    assert stats.device_budget_bytes == device_bytes
    assert stats.device_peak_bytes <= device_bytes, f"device over budget:\n{stats}"
    assert stats.host_peak_bytes <= host_bytes, f"host over budget:\n{stats}"
    assert stats.nvme_peak_bytes <= (NVME_BYTES if nvme else 0), f"NVMe over budget:\n{stats}"
    assert stats.num_policy_errors == 0, f"the policy failed:\n{stats}"


def check_traffic(stats: Any, nvme: bool) -> None:
    """Paging really happened, to the tiers that it should use and no others."""
    assert stats.num_faults > 0, f"nothing was paged in:\n{stats}"
    assert stats.num_evictions > 0, f"nothing was evicted:\n{stats}"
    down, up = moved_bytes(stats, "h2n", "d2n"), moved_bytes(stats, "n2h", "n2d")
    if nvme:
        assert down > 0, f"nothing was written to NVMe:\n{stats}"
        assert up > 0, f"nothing was read from NVMe:\n{stats}"
    else:
        assert down == up == 0, f"NVMe was used without being asked for:\n{stats}"


def check_nothing_left(directory: Path) -> None:
    """After the pager closed: no thread, no swap file, no descriptor, no active pager."""
    assert left_behind(directory) == []
    assert type(torch.empty(1)) is torch.Tensor, "factories still make pages"


def pager_options(
    directory: Path,
    *,
    device_bytes: int,
    host_bytes: int,
    nvme: bool,
    policy: str = "lru",
    segment_bytes: int = 4096,
    check: int = 1,
) -> dict[str, Any]:
    """Options of a CPU pager with tiny tiers."""
    return {
        "device": device_bytes,
        "host": host_bytes,
        "nvme": directory if nvme else None,
        "nvme_bytes": NVME_BYTES if nvme else None,
        "policy": policy,
        "torch_device": "cpu",
        "engine": "posix",
        "segment_bytes": segment_bytes,
        "check": check,
        "strict": True,
    }


def same(
    program: Program,
    *,
    tmp_path: Path,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    nvme: bool = False,
    policy: str = "lru",
    mode: str = "adopt",
    must_page: bool = True,
    use_cache: bool = True,
    check: int | None = None,
) -> Any:
    """Requires that a program gives the same bits paged as plain, within its budgets.

    Budgets default to the program's own: a device that holds about a third of what the program
    needs, and a host tier that holds the rest or, with `nvme`, only part of it.

    Args:
        must_page: also require that every tier was really used.
        use_cache: the plain result of an earlier call may serve; not where a test watches the run.
        check: the pager's level. None: 1 with NVMe; without, 0, because checks keep operations on
            pages that have just moved from the fast path.

    Returns:
        The pager's statistics.
    """
    device_bytes = device_bytes or program.device_bytes
    if host_bytes is None:
        host_bytes = STAGING_BYTES + program.device_bytes * (1 if nvme else 16)
    directory = tmp_path / "swap"
    directory.mkdir(mode=0o700)
    options = pager_options(
        directory,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        nvme=nvme,
        policy=policy,
        segment_bytes=program.segment_bytes,
        check=int(nvme) if check is None else check,
    )
    plain = plain_result(program) if use_cache else run_plain(program)
    paged, stats = run_paged(program, mode, options)
    check_nothing_left(directory)
    found = differences(plain, paged)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20]) + f"\n{stats}"
    check_budgets(stats, device_bytes, host_bytes, nvme)
    if must_page:
        check_traffic(stats, nvme)
    return stats
