"""Pure state: the pages, where their current bytes are, and which bytes of which tier are taken.

Standard library only. Nothing in this room moves a byte, chooses a victim or reads a clock.
"""

from __future__ import annotations

from tvm_pager.memory.frames import Extent, FrameAllocator
from tvm_pager.memory.page import Backing, Page, PageKind, PageState, Segment, Tier
from tvm_pager.memory.page_table import PageTable

__all__ = [
    "Backing",
    "Extent",
    "FrameAllocator",
    "Page",
    "PageKind",
    "PageState",
    "PageTable",
    "Segment",
    "Tier",
]
