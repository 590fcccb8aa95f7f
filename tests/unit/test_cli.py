"""The command line: scripts run as python runs them, mistakes get one line, a table comes last."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tvm_pager.observe import format_stats

OPTIONS = ["--torch-device", "cpu", "--device", "64MiB", "--host", "64MiB"]


def tvm_pager(*arguments: str, cwd: Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, in a directory without the sources."""
    command = [sys.executable, "-m", "tvm_pager.cli", *arguments]
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        command,
        cwd=cwd,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **kwargs,
    )


def run_script(
    tmp_path: Path, source: str, *arguments: str, options: list[str] | None = None
) -> Any:
    (tmp_path / "script.py").write_text(source)
    options = OPTIONS if options is None else options
    return tvm_pager("run", *options, "script.py", *arguments, cwd=tmp_path)


SHOW_PLACE = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"),
    "spec": getattr(globals().get("__spec__"), "name", None), "doc": __doc__,
    "is_main": globals() is vars(sys.modules["__main__"]),
}))
"""


def places(tmp_path: Path, script: list[str]) -> list[Any]:
    """Gives what the script saw under python and under `tvm-pager run`."""
    plain = subprocess.run(
        [sys.executable, *script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    paged = tvm_pager("run", *OPTIONS, "--no-table", *script, cwd=tmp_path)
    assert paged.returncode == 0, paged.stderr
    return [json.loads(result.stdout) for result in (plain, paged)]


@pytest.mark.parametrize("folder", ["", "sub"])
def test_a_script_sees_the_world_that_python_would_show_it(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    script = Path(folder) / "place.py"
    (tmp_path / script).write_text(SHOW_PLACE)
    # Options behind the script are the script's own, also those that we know.
    plain, paged = places(tmp_path, [str(script), "--lr", "3", "--device", "1", "--", "-m", "x"])
    assert paged == plain


def test_a_linked_script_imports_from_where_the_link_points(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "place.py").write_text(SHOW_PLACE)
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "place.py")
    plain, paged = places(tmp_path, ["link.py"])
    assert paged == plain


def test_a_module_sees_the_world_that_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text(SHOW_PLACE)
    plain, paged = places(tmp_path, ["-m", "package.inner", "--flag", "-m"])
    assert paged == plain


def test_directories_and_archives_with_a_main_run(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import beside; print(beside.NAME, __name__)")
    (tmp_path / "app" / "beside.py").write_text("NAME = 'beside'")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        for path in (tmp_path / "app").iterdir():
            archive.write(path, path.name)
    for target in ("app", "app.pyz"):
        result = tvm_pager("run", *OPTIONS, target, cwd=tmp_path)
        assert (result.returncode, result.stdout) == (0, "beside __main__\n"), result.stderr


def test_tensors_of_an_unmodified_script_are_pages(tmp_path: Path) -> None:
    source = """
import torch
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(4, 512)).sum().backward()
    optimizer.step()
print(type(model.weight).__name__, isinstance(model.weight, torch.nn.Parameter))
"""
    result = run_script(tmp_path, source, options=["--torch-device", "cpu", "--device", "5MiB"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(" True\n")
    table = result.stderr
    assert re.search(r"^device +5\.00 MiB +[\d.]+ MiB", table, re.MULTILINE), table
    num_pages = re.search(r"([\d,]+) pages", table)
    assert num_pages is not None
    assert int(num_pages[1].replace(",", "")) > 0


@pytest.mark.parametrize(
    ("source", "exit_code", "message"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("import os; os.environ['X'] = 'y'", 0, ""),
    ],
)
def test_the_script_decides_the_exit_code(
    tmp_path: Path, source: str, exit_code: int, message: str
) -> None:
    result = run_script(tmp_path, source, options=[*OPTIONS, "--no-table"])
    assert (result.returncode, result.stderr) == (exit_code, message)


def test_an_exception_shows_the_scripts_own_traceback_then_the_table(tmp_path: Path) -> None:
    source = "def f():\n    return 1 / 0\n\n\nf()\n"
    paged = run_script(tmp_path, source)
    plain = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert paged.returncode == plain.returncode == 1
    assert paged.stderr.startswith(plain.stderr)
    assert "tier" in paged.stderr.removeprefix(plain.stderr)


def test_a_syntax_error_reads_as_in_python(tmp_path: Path) -> None:
    paged = run_script(tmp_path, "x = (\n", options=[*OPTIONS, "--no-table"])
    assert paged.returncode == 1
    assert 'script.py", line 1' in paged.stderr
    assert "SyntaxError: '(' was never closed" in paged.stderr
    assert "tvm_pager" not in paged.stderr


def test_the_scripts_own_exception_hook_is_called(tmp_path: Path) -> None:
    source = "import sys\nsys.excepthook = lambda kind, *_: print('hook', kind.__name__)\n1 / 0\n"
    result = run_script(tmp_path, source, options=[*OPTIONS, "--no-table"])
    assert (result.returncode, result.stdout) == (1, "hook ZeroDivisionError\n")


def test_threads_of_the_script_may_use_pages_after_its_last_line(tmp_path: Path) -> None:
    source = """
import threading, time, torch
x = torch.ones(8)
def later():
    time.sleep(0.3)
    print((x + 1).sum().item())
threading.Thread(target=later).start()
"""
    result = run_script(tmp_path, source)
    assert (result.returncode, result.stdout) == (0, "16.0\n"), result.stderr


def test_objects_of_the_script_can_be_pickled(tmp_path: Path) -> None:
    source = """
