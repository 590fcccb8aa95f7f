"""Documents are run as they stand: what they show and what happens are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import run_docs
from tools.run_docs import blocks, commands, main, matches

DOCUMENT = """
# Title
<!-- file: sub/a.py -->

```python
print("one", 100)
```
```toml
x = 1
```
<!-- not run: it would never end -->
```console
$ sleep infinity
```
```console
$ python sub/a.py; \\
> echo two
one 100
two
$ true
```
```python
import sub.a
```
"""


def differences(text: str, tmp_path: Path) -> list[run_docs.Difference]:
    document = tmp_path / "doc.md"
    document.write_text(text)
    directory = tmp_path / "work"
    directory.mkdir()
    return run_docs.run(document, directory)


def test_what_is_as_shown_passes(tmp_path: Path) -> None:
    assert differences(DOCUMENT, tmp_path) == []
    kinds = [(block.language, block.file, block.is_shown_only) for block in blocks(DOCUMENT)]
    assert kinds == [
        ("python", "sub/a.py", False),
        ("toml", None, False),
        ("console", None, True),
        ("console", None, False),
        ("python", None, False),
    ]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("one 100\ntwo", "one 150\ntwo", "prints (exit code 0):\none 100"),
        ("one 100\ntwo", "one 100", "prints (exit code 0):\none 100"),
        ("$ true", "$ false", "ends with exit code 1"),
        ("import sub.a", "import sub.b", "No module named 'sub.b'"),
        ('print("one", 100)', "print(1 / 0)", "ZeroDivisionError"),
    ],
)
def test_what_is_not_as_shown_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, what: str
) -> None:
    text = DOCUMENT.replace(old, new)
    assert text != DOCUMENT
    found = differences(text, tmp_path)
    assert found
    assert what in found[0].what
    assert 0 < found[0].line <= len(text.splitlines())


@pytest.mark.parametrize(
    ("expected", "actual", "is_equal"),
    [
        (["a  b"], "a b\n", True),
        (["step 1,000 ms"], "step 1,099 ms", True),
        (["step 1,000 ms"], "step 1,101 ms", False),
        (["0 B"], "0 B", True),
        (["0 B"], "1 B", False),
        (["a", "...", "z"], "a\nb 7\nc\nz", True),
        (["a", "...", "z"], "a\nb\ny", False),
        (["took ... s", "8 x"], "took 3.7 s\n8 x", True),
        (["[x]"], "[y]", False),
        (["a"], "a\nb", False),
    ],
)
def test_numbers_may_be_off_and_dots_stand_for_anything(
    expected: list[str], actual: str, is_equal: bool
) -> None:
    assert matches(expected, actual) is is_equal


def test_the_new_output_can_be_written_into_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "doc.md"
    shown = "```console\n$ echo 7\n8\n9\n$ echo a b\na ... c\n```\nend\n"
    document.write_text(shown)
    assert main([str(document), "--write"]) == 1
    assert f"{document}:2: $ echo 7" in capsys.readouterr().out
    assert document.read_text() == shown.replace("8\n9\n", "7\n")


def test_output_needs_a_command() -> None:
    block = next(blocks("```console\nwhat?\n```"))
    with pytest.raises(ValueError, match="line 2: output without a command"):
        list(commands(block))
