"""docs/policies.md is true: its commands print what it shows, and its tables are complete."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tools import run_docs
from tvm_pager.planning import Action, PageView, Policy, View, available_policies, load_policy

DOCUMENT = run_docs.ROOT / "docs" / "policies.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_prints_what_is_shown_and_the_package_registers_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_docs.run(DOCUMENT, tmp_path)
    assert not found, "\n".join(f"{DOCUMENT.name}:{line}: {what}" for line, what in found)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / "stale_policy-1.0.dist-info"  # as `pip install` leaves it
    info.mkdir()
    name, version = project["name"], project["version"]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = [f"{k} = {v}" for k, v in project["entry-points"]["tvm_pager.policies"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[tvm_pager.policies]", *points]))
    monkeypatch.syspath_prepend(tmp_path)
    assert load_policy("stale").name == "stale"
    del sys.modules["mine"]


def rows(heading: str) -> list[str]:
    """What stands first in each row of the table under a heading."""
    section = TEXT.split(f"### {heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


def test_the_table_of_built_in_policies_is_complete() -> None:
    assert sorted(rows("Built-in policies")) == available_policies()


def test_every_method_every_view_and_every_action_is_described() -> None:
    methods = {row.partition("(")[0] for row in rows("Methods")}
    assert methods == {name for name in vars(Policy) if not name.startswith("_")}
    views = {row.removeprefix("view.").partition("(")[0] for row in rows("What a View shows")}
    assert views == {n for n in vars(View) if not n.startswith("_")} - {"operation_index"}
    for field in PageView._fields[1:]:
        assert f"`{field}`" in TEXT
    actions = {row.partition("(")[0] for row in rows("What a plan is made of")}
    assert actions == {action.__name__ for action in Action.__args__}  # type: ignore[attr-defined]
