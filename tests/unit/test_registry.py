"""Where policies come from: installed packages (faked as files that pip leaves), modules, files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

import tvm_pager
from tests.interpreter import run_program
from tvm_pager.errors import PolicyError
from tvm_pager.planning import Policy, available_policies, load_policy
from tvm_pager.policies.lru import LRU

GOOD = """
    from tvm_pager.policies.lru import LRU

    class Mine(LRU):
        name = "mine"
    """

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Gives a function that leaves a module and its distribution's files where Python looks."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(
        distribution: str, module: str, code: str, points: dict[str, str] | None = None
    ) -> Path:
        monkeypatch.delitem(sys.modules, module, raising=False)
        file = tmp_path / f"{module}.py"
        file.write_text(dedent(code))
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = [f"{name} = {value}" for name, value in (points or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[tvm_pager.policies]", *lines]) + "\n")
        return file

    return install


# --- installed packages --------------------------------------------------------------------------


def test_an_installed_policy_is_found_by_its_name(install: Install) -> None:
    install("their-policies", "theirs_good", GOOD, {"theirs": "theirs_good:Mine"})
    assert "theirs" in available_policies()
    assert "theirs_good" not in sys.modules, "listing imports nothing"
    loaded = load_policy("theirs")
    assert issubclass(loaded, LRU)
    assert loaded.__module__ == "theirs_good"


def test_only_the_policy_that_is_asked_for_is_imported(install: Install) -> None:
    install("a", "theirs_a", GOOD, {"a": "theirs_a:Mine"})
    install("b", "theirs_b", "raise RuntimeError", {"b": "theirs_b:Mine"})
    load_policy("a")
    assert "theirs_b" not in sys.modules


def test_an_unknown_name_is_answered_with_the_built_in_and_the_installed_ones(
    install: Install,
) -> None:
    install("their-policies", "theirs", GOOD, {"zzz": "theirs:Mine"})
    with pytest.raises(PolicyError, match=r"no policy is called 'fifo'.* clock, .*lru, .*zzz"):
        load_policy("fifo")


def test_two_packages_with_one_name_are_both_named(install: Install) -> None:
    install("first-package", "theirs1", GOOD, {"twice": "theirs1:Mine"})
    install("other-package", "theirs2", GOOD, {"twice": "theirs2:Mine"})
    with pytest.raises(PolicyError, match=r"first-package and other-package; uninstall all but"):
        load_policy("twice")


def test_a_built_in_policy_cannot_be_replaced_silently(install: Install) -> None:
    install("better-lru", "theirs", GOOD, {"lru": "theirs:Mine"})
    with pytest.raises(PolicyError, match=r"'lru' is built in, but better-lru registers the same"):
        load_policy("lru")


@pytest.mark.parametrize(
    ("code", "value", "match"),
    [
        ("raise OSError('no disk')", "theirs_bad:Mine", "cannot be imported.*no disk"),
        ("raise SystemExit(3)", "theirs_bad:Mine", "cannot be imported.*SystemExit"),
        ("import torch_of_theirs", "theirs_bad:Mine", "No module named 'torch_of_theirs'"),
        ("x = (", "theirs_bad:Mine", "cannot be imported.*SyntaxError"),
        (GOOD, "theirs_bad:Absent", "has no attribute 'Absent'"),
        (GOOD, "theirs_bad", "is <module .*, not a subclass"),
        ("class Mine: pass", "theirs_bad:Mine", "not a subclass of tvm_pager.planning.Policy"),
        ("Mine = 7", "theirs_bad:Mine", "is 7, not a subclass"),
    ],
)
def test_a_broken_package_is_named_with_what_it_registers(
    install: Install, code: str, value: str, match: str
) -> None:
    install("bad-package", "theirs_bad", code, {"bad": value})
    with pytest.raises(PolicyError, match=f"(?s)policy 'bad' .*{match}") as caught:
        load_policy("bad")
    assert f"({value} of bad-package)" in str(caught.value)


def test_a_policy_that_cannot_be_made_without_arguments_is_refused(install: Install) -> None:
    code = GOOD + "\n        def __init__(self, seed): pass\n"
    install("bad-package", "theirs_seed", code, {"seeded": "theirs_seed:Mine"})
    with pytest.raises(PolicyError, match=r"one is made for each tier.*'seed'.*default"):
        load_policy("seeded")


# --- modules and files ---------------------------------------------------------------------------


def test_a_class_of_a_module_needs_no_registration(install: Install) -> None:
    install("a-package", "theirs_module", GOOD)
    assert load_policy("theirs_module:Mine") is load_policy("theirs_module:Mine")
    assert load_policy("theirs_module:Mine").name == "mine"
    assert load_policy("tvm_pager.policies.lru:LRU") is LRU


@pytest.mark.parametrize("form", ["mine.py", "./mine.py", "{}/mine.py"])
def test_a_class_of_a_file_needs_no_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (tmp_path / "mine.py").write_text(dedent(GOOD))
    monkeypatch.chdir(tmp_path)
    path_before = list(sys.path)
    loaded = load_policy(form.format(tmp_path) + ":Mine")
    assert loaded.name == "mine"
    assert loaded is load_policy("mine.py:Mine"), "one file is one module"
    assert sys.path == path_before
    assert sys.modules[loaded.__module__].__file__ == str(tmp_path / "mine.py")


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(dedent(GOOD).replace('"mine"', f'"{folder}"'))
    assert [load_policy(f"{tmp_path}/{f}/mine.py:Mine").name for f in "ab"] == ["a", "b"]


def test_a_file_that_failed_can_be_repaired_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise ValueError('not yet')")
    with pytest.raises(PolicyError, match=r"mine.py:Mine' cannot be imported: ValueError\('not y"):
        load_policy(f"{file}:Mine")
    file.write_text(dedent(GOOD) + "\n# longer than what any cache may hold\n")
    assert load_policy(f"{file}:Mine").name == "mine"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("{}/absent.py:Mine", "there is no file .*absent.py"),
        ("{}:Mine", "there is no module|there is no file"),
        ("{}/mine.py", r"name a class of the file, such as '.*mine.py:Mine'"),
        ("{}/mine.py:", r"name a class of the file, such as '.*mine.py:Mine'"),
        ("{}/empty.py", r"name a class of the file, such as '.*empty.py:Mine'"),
        ("{}/mine.py:Other", "has no 'Other'; its policies: Mine"),
        ("{}/empty.py:Other", "has no 'Other'; its policies: none"),
        ("{}/mine.py:Page", "not a subclass of tvm_pager.planning.Policy"),
        ("no_such_module:Mine", r"no module 'no_such_module'.*path.*no_such_module.py:Mine'"),
        ("tvm_pager.policies.lru:LFU", "has no 'LFU'; its policies: LRU"),
        (":Mine", "name a module or a file"),
        ("a b:Mine", "there is no module 'a b'"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "mine.py").write_text(dedent(GOOD) + "\nclass Page: pass\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(PolicyError, match=match):
        load_policy(name.format(tmp_path))


def test_a_pager_takes_a_file_as_its_policy(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(dedent(GOOD))
    options = {"device": "1MiB", "host": "2MiB", "torch_device": "cpu"}
    with tvm_pager.Pager(policy=f"{file}:Mine", **options) as pager:  # type: ignore[arg-type]
        assert [p.policy.name for p in pager._core.policies.values()] == ["mine", "mine"]
    with pytest.raises(PolicyError, match="has no 'Other'"):
        tvm_pager.Pager(policy=f"{file}:Other", **options)  # type: ignore[arg-type]


def test_the_command_line_takes_a_file_beside_the_caller(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(dedent(GOOD) + "\nprint('mine')\n")
    (tmp_path / "script.py").write_text("import torch; print(torch.ones(3).sum().item())")
    program = (
        "import os, sys; os.chdir(sys.argv[1]); from tvm_pager.cli import main\n"
        "sys.exit(main(['run', '--policy', 'mine.py:Mine', '--device', '1MiB', '--host', '2MiB',"
        "'--torch-device', 'cpu', 'script.py']))"
    )
    result = run_program(program, tmp_path)
    assert (result.returncode, result.stdout) == (0, "mine\n3.0\n"), result.stderr


def test_every_built_in_policy_can_be_loaded_and_says_where_it_comes_from() -> None:
    for name in available_policies():
        policy = load_policy(name)
        assert issubclass(policy, Policy)
        assert policy.name == name
        assert sys.modules[policy.__module__].__doc__
