"""One operation that is being run: what was asked for, and the pages that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm_pager.runtime.schema import written_tensors

if TYPE_CHECKING:
    import torch

    from tvm_pager.memory import Page
    from tvm_pager.paging.recorder import Entry
    from tvm_pager.runtime.context import PagingContext
    from tvm_pager.runtime.schema import OperatorPlan

__all__ = ["Call"]


@dataclass(slots=True)
class Call:
    """An operator with its arguments, on its way through the rules.

    Lives no longer than the operation: it holds the operands' tensors.
    """

    context: PagingContext  # the pager of `pages`, and of what the operation creates
    func: Any
    plan: OperatorPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    pages: list[Page]  # of the operands; one that is named twice comes twice
    unpaged: list[torch.Tensor]  # the operands that are on no page
    created_bytes: int = 0  # device bytes of the pages that it has created
    known_bytes: int = 0  # what it took the first time, workspace included
    is_told: bool = False  # whether `DemandPager.watch` was called for it
    entry: Entry | None = None  # where it is taken down; None: it is not

    def execute(self) -> Any:
        """Calls the operator; whether dispatch sees it again is the caller's affair."""
        kwargs = self.kwargs
        return self.func(*self.args, **kwargs) if kwargs else self.func(*self.args)

    def written(self) -> list[torch.Tensor]:
        """The operands that it may write."""
        return written_tensors(self.plan, self.args, self.kwargs)

    def argument(self, position: int) -> Any:
        """The argument at a position of the schema, or None where it is left out."""
        if position < len(self.args):
            return self.args[position]
        return (self.kwargs or {}).get(self.plan.argument_names[position])

    def distinct_pages(self) -> list[Page]:
        return list({page.id: page for page in self.pages}.values())

    def operand_bytes(self) -> int:
        return sum(page.frame_bytes for page in self.distinct_pages())

    def missing_bytes(self) -> int:
        """What of its operands is not on the device. Counts one that is named twice as two."""
        return sum(page.frame_bytes for page in self.pages if not page.is_on_device)

    def available_bytes(self) -> int:
        """What it may create beside its operands, if everything evictable goes. O(pages)."""
        core = self.context.core
        taken = core.overhead_bytes + core.pinned_bytes(self.pages) + self.operand_bytes()
        return core.budget_bytes - taken
