"""The demonstration: one model trained and asked plainly, then paged, and every number compared.

    parent (`compare`)  -- torch-free; starts the workers in turn and compares their results
      worker prepare    -- weights and text, once, into a temporary directory
      worker plain      -- `workload` in plain torch; measures what plain torch needs
      worker paged      -- the same `workload` inside a `Pager` with a fraction of that

Processes of their own keep each peak honest: nothing that an earlier phase left behind counts for,
or helps, a later one.
"""

from __future__ import annotations

from tvm_pager.demo.compare import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
