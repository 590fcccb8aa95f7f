"""Runs a user's script plain and paged, and names the first tensor whose bits differ.

    parent (`compare`)   -- torch-free unless there is a difference; starts the runs in turn
      worker, plain      -- the script; each tensor at each step leaves one record with its digest
      worker, paged      -- the script inside a `Pager`; stops at the first record that differs
                            from the plain one, and keeps that tensor's bytes
      worker, plain      -- only after a difference: is the script the same as itself? If so it
                            stops at that record and keeps its bytes too
      workers, traced    -- only with --trace: every operation of that step, plain twice and paged

Records, tensors and the script's output travel in files without names, which vanish with the last
process that holds them, however it ends.
"""

from __future__ import annotations

from tvm_pager.verify.compare import VerifyOptions, run_verify

__all__ = ["VerifyOptions", "run_verify"]
