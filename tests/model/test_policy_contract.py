"""Every built-in policy keeps the contract that the test kit checks for anybody's."""

from __future__ import annotations

from tvm_pager.planning import available_policies, load_policy
from tvm_pager.testing import policy_contract

for _name in available_policies():
    globals()[f"Test{_name.title().replace('_', '')}"] = policy_contract(load_policy(_name))
