"""The pager: access, hit or fault, make room, fetch, pin.

Torch-free; runs on any transfer backend.
"""

from __future__ import annotations

from tvm_pager.paging.pager import DemandPager

__all__ = ["DemandPager"]
