"""Programs without tensors: what each operation names, creates and frees, run on a pager.

The pages' bytes are compared with a model at each operation, as in machine.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tvm_pager.memory import Page, PageKind
from tvm_pager.paging import DemandPager
from tvm_pager.planning import Policy, load_policy
from tvm_pager.transfer.ram_backend import RamBackend, RamMemory

FRAME = 4096


@dataclass
class Op:
    """One operation on pages that have names."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    creates: dict[str, int] = field(default_factory=dict)  # bytes
    frees: tuple[str, ...] = ()  # right after it


def training(num_layers: int = 6, nbytes: int = 3000, grads: bool = True) -> list[Op]:
    """A step: activations forth and back, gradients that the next step frees, updates."""
    ops = [Op("zero", (), (), {}, tuple(f"g{i}" for i in range(num_layers)) if grads else ())]
    ops.append(Op("input", (), (), {"a0": nbytes}))
    ops += [Op("forward", (f"w{i}", f"a{i}"), (), {f"a{i + 1}": nbytes}) for i in range(num_layers)]
    ops.append(Op("loss", (f"a{num_layers}",), (), {f"d{num_layers}": nbytes}))
    for i in reversed(range(num_layers)):
        creates = {f"d{i}": nbytes} | ({f"g{i}": nbytes} if grads else {})
        frees = (f"a{i + 1}", f"d{i + 1}") + (("a0", "d0") if not i else ())
        ops.append(Op("backward", (f"w{i}", f"a{i}", f"d{i + 1}"), (), creates, frees))
    ops += [
        Op("update", (f"w{i}", f"g{i}", f"s{i}"), (f"w{i}", f"s{i}"))
        for i in range(num_layers if grads else 0)
    ]
    return ops


class Rig:
    """A pager that runs such programs; pages by name, and what each must hold."""

    def __init__(
        self,
        make_policy: Any = None,
        *,
        device: int = 40 * 512,
        host: int = 64 * FRAME,
        nvme: int = 64 * FRAME,
        seed: int = 0,
        max_delay: int = 4,
        in_order: bool = False,
        hardware: Any = "a profile",
        strict: bool = True,
    ) -> None:
        self.backend = RamBackend(host, nvme, seed=seed, max_delay=max_delay, in_order=in_order)
        self.notices: list[str] = []
        self.pager = DemandPager(
            self.backend,
            device,
            make_policy or load_policy("lru"),
            segment_bytes=FRAME,
            strict=strict,
            sink=mock.Mock(emit=self._emit),
            hardware=lambda: hardware,
        )
        self.pages: dict[str, Page] = {}
        self.memory: dict[str, RamMemory] = {}
        self.wanted: dict[str, bytes] = {}
        self.counter = 0
        self.peak_bytes = 0

    def _emit(self, event: Any) -> None:
        if event.kind.value == "notice":
            self.notices.append(event.detail)

    # --- pages ---

    def create(self, name: str, nbytes: int, kind: PageKind = PageKind.OTHER) -> Page:
        memory = RamMemory()
        self.backend.allocate_device(memory, nbytes)
        page = self.pager.table.create(nbytes, lambda: self.memory_of(page), kind)
        self.pager.device_policy.journal[-1].append(page)
        self.pages[name], self.memory[name] = page, memory
        self._alive = getattr(self, "_alive", {})
        self._alive[page.id] = memory
        self.fill(name)
        return page

    def memory_of(self, page: Page) -> RamMemory | None:
        return self._alive.get(page.id)

    def weights(self, num: int = 6, nbytes: int = 3000) -> None:
        for name in (*(f"w{i}" for i in range(num)), *(f"s{i}" for i in range(num))):
            with self.pager.lock:
                self.pager.admit([], -(-nbytes // 512) * 512, "create")
            self.create(name, nbytes, PageKind.PARAM)

    def fill(self, name: str) -> None:
        self.counter += 1
        data = bytes((self.counter * 31 + i * 7) % 251 for i in range(self.pages[name].nbytes))
        self.memory[name].data[:] = data
        self.wanted[name] = data

    def free(self, name: str) -> None:
        page = self.pages.pop(name, None)
        if page is not None:
            del self.memory[name], self.wanted[name], self._alive[page.id]
            self.pager.dead.append(mock.Mock(page=page))

    # --- operations ---

    def run(self, op: Op) -> None:
        """As runtime/execution.py: drain, tell, admit, check bytes, write, create."""
        pager = self.pager
        with pager.lock:
            pager.drain()
            pages = [self.pages[name] for name in op.reads]
            written = [self.pages[name] for name in op.writes]
            entry = pager.iterations.enter(op.name, pages, written)
            pager.admit(pages, sum(-(-n // 512) * 512 for n in op.creates.values()), op.name)
            for name in op.reads:
                data = bytes(self.memory[name].data)
                assert data == self.wanted[name], (op, name, self.backend.hazards)
            for name in op.writes:
                pager.written(self.pages[name])
                self.fill(name)
            pager.device_policy.journal.append(pages)
            for name, nbytes in op.creates.items():
                self.create(name, nbytes)
            pager.device_policy.trim()
            if entry is not None:
                entry.compute_ns = 1000
            self.peak_bytes = max(self.peak_bytes, pager.table.device_used_bytes)
            assert pager.table.device_used_bytes <= pager.budget_bytes
            assert not self.backend.hazards
        for name in op.frees:
            self.free(name)

    def iterate(self, ops: list[Op]) -> None:
        for op in ops:
            self.run(op)
        self.boundary()

    def boundary(self) -> None:
        with self.pager.lock:
            self.pager.iterations.pass_boundary()

    def end(self) -> None:
        """Everything comes back with its bytes and dies."""
        for name in list(self.pages):
            with self.pager.lock:
                self.pager.admit([self.pages[name]], 0, "end")
            assert bytes(self.memory[name].data) == self.wanted[name]
            self.free(name)
        self.pager.close()
        self.pager.check_invariants()
        assert not self.pager.table.pages
        assert not self.backend.hazards


class Recording(Policy):
    """Wants traces, and plans nothing."""

    name = "recording"

    def plan(self, trace: Any, hardware: Any, limits: Any) -> None:
        return None
