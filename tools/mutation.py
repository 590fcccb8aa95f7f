"""What a mutation is; `rule_mutations.py` lists them, `mutate_rules.py` runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Mutation"]


class Mutation(NamedTuple):
    """One rule, how to take it out, and the test that must notice."""

    rule: str
    file: str  # relative to the root
    old: str  # in the file exactly once
    new: str
    test: str  # a pytest node id
