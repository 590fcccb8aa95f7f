"""A pager on the late backend, pages by name, and the bytes that each of them must hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from unittest import mock

from tvm_pager.memory import Extent, Page, PageState, Tier
from tvm_pager.paging import DemandPager
from tvm_pager.planning import load_policy
from tvm_pager.transfer.ram_backend import RamBackend, RamMemory

if TYPE_CHECKING:
    from tvm_pager.transfer.protocol import Lane

NUM_SEEDS = 100  # of the backend: each has its own moments for each half of each copy
NBYTES = 5000  # two segments, the second one shorter
FRAME = 4096
ROOMY = 16 * FRAME


class Rig:
    """A pager on a late backend; pages by name, and what each must hold."""

    def __init__(self, seed: int, *, host: int = ROOMY, nvme: int = ROOMY) -> None:
        self.seed = seed
        self.broken: dict[Lane, int] = {}  # lanes whose transfers all fail, and with which errno
        self.backend = RamBackend(
            host,
            nvme,
            seed=seed,
            max_delay=6,
            fail=lambda transfer: self.broken.get(transfer.lane),
            in_order=seed % 2 == 1,
        )
        self.pager = DemandPager(
            self.backend, 60 * 512, load_policy("lru"), segment_bytes=FRAME, strict=True
        )
        self.pages: dict[str, Page] = {}
        self.memory: dict[str, RamMemory] = {}
        self.wanted: dict[str, bytes] = {}
        self.num_names = itertools.count()

    def create(self, name: str = "page", nbytes: int = NBYTES) -> Page:
        self.pager.admit([], -(-nbytes // 512) * 512, "create")
        memory = self.memory[name] = RamMemory()
        self.backend.allocate_device(memory, nbytes)
        page = self.pages[name] = self.pager.create(nbytes, lambda: memory)
        self.fill(name)
        return page

    def fill(self, name: str) -> None:
        """Other bytes than any page ever had."""
        value = next(self.num_names) % 200 + 1
        self.wanted[name] = bytes([value]) * self.pages[name].nbytes
        self.memory[name].data[:] = self.wanted[name]

    def read(self, name: str = "page") -> None:
        self.pager.admit([self.pages[name]], 0, "read")
        assert bytes(self.memory[name].data) == self.wanted[name], f"seed {self.seed}"

    def write(self, name: str = "page") -> None:
        self.pager.admit([self.pages[name]], 0, "write")
        self.pager.written(self.pages[name])
        self.fill(name)

    def write_back(self, name: str = "page", to: Tier | None = None) -> None:
        """Starts one, if there is anything to write."""
        page = self.pages[name]
        if page.state is PageState.RESIDENT and not page.is_clean:
            self.pager.mover.start_write_back(page, to)

    def evict(self, name: str = "page", to: Tier | None = None) -> None:
        if self.pages[name].is_on_device:
            self.pager.mover.evict(self.pages[name], to)

    def fetch(self, name: str = "page") -> None:
        """Starts one ahead of the access, as a prefetch does."""
        page = self.pages[name]
        if page.state is PageState.LEAVING or (not page.tickets and not page.is_on_device):
            self.pager.mover.start_fetch(page)

    def demote(self, name: str = "page") -> None:
        """Starts moving the page from DRAM to NVMe, and does not wait as `free_host` would."""
        page = self.pages[name]
        if page.state is PageState.LEAVING:
            self.pager.flight.settle(page)
        if page.state is PageState.EVICTED and self.pager.table.tier_of(page) is Tier.HOST:
            self.pager.host_room.demote(page)

    def settle(self, name: str = "page") -> None:
        """Waits for the page's copies; raises what they raise."""
        self.pager.flight.settle(self.pages[name])

    def arriving(self, name: str = "page") -> set[int]:
        """Offsets of the frames that a copy in flight is filling."""
        return _offsets(frame for _, _, frame in self.pager.table.arrivals_of(self.pages[name].id))

    def free(self, name: str = "page") -> None:
        """The page's last tensor dies; a copy in flight holds the memory, as a ticket does."""
        page = self.pages.pop(name)
        del self.wanted[name], self.memory[name]
        self.pager.dead.append(mock.Mock(page=page))
        self.pager.drain()

    def take_over(self) -> None:
        """A new page takes whatever device memory and frames have just become free."""
        name = f"other {next(self.num_names)}"
        self.create(name)
        self.write_back(name)

    @property
    def bad(self) -> set[int]:
        """Offsets of the frames of NVMe that were set aside for good."""
        return _offsets(self.pager.table.bad_frames)

    def check(self) -> None:
        self.pager.check_invariants()
        assert not self.backend.hazards, f"seed {self.seed}"

    def end(self) -> None:
        """Every page leaves, comes back with its bytes, and dies: only bad frames stay taken."""
        self.pager.evict_all()
        for name in list(self.pages):
            self.read(name)
            self.check()
            self.free(name)
        self.pager.close()
        self.pager.flight.reap()
        self.check()
        used = {tier: space.used_bytes for tier, space in self.pager.table.frames.items()}
        assert used == {Tier.HOST: 0, Tier.NVME: len(self.bad) * FRAME}
        assert self.pager.table.device_used_bytes == self.pager.table.committed_bytes == 0


def rigs(num: int = NUM_SEEDS, **options: int) -> Iterator[Rig]:
    """A rig for each seed; what is left in it comes back, and dies, before the next one."""
    for seed in range(num):
        rig = Rig(seed, **options)
        yield rig
        rig.end()


def _offsets(frames: Iterable[tuple[Extent, ...]]) -> set[int]:
    """Of the blocks of 4096 bytes that the frames cover."""
    return {
        offset
        for frame in frames
        for extent in frame
        for offset in range(extent.offset, extent.offset + extent.nbytes, FRAME)
    }
