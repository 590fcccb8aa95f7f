"""`PageView.last_use`, what a policy sees of the journal: the index of a page's last operation."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import tvm_pager
from tests.model.programs import FRAME, Op, Rig
from tvm_pager.memory import FrameAllocator, Page, PageState, PageTable
from tvm_pager.planning import Eviction, Policy, Tier, View, load_policy
from tvm_pager.policies.lru import LRU
from tvm_pager.runtime.storage import page_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NUM_TENSORS = 12  # of 4 KiB; the device of these tests has room for five
NUM_USES = 400  # several journals full


class ByLastUse(Policy):
    """LRU without an order of its own: it sorts by what the view says."""

    name = "by_last_use"

    def __init__(self) -> None:
        self._known: dict[int, None] = {}

    def on_insert(self, page_id: int) -> None:
        self._known[page_id] = None

    def on_remove(self, page_id: int) -> None:
        del self._known[page_id]

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        victims: list[Eviction] = []
        freed = 0
        for page_id in sorted(self._known, key=lambda known: view.page(known).last_use):
            if freed >= need_bytes:
                break
            if view.evictable(page_id):
                victims.append(Eviction(page_id))
                freed += view.frame_bytes(page_id)
        return victims if freed >= need_bytes else None


def evictions(base: type[Policy], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages that leave the device, in order, while one program runs with a policy."""
    chosen: list[int] = []

    class Recorded(base):  # type: ignore[valid-type, misc]  # a class that is an argument
        def choose_victims(self, tier: Tier, *question: Any) -> list[Eviction] | None:
            victims: list[Eviction] | None = super().choose_victims(tier, *question)
            chosen.extend(victim.page_id for victim in victims or ())
            return victims

    monkeypatch.setattr("tvm_pager.assembly.load_policy", lambda name: Recorded)
    dice = random.Random(7)
    with tvm_pager.Pager(device="20KiB", host="1MiB", torch_device="cpu", strict=True) as pager:
        tensors = [torch.full((1024,), float(i)) for i in range(NUM_TENSORS)]
        for _ in range(NUM_USES):
            # One operand each, so that no two pages have the same last use.
            tensors[min(dice.randrange(NUM_TENSORS), dice.randrange(NUM_TENSORS))].add_(1)
        assert sum(tensor[0].item() for tensor in tensors) == NUM_USES + sum(range(NUM_TENSORS))
        del tensors, pager
    return chosen


def test_sorting_by_last_use_is_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = evictions(load_policy("lru"), monkeypatch)
    assert len(expected) > 100
    assert evictions(ByLastUse, monkeypatch) == expected


class Witness(ByLastUse):
    """Compares what it is shown with what happened."""

    name = "witness"
    truth: ClassVar[dict[int, int]] = {}
    num_seen: ClassVar[dict[Tier, int]] = {}

    def choose_victims(self, tier: Tier, need_bytes: int, view: View) -> list[Eviction] | None:
        for page_id in self._known:
            if page_id in self.truth:
                assert view.page(page_id).last_use == self.truth[page_id], (tier, page_id)
                assert view.page(page_id).last_use <= view.operation_index
                self.num_seen[tier] = self.num_seen.get(tier, 0) + 1
        return super().choose_victims(tier, need_bytes, view)


def test_last_use_is_exact_in_both_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_pager.assembly.load_policy", lambda name: Witness)
    monkeypatch.setattr(Witness, "truth", {})
    monkeypatch.setattr(Witness, "num_seen", {})
    options: dict[str, Any] = {"host": "512KiB", "nvme": tmp_path, "nvme_bytes": "8MiB"}
    with tvm_pager.Pager(
        device="320KiB", torch_device="cpu", strict=True, engine="posix", **options
    ) as pager:
        dice = random.Random(3)
        tensors = [torch.zeros(16 * 1024) for _ in range(NUM_TENSORS)]
        names = [page.id for tensor in tensors if (page := page_of(tensor)) is not None]
        for _ in range(NUM_USES):
            index = dice.randrange(NUM_TENSORS)
            tensors[index].add_(1)
            Witness.truth[names[index]] = pager.stats().num_operations
        assert min(Witness.num_seen[tier] for tier in (Tier.DEVICE, Tier.HOST)) > 100
        del tensors, pager


def test_what_is_born_in_an_operation_was_used_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_pager.assembly.load_policy", lambda name: Witness)
    monkeypatch.setattr(Witness, "truth", {})
    monkeypatch.setattr(Witness, "num_seen", {})
    with tvm_pager.Pager(device="20KiB", host="1MiB", torch_device="cpu", strict=True) as pager:
        kept = [torch.ones(1024)]
        for _ in range(NUM_TENSORS):
            kept.append(kept[-1] + 1)
            page = page_of(kept[-1])
            assert page is not None
            Witness.truth[page.id] = Witness.truth[page.id - 1] = pager.stats().num_operations
        assert Witness.num_seen[Tier.DEVICE] > NUM_TENSORS
        del kept, pager


def test_journals_stay_short_where_nothing_is_decided() -> None:
    with tvm_pager.Pager(host="1MiB", torch_device="cpu") as pager:
        tensor = torch.zeros(1024)
        for _ in range(1000):
            pager.evict_all()
            tensor.add_(1)
        for policy in pager._core.policies.values():
            assert sum(len(uses) for uses in policy.journal) < 500
        assert tensor[0].item() == 1000
        del tensor


def test_a_page_is_born_with_all_of_its_fields() -> None:
    page = PageTable(FrameAllocator(0, 4096), FrameAllocator(0, 4096), segment_bytes=4096).create(
        100, object
    )
    for cls in Page.__mro__:
        for name in getattr(cls, "__slots__", ()):
            getattr(page, name)
    assert (page.nbytes, page.frame_bytes, page.state) == (100, 512, PageState.RESIDENT)
    assert [page.has_copies, page.tickets, page.known_to, page.last_use] == [False, (), 0, 0]


def test_a_policy_of_the_slab_knows_too_how_many_operations_have_run() -> None:
    seen: list[tuple[int, int]] = []

    class Looking(LRU):
        def choose_victims(self, tier: Tier, need_bytes: int, view: Any) -> Any:
            if tier is Tier.HOST:
                seen.append((view.operation_index, rig.pager.operation_index))
            return super().choose_victims(tier, need_bytes, view)

    rig = Rig(Looking, device=1 << 20, host=4 * FRAME)
    rig.weights()
    for index in range(6):  # the device has room: nobody is asked about it
        rig.run(Op("read", (f"w{index}",)))
        with rig.pager.lock:
            rig.pager.mover.start_write_back(rig.pages[f"w{index}"])
    assert seen
    assert all(shown == real for shown, real in seen)
    rig.end()
