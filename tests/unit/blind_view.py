"""What a fake view answers of lanes and traces where there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_pager.planning import Lineage

__all__ = ["BlindView"]


class BlindView:
    """The base of fake views; they say what pages there are."""

    def next_use(self, page_id: int) -> float | None:
        return None

    def lineage(self, page_id: int) -> Lineage | None:
        return None

    def seconds_since_use(self, page_id: int) -> float | None:
        return None

    def module(self, page_id: int) -> str:
        return ""

    def layer(self, page_id: int) -> int | None:
        return None

    def backlog_bytes(self, lane: str) -> int:
        return 0
