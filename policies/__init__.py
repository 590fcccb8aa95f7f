"""Built-in policies, one file each.

They import the `tvm_pager.planning` API and the standard library only.
"""

from __future__ import annotations

if __name__ != "tvm_pager.policies":
    # The same file under two names makes two class objects, and `issubclass` checks fail far from
    # the cause.
    raise ImportError(f"import this package as tvm_pager.policies, not as {__name__}")
