"""Section D of the trials, trial 37: whatever state kvikio is in, a pager opens and says which
engine it took, and why.

Each case is a process of its own, because kvikio reads its environment once, at the import. For all
but the last test the package is a stand-in, and the GPU for all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.interpreter import run_program
from tests.unit.test_kvikio_store import _DRIVER_NAMES, _DRIVER_SOURCE

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow  # one process, and a fork of it for each case

# What the pager uses of kvikio, on the calls of the system. Like the real one it reads the mode
# at the import; without the compatibility mode it would need a GPU.
WORKING = """
import enum, os, threading
from kvikio import defaults

class CompatMode(enum.Enum):
    OFF, ON, AUTO = range(3)

defaults.SETTINGS["compat_mode"] = CompatMode[os.environ.get("KVIKIO_COMPAT_MODE", "AUTO")]

class Future:
    def __init__(self, future): self.future = future
    def done(self): return self.future.done()
    def get(self): return self.future.result()

class CuFile:
    def __init__(self, path, flags):
        if defaults.SETTINGS["compat_mode"] is not CompatMode.ON:
            raise RuntimeError("cuFile: no GPU")
        self.fd, self.closed = os.open(path, os.O_RDWR), False
    def pwrite(self, array, nbytes, offset):
        return Future(defaults.start(os.pwrite, self.fd, array.data, offset))
    def pread(self, array, nbytes, offset):
        return Future(defaults.start(os.preadv, self.fd, [array.data], offset))
    def close(self):
        os.close(self.fd)
        self.closed = True
"""
DEFAULTS = """
import threading
from concurrent.futures import ThreadPoolExecutor

SETTINGS = {"num_threads": 1}
LOCK, RUNNING, MOST = threading.Lock(), [], [0]

def set(settings):
    SETTINGS.update(settings)

def start(call, *args, made=[]):
    with LOCK:
        if not made:
            made.append(ThreadPoolExecutor(SETTINGS["num_threads"]))
    return made[0].submit(run, call, *args)

def run(call, *args):
    with LOCK:
        RUNNING.append(1)
        MOST[0] = max(MOST[0], len(RUNNING))
    try:
        return call(*args)
    finally:
        with LOCK:
            RUNNING.pop()
"""

# One process that has torch; each case is a fork of it.
PROGRAM = """
import gc, json, os, sys, threading, traceback
import torch
import tvm_pager
from tvm_pager.errors import ConfigError
from tvm_pager.transfer import block_store, gpu_direct, kvikio, torch_backend
from tvm_pager.transfer.swap_file import SwapFile

assert "kvikio" not in sys.modules, "importing tvm_pager must not import it"
real = block_store.open_block_store

def on_a_gpu_machine(file, engine, *, on_gpu, num_threads):
    return real(file, engine, on_gpu=True, num_threads=num_threads)

def train(pager):
    pages = [torch.full((4096,), float(i)) for i in range(64)]  # 1 MiB
    barrier = threading.Barrier(64)

    def work(i):
        barrier.wait()
        pages[i].add_(1000)

    in_threads(work)
    pager.evict_all()
    wrong = [i for i in range(64) if not bool((pages[i] == 1000 + i).all())]
    pager.check_invariants()
    return wrong

def write(store):
    wrong, barrier = [], threading.Barrier(64)

    def work(i):
        data = memoryview(bytearray([i]) * 100_003)
        barrier.wait()
        store.write(i * (104 << 10), [data]).wait()
        back = memoryview(bytearray(100_003))
        store.read(i * (104 << 10), [back]).wait()
        if back != data:
            wrong.append(i)

    in_threads(work)
    return wrong

