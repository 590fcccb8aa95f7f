"""One tier's policy, fed with what happened and checked in what it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_pager.errors import PolicyError
from tvm_pager.memory import Page, PageState, Tier
from tvm_pager.paging.kind_split import KindSplit
from tvm_pager.planning import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm_pager.memory import PageKind
    from tvm_pager.paging.view import PagerView
    from tvm_pager.planning import Eviction

__all__ = ["JOURNAL_LIMIT", "TierPolicy"]

# Replaying the journal costs as much whenever it is done; the bound only keeps it from holding
# memory.
JOURNAL_LIMIT = 80  # operations
_USES_LIMIT = 256  # of pages, outside operations


class TierPolicy:
    """Batches uses of pages, replays them before a decision, replaces a policy that misbehaves.

    Args:
        tier: whose residents the policy knows.
        policy: the chosen policy.
        make_fallback: makes the policy that takes over after an error, and that chooses where the
            chosen one does not: among kinds of pages that are not its own, or at all.
        report: called once with a sentence when that happens.
        strict: raise PolicyError instead.
        kind_of: a page's kind, by id.
    """

    def __init__(
        self,
        tier: Tier,
        policy: Policy,
        make_fallback: Callable[[], Policy],
        report: Callable[[str], None],
        *,
        strict: bool,
        kind_of: Callable[[int], PageKind],
    ) -> None:
        self.tier = tier
        self.num_errors = 0
        # What was used since the last replay: first outside operations, then by each operation and
        # after it. The dispatch appends directly.
        self.journal: list[list[Page]] = [[]]
        self.num_replayed = 0  # operations
        self._bit = 1 << tier
        self._known: dict[int, Page] = {}
        self._make_fallback = make_fallback
        self._report = report
        self._strict = strict
        self._kind_of = kind_of
        self.policy = self._completed(policy)

    def taught(self, policy: Policy) -> Policy:
        """Completes a policy and tells it of all residents, in the order of their last use.

        It takes over when it is assigned to `policy`. Raises what the policy raises.
        """
        self.replay()
        successor = self._completed(policy)
        for page in sorted(self._known.values(), key=lambda page: page.last_use):
            successor.on_insert(page.id)
        return successor

    def used(self, page: Page) -> None:
        """The page is resident in the tier and was used (or has just arrived)."""
        uses = self.journal[-1]
        uses.append(page)
        if len(uses) > _USES_LIMIT:
            self.replay()

    def removed(self, page: Page) -> None:
        """The page has left the tier. Entries of it in the journal are void from now on."""
        if page.known_to & self._bit:
            page.known_to &= ~self._bit
            del self._known[page.id]
            self._tell("on_remove", page.id)

    def replay(self) -> None:
        """Tells the policy everything up to now, in order."""
        operations, self.journal = self.journal, [[]]
        journal = [page for pages in operations for page in pages]
        if self.tier is Tier.DEVICE:
            self._stamp(operations)
        bit, dead = self._bit, PageState.DEAD
        inserted: Page | None = None
        uses = iter(journal)
        while True:
            on_access = self.policy.on_access
            try:
                for page in uses:
                    if page.known_to & bit:
                        on_access(page.id)
                    elif page.state is not dead and self._is_resident(page):
                        inserted = page
                        page.known_to |= bit
                        self._known[page.id] = page
                        self.policy.on_insert(page.id)
                        inserted = None
                return
            except Exception as error:  # whatever a policy does, training goes on
                # `uses` goes on after the page at which it raised.
                self._blame("on_access" if inserted is None else "on_insert", error)
                inserted = None

    def _stamp(self, operations: list[list[Page]]) -> None:
        index = self.num_replayed
        for pages in operations:
            for page in pages:
                page.last_use = index
            index += 1
        self.num_replayed = index - 1

    def trim(self) -> None:
        """Replays if the journal has grown long."""
        if len(self.journal) > JOURNAL_LIMIT:
            self.replay()

    def victims(self, need_bytes: int, view: PagerView) -> list[Eviction] | None:
        """Asks the policy; None if no set of evictable pages frees `need_bytes`.

        Raises:
            PolicyError: the decision is illegal or the policy raised, and `strict` is set.
        """
        self.replay()
        view.bind(self.tier)
        try:
            chosen = self.policy.choose_victims(self.tier, need_bytes, view)
            fault = self._fault_of(chosen, need_bytes, view)
        except Exception as error:  # whatever a policy does, training goes on
            chosen, fault = None, f"raised {error!r}"
            if self._strict:
                raise PolicyError(
                    f"policy {self._name()} {fault} for tier {self.tier.name}"
                ) from error
        if fault is None:
            return chosen
        self._replace(fault)
        return self.policy.choose_victims(self.tier, need_bytes, view)

    def check_invariants(self) -> None:
        """The policy knows exactly the residents, once everything has been replayed."""
        self.replay()
        for page in self._known.values():
            if not self._is_resident(page):
                raise AssertionError(f"policy of {self.tier.name} still knows {page!r}")

    def _completed(self, policy: Policy) -> Policy:
        """The policy, with the fallback for what it does not decide."""
        if type(policy).choose_victims is Policy.choose_victims:
            return self._make_fallback()
        if policy.kinds is not None:
            return KindSplit(policy, self._make_fallback(), self._kind_of)
        return policy

    def _fault_of(
        self, chosen: list[Eviction] | None, need_bytes: int, view: PagerView
    ) -> str | None:
        if chosen is None:
            return self._fault_of_none(need_bytes, view)
        freed = 0
        seen: set[int] = set()
        for page_id, to in chosen:
            if page_id in seen or page_id not in self._known or not view.evictable(page_id):
                return f"chose page {page_id}, which is not evictable now"
            if to is not None and to <= self.tier:
                return f"sent page {page_id} to tier {to!r}, which is not below {self.tier.name}"
            seen.add(page_id)
            freed += view.frame_bytes(page_id)
        return None if freed >= need_bytes else f"freed {freed} B where {need_bytes} B were asked"

    def _fault_of_none(self, need_bytes: int, view: PagerView) -> str | None:
        """O(pages). In the slab what can go also depends on what goes beside it."""
        if self.tier is not Tier.DEVICE:
            return None
        found = sum(page.frame_bytes for page in self._known.values() if view.evictable(page.id))
        return f"chose nothing where {found} B can go" if found >= need_bytes else None

    def _is_resident(self, page: Page) -> bool:
        if page.state is PageState.DEAD:
            return False
        if self.tier is Tier.DEVICE:
            return page.is_on_device
        return any(segment.host is not None for segment in page.segments)

    def _tell(self, hook: str, page_id: int) -> None:
        try:
            getattr(self.policy, hook)(page_id)
        except Exception as error:
            self._blame(hook, error)

    def _blame(self, hook: str, error: Exception) -> None:
        if self._strict:
            raise PolicyError(f"policy {self._name()} raised in {hook}: {error!r}") from error
        self._replace(f"raised {error!r} in {hook}")

    def _replace(self, fault: str) -> None:
        if self._strict:
            raise PolicyError(f"policy {self._name()} {fault}")
        self.num_errors += 1
        self._report(f"policy {self._name()} {fault}; LRU has taken over for tier {self.tier.name}")
        self.policy = self._make_fallback()
        for page_id in self._known:
            self.policy.on_insert(page_id)

    def _name(self) -> str:
        return self.policy.name or type(self.policy).__name__