import dataclasses, pickle
@dataclasses.dataclass
class Point:
    x: int
print(pickle.loads(pickle.dumps(Point(3))).x)
"""
    result = run_script(tmp_path, source)
    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["run", "missing.py"], "missing.py"),
        (["run", "--device", "4QiB", "script.py"], "4QiB"),
        (["run", "--device", "0", "script.py"], "device"),
        (["run", "--engine", "warp", "script.py"], "warp"),
        (["run", "--policy", "nobody", "script.py"], "nobody"),
        (["run", "--config", "missing.json", "script.py"], "missing.json"),
        (["run", "--config", "bad.json", "script.py"], "bad.json"),
        (["run", "--config", "unknown.json", "script.py"], "devise"),
        (["run", "--nvme", "missing", "script.py"], "missing"),
        (["run", "--check", "3", "script.py"], "3"),
        (["run"], "script"),
        (["walk"], "walk"),
        (["demo", "--steps", "0"], "--steps 0"),
        (["demo", "--device", "much"], "much"),
        (["demo", "--nvme", "missing"], "--nvme missing"),
        (["demo", "--json", "missing/x.json"], "--json"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], mentions: str
) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "unknown.json").write_text('{"devise": "4GiB"}')
    result = tvm_pager(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tvm-pager: error: ")
    assert result.stderr.count("\n") == 1
    assert mentions in result.stderr


def test_a_config_file_gives_options_and_the_command_line_beats_it(tmp_path: Path) -> None:
    config = {"torch_device": "cpu", "device": "40MiB", "host": "48MiB"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--config", "config.json", "--host", "56MiB"]
    result = run_script(tmp_path, "", options=options)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^device +40\.00 MiB", result.stderr, re.MULTILINE)
    assert re.search(r"^host +56\.00 MiB", result.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["verify", "--help"], ["demo", "--help"]]
)
def test_help_comes_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    program = (
        "import sys\nfrom tvm_pager.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    root = str(Path(__file__).resolve().parents[2])
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": root},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "usage: tvm-pager" in result.stdout


def test_version_names_the_program(tmp_path: Path) -> None:
    result = tvm_pager("--version", cwd=tmp_path)
    assert result.returncode == 0
    assert re.fullmatch(r"tvm-pager \d+\.\d+\.\d+\n", result.stdout)


class FakeStats:
    """Counters as a pager gives them."""

    def __init__(self, **changes: Any) -> None:
        self.values: dict[str, Any] = {
            "device_budget_bytes": 4 * 2**30,
            "device_peak_bytes": 3 * 2**30,
            "host_budget_bytes": 2**30,
            "host_peak_bytes": 2**30,
            "nvme_budget_bytes": 0,
            "nvme_peak_bytes": 0,
            "bytes_by_lane": {"d2h": 5 * 2**20, "h2d": 0, "h2n": 0, "n2h": 0, "d2n": 0, "n2d": 0},
            "num_faults": 1234,
            "num_evictions": 10,
            "num_write_backs": 7,
            "num_clean_evictions": 4,
            "stall_s": 1.5,
            "num_pages": 99,
            "num_operations": 1000,
            "num_policy_errors": 0,
            "notices": [],
            "engine": "posix",
            **changes,
        }

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_the_table_sets_peaks_against_budgets() -> None:
    assert format_stats(FakeStats()).split("\n") == [
        "tvm_pager: 1,000 operations, 99 pages, engine posix",
        "tier      budget      peak    used",
        "device  4.00 GiB  3.00 GiB   75.0%",
        "host    1.00 GiB  1.00 GiB  100.0%",
        "nvme        none       0 B",
        "lane               moved",
        "device -> host  5.00 MiB",
        "host -> device       0 B",
        "faults: 1,234; evictions: 10 (4 clean, 6 dirty); write-backs: 7; stalled for 1.50 s",
    ]


def test_the_table_copes_without_budgets_and_tells_what_went_wrong() -> None:
    stats = FakeStats(
        device_budget_bytes=None,
        device_peak_bytes=0,
        bytes_by_lane={"n2h": 2048},
        num_policy_errors=2,
        notices=["one thing", "another"],
    )
    table = format_stats(stats)
    assert re.search(r"^device +no limit +0 B$", table, re.MULTILINE)
    assert re.search(r"^nvme -> host +2\.00 KiB$", table, re.MULTILINE)
    assert "policy errors: 2" in table
    assert table.endswith("notice: one thing\nnotice: another")


AT_THE_END = """
import atexit, sys, torch, tvm_pager
close = tvm_pager.Pager.close
def told(pager, **options):
    if not pager.closed:
        print("restore", options.get("restore", True))
    close(pager, **options)
tvm_pager.Pager.close = told
weights = [torch.full((512, 512), float(i)) for i in range(64)]
if "handler" in sys.argv:
    atexit.register(lambda: print(sum(float(w[0, 0]) for w in weights)))
"""


def test_nothing_is_read_back_at_the_end_unless_an_exit_handler_may_want_it(tmp_path: Path) -> None:
    """More live bytes than the device holds must not make the end of a script slow, or fail."""
    options = ["--torch-device", "cpu", "--device", "8MiB", "--host", "80MiB"]
    plain = run_script(tmp_path, AT_THE_END, options=options)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout == "restore False\n"
    handled = run_script(tmp_path, AT_THE_END, "handler", options=options)
    assert handled.returncode == 0, handled.stderr
    assert handled.stdout == f"restore True\n{float(sum(range(64)))}\n"
