"""A small machine that runs any list of instructions on a pool of tensors, paged or plain.

An instruction is a name and three numbers, which the machine bends into valid operands, so that
every list of instructions is a program. What plain torch refuses (a leaf written in place, a graph
used twice) is part of the program: the kind of error is an output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from tests.parity.harness import Snapshot, flatten, take
from tvm_pager.errors import PagerError

SIDE = 24  # tensors have at most two dimensions of this length: at most 2304 bytes of float32
POOL_SIZE = 64  # beyond it the oldest tensor is dropped

Instruction = tuple[str, int, int, int]
OPERATIONS: dict[str, Callable[[Machine, int, int, int], Any]] = {}


@dataclass
class Machine:
    """The pool, and what the program has put out so far."""

    evict: Callable[[], object]
    pool: list[torch.Tensor] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)

    def pick(self, index: int) -> torch.Tensor:
        return self.pool[index % len(self.pool)]

    def matrix(self, index: int) -> torch.Tensor:
        """A float32 matrix of at most SIDE x SIDE, as a view of the tensor picked."""
        t = self.pick(index)
        t = t.reshape(-1, 1) if t.ndim != 2 else t
        return t[:SIDE, :SIDE]

    def keep(self, made: Any) -> None:
        for t in made if isinstance(made, list | tuple) else [made]:
            if isinstance(t, torch.Tensor):
                self.pool.append(t if t.is_floating_point() else t.float())
        del self.pool[:-POOL_SIZE]


def operation(
    function: Callable[[Machine, int, int, int], Any],
) -> Callable[[Machine, int, int, int], Any]:
    """Registers an operation under its own name; what it returns joins the pool."""
    OPERATIONS[function.__name__] = function
    return function


# --- making ---


@operation
def random(m: Machine, i: int, j: int, k: int) -> Any:
    return torch.randn(1 + i % SIDE, 1 + j % SIDE)


@operation
def leaf(m: Machine, i: int, j: int, k: int) -> Any:
    return torch.randn(1 + i % SIDE, 1 + j % SIDE, requires_grad=True)


@operation
def like(m: Machine, i: int, j: int, k: int) -> Any:
    return (torch.zeros_like, torch.ones_like, torch.rand_like)[k % 3](m.pick(i))


@operation
def column_major(m: Machine, i: int, j: int, k: int) -> Any:
    return torch.empty_strided((1 + i % SIDE, 1 + j % SIDE), (1, SIDE)).fill_(k)


@operation
def drop(m: Machine, i: int, j: int, k: int) -> Any:
    if len(m.pool) > 1:
        del m.pool[i % len(m.pool)]


# --- reading ---


@operation
def unary(m: Machine, i: int, j: int, k: int) -> Any:
    functions = (torch.exp, torch.tanh, torch.neg, torch.abs, torch.sigmoid, torch.clone)
    return functions[k % len(functions)](m.pick(i).clamp(-4, 4))


@operation
def binary(m: Machine, i: int, j: int, k: int) -> Any:
    a, b = m.matrix(i), m.matrix(j)
    rows, columns = min(len(a), len(b)), min(a.shape[1], b.shape[1])
    functions = (torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2)
    return functions[k % len(functions)](a[:rows, :columns], b[:rows, :columns])


@operation
def matmul(m: Machine, i: int, j: int, k: int) -> Any:
    a, b = m.matrix(i), m.matrix(j)
    inner = min(a.shape[1], len(b))
    return a[:, :inner] @ b[:inner]


@operation
def linear(m: Machine, i: int, j: int, k: int) -> Any:
    a, weight = m.matrix(i), m.matrix(j)
    inner = min(a.shape[1], weight.shape[1])
    return F.gelu(F.linear(a[:, :inner], weight[:, :inner]))


@operation
def join(m: Machine, i: int, j: int, k: int) -> Any:
    parts = [m.matrix(index)[: SIDE // 3] for index in (i, j, k)]
    columns = min(part.shape[1] for part in parts)
    return torch.cat([part[:, :columns] for part in parts])


@operation
def split(m: Machine, i: int, j: int, k: int) -> Any:
    return (torch.chunk, torch.tensor_split)[j % 2](m.pick(i), 1 + k % 3)


@operation
def reduce(m: Machine, i: int, j: int, k: int) -> Any:
    a = m.matrix(i)
    functions = (torch.sum, torch.mean, torch.logsumexp, torch.cumsum, torch.softmax)
    return functions[k % len(functions)](a, dim=j % 2)


@operation
def order(m: Machine, i: int, j: int, k: int) -> Any:
    return torch.sort(m.matrix(i), dim=j % 2, descending=bool(k % 2))


@operation
def gather_rows(m: Machine, i: int, j: int, k: int) -> Any:
    a = m.matrix(i)
    rows = torch.arange(SIDE // 2).mul(k % 7 + 1) % len(a)
    return a[rows], a.new_zeros(a.shape).index_add(0, rows, a[rows])


@operation
def choose(m: Machine, i: int, j: int, k: int) -> Any:
    a = m.pick(i)
    return torch.where(a > 0, a, a * 0.5), a[a > 0.5][: SIDE * SIDE]


@operation
def noise(m: Machine, i: int, j: int, k: int) -> Any:
    return F.dropout(m.pick(i), 0.25)


@operation
def recast(m: Machine, i: int, j: int, k: int) -> Any:
    return m.pick(i).to((torch.bfloat16, torch.float64, torch.float16)[k % 3]).float()


@operation
def detached(m: Machine, i: int, j: int, k: int) -> Any:
    return m.pick(i).detach()


# --- viewing ---


@operation
def view(m: Machine, i: int, j: int, k: int) -> Any:
    a = m.matrix(i)
    views: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: a.t(),
        lambda: a[j % len(a) :],
        lambda: a[:, :: 1 + j % 3],
        lambda: a[j % len(a)],
        lambda: a[:1].expand(SIDE, -1),
        lambda: a.unfold(0, 1 + j % len(a), 1)[0],
        lambda: a.diagonal(),
        lambda: a.narrow(1, j % a.shape[1], 1),
        lambda: a.reshape(-1),
        lambda: a.flatten().view(-1, 1),
        lambda: a.squeeze().unsqueeze(0),
    )
    return views[k % len(views)]()


# --- writing ---


@operation
def write(m: Machine, i: int, j: int, k: int) -> Any:
    a, b = m.pick(i), m.matrix(j)
    writes: tuple[Callable[[], object], ...] = (
        lambda: a.mul_(0.5),
        lambda: a.add_(b.flatten()[0]),
        lambda: a.clamp_(-1, 1),
        lambda: a.zero_(),
        lambda: a.copy_(b.flatten()[-1]),
        lambda: a.t_(),
        lambda: a.tanh_(),
        lambda: a.uniform_(-1, 1),
    )
    with torch.no_grad() if j % 2 else contextlib.nullcontext():
        writes[k % len(writes)]()


@operation
def write_part(m: Machine, i: int, j: int, k: int) -> Any:
    a, b = m.matrix(i), m.matrix(j)
    rows, columns = min(len(a), len(b)), min(a.shape[1], b.shape[1])
    with torch.no_grad() if k % 2 else contextlib.nullcontext():
        a[:rows, :columns] = b[:rows, :columns].clone()
        a[a > 1] = 0.25


@operation
def write_list(m: Machine, i: int, j: int, k: int) -> Any:
    with torch.no_grad():
        torch._foreach_add_([m.pick(index).detach() for index in (i, j, k)], 0.125)


@operation
def write_out(m: Machine, i: int, j: int, k: int) -> Any:
    out = torch.empty(0 if k % 2 else (SIDE, SIDE)).fill_(0)
    a = m.matrix(i).detach()
    return torch.add(a, 1, out=out if k % 2 else out[: len(a), : a.shape[1]])


@operation
def resize(m: Machine, i: int, j: int, k: int) -> Any:
    return torch.ones(3, 4).resize_(1 + j % SIDE, 1 + k % SIDE).fill_(i % 5)


@operation
def replace_data(m: Machine, i: int, j: int, k: int) -> Any:
    a = m.pick(i)
    a.data = a.detach() * 2


# --- autograd ---


@operation
def backward(m: Machine, i: int, j: int, k: int) -> Any:
    roots = [t for t in (m.pick(i), m.pick(j)) if t.requires_grad]
    if roots:
        torch.autograd.backward([t.clamp(-4, 4).sum() for t in roots], retain_graph=bool(k % 2))
    # Copies: how often the engine wrote into a gradient is its own affair (see `harness.read`).
    return [t.grad.clone() for t in m.pool if t.is_leaf and t.grad is not None][:2]


@operation
def slope(m: Machine, i: int, j: int, k: int) -> Any:
    leaves = [t for t in m.pool if t.is_leaf and t.requires_grad]
    root = m.pick(i).clamp(-4, 4).square().sum()
    if leaves and root.requires_grad:
        slopes = torch.autograd.grad(
            root, leaves[:2], create_graph=bool(k % 2), retain_graph=True, allow_unused=True
        )
        return [t.clone() for t in slopes if t is not None]
    return None


@operation
def descend(m: Machine, i: int, j: int, k: int) -> Any:
    a = m.pick(i)
    if a.is_leaf and a.grad is not None:
        with torch.no_grad():
            a.sub_(a.grad, alpha=0.1)
        a.grad = None if k % 2 else a.grad.zero_()


# --- looking ---


@operation
def look(m: Machine, i: int, j: int, k: int) -> Any:
    a = m.pick(i).detach()
    if a.numel():
        m.outputs[f"look {len(m.outputs)}"] = [
            a.sum().item(), a.flatten()[-1].item(), a.tolist(), a.numpy().sum().item(),
            bool((a > 0).any()), str(a.shape),
        ]  # fmt: skip


@operation
def evict(m: Machine, i: int, j: int, k: int) -> Any:
    m.evict()


def execute(
    program: list[Instruction], evict: Callable[[], object], evict_each: bool
) -> dict[str, Any]:
    """Runs a program and returns all that it put out and all that is left in its pool."""
    torch.manual_seed(0)
    m = Machine(evict)
    for rows in (3, SIDE):
        m.pool += [torch.randn(rows, SIDE, requires_grad=True), torch.randn(SIDE, rows)]
    for index, (name, i, j, k) in enumerate(program):
        try:
            m.keep(OPERATIONS[name](m, i, j, k))
        except PagerError:
            raise
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as failure:
            m.outputs[f"refused {index}"] = type(failure).__name__
        if evict_each:
            evict()
    grads = {f"grad.{index}": _grad(t) for index, t in enumerate(m.pool)}
    return dict(flatten("out", m.outputs)) | dict(flatten("pool", m.pool)) | grads


def _grad(tensor: torch.Tensor) -> Snapshot | None:
    try:
        grad = tensor.grad if tensor.is_leaf else None
        return None if grad is None else take(grad, grad._version)
    except RuntimeError:  # one view of several whose base was written in place since
        return None
