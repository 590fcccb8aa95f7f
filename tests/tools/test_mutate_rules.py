"""The mutations still apply to the sources, and their tests exist; the tool itself runs them."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tools import mutate_rules
from tools.mutate_rules import ROOT
from tools.rule_mutations import MUTATIONS, Mutation


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def mutated(mutation: Mutation) -> str:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    return text.replace(mutation.old, mutation.new)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule)
def test_a_mutation_applies_once_and_its_test_exists(mutation: Mutation) -> None:
    assert mutate_rules.num_occurrences(mutation) == 1
    assert mutation.old != mutation.new
    ast.parse(mutated(mutation))  # a syntax error would fail any test
    file, _, name = mutation.test.partition("::")
    assert (ROOT / file).is_file()
    assert name.partition("[")[0] in functions_of(file)


def test_rules_have_names_of_their_own() -> None:
    names = [mutation.rule for mutation in MUTATIONS]
    assert len(set(names)) == len(names)


def test_a_stale_snippet_is_not_caught() -> None:
    stale = MUTATIONS[0]._replace(old="nowhere to be found")
    outcome = mutate_rules.try_mutation(stale)
    assert not outcome.is_caught
    assert outcome.how == "stale: snippet found 0 times"


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (0, (False, "passed")),
        (1, (True, "failed")),
        (4, (False, "pytest exited with 4")),
        (-11, (True, "SIGSEGV")),
        (None, (True, "timeout")),
    ],
)
def test_failures_crashes_and_hangs_count_and_pytests_own_errors_do_not(
    exit_code: int | None, expected: tuple[bool, str]
) -> None:
    assert mutate_rules.verdict(exit_code) == expected