def in_threads(work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

def run(swap, engine, driver, prelude):
    exec(prelude)
    torch_backend.open_block_store = on_a_gpu_machine
    gpu_direct.is_offered = lambda: (False, "there is none")
    kvikio._DRIVER = driver
    options = {"device": "256KiB", "host": "512KiB", "nvme": swap, "nvme_bytes": "16MiB"}
    try:
        pager = tvm_pager.Pager(**options, torch_device="cpu", segment_bytes="4KiB", engine=engine)
    except ConfigError as error:
        return {"refused": str(error)}
    with pager:
        wrong = train(pager)
        stats = pager.stats()
    file = SwapFile(swap, 8 << 20, margin_bytes=0)
    store, _ = real(file, engine, on_gpu=True)
    wrong += write(store)
    store.close()
    file.close()
    moved = stats.bytes_by_lane["d2n"] + stats.bytes_by_lane["h2n"]
    told = {"engine": stats.engine, "notices": stats.notices, "moved": moved, "wrong": wrong}
    told |= {"failures": stats.num_failures}
    defaults = sys.modules.get("kvikio.defaults")
    if hasattr(defaults, "MOST"):
        mode = str(defaults.SETTINGS["compat_mode"])
        told |= {"mode": mode, "most": defaults.MOST[0]}
    return told

gc.collect()
gc.freeze()  # torch's objects: a fork that walks them copies them
told = {}
for name, case in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = json.dumps(run(**case))
        except BaseException:
            text = json.dumps({"error": traceback.format_exc()[-3000:]})
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told[name] = json.loads(text) if text else {"error": f"the process ended with {status}"}
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Case:
    """A state of kvikio: its files, the environment, what ran before, and the engine asked for."""

    package: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # that is to be told
    engine: str = "auto"
    mode: str | None = None  # KVIKIO_COMPAT_MODE
    driver: str = "libc.so.6"  # taken for the one of CUDA
    prelude: str = ""


def run_cases(cases: dict[str, Case], folder: Path) -> dict[str, dict[str, Any]]:
    """What a pager said in each case."""
    asked = {}
    for number, (name, case) in enumerate(cases.items()):
        site, swap = folder / f"site{number}", folder / f"swap{number}"
        swap.mkdir()
        site.mkdir()
        for file, text in case.package.items():
            (site / "kvikio").mkdir(exist_ok=True)
            (site / "kvikio" / file).write_text(text)
        lines = [f"sys.path.insert(0, {str(site)!r})", "os.environ.pop('KVIKIO_COMPAT_MODE', None)"]
        if case.mode is not None:
            lines.append(f"os.environ['KVIKIO_COMPAT_MODE'] = {case.mode!r}")
        prelude = "\n".join([*lines, case.prelude])
        asked[name] = {"swap": str(swap), "engine": case.engine, "driver": case.driver}
        asked[name]["prelude"] = prelude
    result = run_program(PROGRAM, timeout=250, input=json.dumps(asked))
    assert result.returncode == 0, result.stderr[-2000:]
    told: dict[str, dict[str, Any]] = json.loads(result.stdout)
    for name, answer in told.items():
        assert "error" not in answer, f"{name}: {answer['error']}"
        assert os.listdir(asked[name]["swap"]) == []
    return told


def assert_served(told: dict[str, Any], engine: str) -> None:
    assert told["engine"].startswith((f"{engine} (direct), write ", f"{engine} (buffered), write "))
    assert "GB/s" in told["engine"]
    assert told["wrong"] == []
    assert told["moved"] > 0, "nothing went to the disk"
    assert told["failures"] == 0


DEADLY = {"__init__.py": "import os; os._exit(9)"}
PACKAGE = {"__init__.py": WORKING, "defaults.py": DEFAULTS}
UNUSABLE = {
    "absent": Case(
        reason="the package kvikio is not installed", prelude="sys.modules['kvikio'] = None"
    ),
    "a library is missing": Case(
        {"__init__.py": "raise OSError('libcufile.so.0: cannot open shared object file')"},
        "importing kvikio failed (OSError: libcufile.so.0: cannot open",
    ),
    "wrong version": Case(
        {"__init__.py": "raise ImportError('needs numpy < 2')"},
        "importing kvikio failed (ImportError: needs numpy < 2)",
    ),
    "its workers assert": Case(
        {"__init__.py": "assert 0, 'worker 3'"},
        "importing kvikio failed (AssertionError: worker 3)",
    ),
    "half installed": Case({"version.py": ""}, "importing kvikio failed (ModuleNotFoundError"),
    "a stand-in without files": Case(
        reason="importing kvikio failed (",
        prelude="import types; sys.modules['kvikio'] = types.ModuleType('kvikio')",
    ),
    "cannot open files": Case(
        {
            **PACKAGE,
            "__init__.py": WORKING.replace('SETTINGS["compat_mode"] is not', "LOCK is not"),
        },
        "cuFile: no GPU",
    ),
    "no driver": Case(
        DEADLY, "no CUDA driver (libno_such_driver.so", driver="libno_such_driver.so"
    ),
}
MODES = ["unset", "ON", "OFF", "AUTO", "sideways"]
BY_NAME = {f"{name}, asked for": replace(case, engine="kvikio") for name, case in UNUSABLE.items()}
USABLE = {mode: Case(PACKAGE, mode=None if mode == "unset" else mode) for mode in MODES} | {
    "asked for": Case(PACKAGE, engine="kvikio", mode="AUTO"),
    "imported before": Case(PACKAGE, mode="OFF", prelude="import kvikio"),
}
ALL = {**UNUSABLE, **BY_NAME, **USABLE, "posix": Case(DEADLY, engine="posix")}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases(ALL, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_kvikio_that_cannot_be_used_is_replaced_by_posix_with_one_notice(
    name: str, told: dict[str, dict[str, Any]]
) -> None:
    assert_served(told[name], "posix")
    (notice,) = told[name]["notices"]
    assert notice.startswith("NVMe engine posix instead of kvikio: ")
    assert UNUSABLE[name].reason in notice


@pytest.mark.parametrize("name", BY_NAME)
def test_a_kvikio_that_was_asked_for_and_cannot_be_used_is_refused_with_the_remedy(
    name: str, told: dict[str, dict[str, Any]]
) -> None:
    refused = told[name]["refused"]
    assert refused.startswith("engine='kvikio' cannot be used: ")
    assert BY_NAME[name].reason in refused
    assert "engine='posix'" in refused


@pytest.mark.parametrize("name", USABLE)
def test_the_compatibility_mode_is_on_whatever_the_environment_says(
    name: str, told: dict[str, dict[str, Any]]
) -> None:
    """Without GPUDirect another mode helps nobody, and may spin for ever in a virtual machine."""
    assert_served(told[name], "kvikio")
    assert told[name]["notices"] == []
    assert told[name]["mode"] == "CompatMode.ON"
    assert 1 < told[name]["most"] <= 4, "its threads are capped, although 64 write"


def test_posix_does_not_look_at_kvikio(told: dict[str, dict[str, Any]]) -> None:
    assert_served(told["posix"], "posix")
    assert told["posix"]["notices"] == []


@pytest.mark.skipif(find_spec("kvikio") is None, reason="the package kvikio is not installed")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the stand-in driver")
def test_the_real_kvikio_serves_in_each_mode(tmp_path: Path) -> None:
    names = "".join(f"int cu{name}(void) {{ return 3; }}\n" for name in _DRIVER_NAMES.split())
    (tmp_path / "driver.c").write_text(_DRIVER_SOURCE + names)
    driver = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(driver)]
    subprocess.run([*command, str(tmp_path / "driver.c")], check=True, timeout=60)
    load = f"import ctypes; ctypes.CDLL({str(driver)!r}, mode=ctypes.RTLD_GLOBAL)"
    modes = ("ON", "OFF", "AUTO")
    cases = {mode: Case(mode=mode, driver="libcuda.so.1", prelude=load) for mode in modes}
    for answer in run_cases(cases, tmp_path).values():
        assert_served(answer, "posix" if answer["notices"] else "kvikio")
        assert all("instead of kvikio: " in notice for notice in answer["notices"])
