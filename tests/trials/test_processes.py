"""Processes that end at any moment, and processes that are forked while pages are on the move.

The programs run in interpreters of their own. Where many ends are tried, one interpreter forks a
child for each, before there is a pager.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.interpreter import run_program
from tests.trials.harness import spill_folder

if TYPE_CHECKING:
    from pathlib import Path

WATCHDOG_S = 60
NUM_SEEDS = 2

# --- ends ---

ENDS = """
import faulthandler, json, os, random, signal, sys, time
import torch, torch._dynamo, tvm_pager  # once, and not in each child
from tests.trials.harness import Run, mlp, train
torch.set_num_threads(1)
spill, logs, watchdog_s, num_seeds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
signals = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "exit": signal.SIGALRM,
           "error": signal.SIGALRM}

class Planned(Exception):
    pass

def run(how, seed):
    ready, is_ready = os.pipe()
    child = os.fork()
    if not child:
        return is_ready
    os.close(is_ready)
    os.read(ready, 1)  # it trains
    os.close(ready)
    time.sleep(random.Random(seed).random() * 0.4)
    os.kill(child, signals[how])
    deadline = time.monotonic() + watchdog_s
    pid = 0
    while not pid:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
        if not pid and time.monotonic() > deadline:
            os.kill(child, signal.SIGABRT)  # its stacks go to the log
    result = {"how": how, "code": os.waitstatus_to_exitcode(status), "left": os.listdir(spill),
              "text": open(f"{logs}/{how}{seed}").read()}
    print(json.dumps(result), flush=True)

for how, seed in [(how, seed) for how in signals for seed in range(num_seeds)]:
    is_ready = run(how, seed)
    if is_ready is not None:
        break
else:
    os._exit(0)

# The child: an ordinary program, which ends as Python programs do.
os.dup2(os.open(f"{logs}/{how}{seed}", os.O_CREAT | os.O_WRONLY), 2)
faulthandler.enable()

def at_time_limit(signum, frame):
    if how == "exit":
        sys.exit(3)
    raise Planned("at a random moment")

signal.signal(signal.SIGALRM, at_time_limit)
pager = tvm_pager.Pager(device="76KiB", host="256KiB", nvme=spill, nvme_bytes="16MiB",
                        torch_device="cpu", engine="posix", segment_bytes="4KiB")
model = mlp(8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def go():
    pager.page(model, optimizer)
    train(Run(pager), model, optimizer, steps=1)
    assert pager.stats().nvme_peak_bytes > 0
    os.write(is_ready, b"x")
    while True:
        train(Run(pager), model, optimizer, steps=1)

if seed % 2:
    with pager:
        go()
go()  # and the pager is never closed
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Exit code, standard error and what lies in the swap directory, of programs in training."""
    folder = tmp_path_factory.mktemp("ends")
    done = run_program(ENDS, spill_folder(folder), folder, WATCHDOG_S, NUM_SEEDS, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("kill", -signal.SIGKILL, None),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("exit", 3, None),
        ("error", 1, "Planned: at a random moment"),
    ],
)
def test_a_program_that_ends_at_any_moment_ends_as_without_a_pager(
    how: str, code: int, last: str | None, ends: list[dict[str, object]]
) -> None:
    """Python's own exit code and one traceback or none; nothing on the disk, nobody who hangs."""
    mine = [end for end in ends if end["how"] == how]
    assert len(mine) == NUM_SEEDS
    for end in mine:
        text = str(end["text"])
        assert end["code"] == code, text
        assert end["left"] == []
        assert text.count("Traceback") == (last is not None), text
        assert "ignored" not in text
        assert not last or text.splitlines()[-1].endswith(last), text
        assert last or not text


# --- forks ---

SETTING = """
import faulthandler, gc, logging, multiprocessing, os, sys, threading, time, traceback
import pytest, torch, tvm_pager
from pathlib import Path
from torch.utils.data import DataLoader
from tests.leaks import pager_files, pager_threads
from tests.trials.harness import *
from tests.trials.worker_data import Squares, negated, seen
torch.set_num_threads(1)
logging.disable()
tmp_path = Path(sys.argv[1])

class Training:
    def __init__(self, run):
        seed_all(0)
        self.run, self.number = run, 0
        self.model = mlp(8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self):
        train(self.run, self.model, self.optimizer, steps=1, first=self.number)
        self.number += 1

    def assert_right(self):
        with torch._C._DisableTorchDispatch():
            expected = states[self.number]
        assert_equal(expected, frozen(everything(self.model, self.optimizer), version=False))

plain, states = Training(Run(None)), []
for _ in range(9):
    states.append(frozen(everything(plain.model, plain.optimizer), version=False))
    plain.step()

def in_child(f):
    # Runs it in a forked child, which ends there; its text if it failed. Nobody waits for ever.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            f()
            os.write(write, b"well")
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert (status, text) == (0, "well"), f"{f.__name__}: {status} {text}"
"""


def run_or_fail(program: str, *arguments: object) -> None:
    done = run_program(SETTING + program, *arguments, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert (done.stdout, done.stderr) == ("done\n", "")


FORKS = """
with small_pager(tmp_path, device=76 * KIB) as pager:
    training = Training(Run(pager))
    training.step()
    parameters = list(training.model.parameters())
    raw_reads = (lambda p: p.tolist(), lambda p: p.data_ptr(), lambda p: p.detach().numpy(),
                 lambda p: p.untyped_storage(), pager.recover)

    def finds_it_closed():
        assert pager.closed and not pager_threads() and not pager_files()
        pager.close()
        pager.stats()
        for refused in (lambda: pager.page(training.model), pager.evict_all, pager.__enter__):
            with pytest.raises(tvm_pager.PagerClosedError):
                refused()

    def reads():
        for parameter, here in zip(parameters, is_here):
            for read in (torch.sum, lambda p: torch.tanh(p) * p, *raw_reads):
                if here:
                    read(parameter)
                    continue
                with pytest.raises(tvm_pager.PagerClosedError, match="Page .* fork.*'spawn'"):
                    read(parameter)

    def writes():
        with torch.no_grad():
            for parameter, here in zip(parameters, is_here):
                if here:
                    parameter.add_(1.0).mul_(torch.ones(1))

    def makes_no_pages():
        kept = [torch.full((4096,), float(i)) for i in range(64)]  # far more than the budget
        assert {type(tensor) for tensor in kept} == {torch.Tensor}
        fresh = Training(Run(None))
        fresh.step()
        fresh.assert_right()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

    def opens_its_own():
        with small_pager(tmp_path, device=76 * KIB) as own:
            fresh = Training(Run(own))
            fresh.step()
            assert own.stats().nvme_peak_bytes > 0
            fresh.assert_right()

    for f in (finds_it_closed, reads, writes, makes_no_pages, opens_its_own):
        (parameters[0] + parameters[2]).sum()
        is_here = [pager.residency(p).name == "DEVICE" for p in parameters]
        assert any(is_here) and not all(is_here)
        in_child(f)
        pager.check_invariants()
        training.assert_right()
    training.step()
    training.assert_right()
    del training, parameters
assert_nothing_left(tmp_path)
print("done")
"""


def test_a_forked_child_has_no_pager_and_touches_nothing_of_its_parent(tmp_path: Path) -> None:
    """What was on the device is plain memory in the child, the rest is refused by name."""
    run_or_fail(FORKS, tmp_path)


LEAVING = """
child = None
with small_pager(tmp_path, device=76 * KIB) as pager:
    training = Training(Run(pager))
    training.step()
    for how in ("end", "exit", "error"):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            break
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == {"end": 0, "exit": 3, "error": 1}[how]
        training.step()
        training.assert_right()
    if not child:
        os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)
        if how == "exit":
            sys.exit(3)
        if how == "error":
            raise ValueError("of the child")
    del training
if child:
    assert_nothing_left(tmp_path)
    text = (tmp_path / "log").read_text()
    assert text.count("Traceback") == 1, text
    assert text.splitlines()[-1] == "ValueError: of the child", text
    print("done")
"""


def test_a_forked_child_may_leave_the_context_and_end_as_programs_do(tmp_path: Path) -> None:
    run_or_fail(LEAVING, tmp_path)


BUSY = """
with small_pager(tmp_path, device=76 * KIB) as pager:
    training = Training(Run(pager))
    stop = threading.Event()
    others = [torch.ones(1024) for _ in range(64)]
    square = torch.ones(64, 64)

    def touch():
        while not stop.is_set():
            for other in others:
                other.add_(1)
                square @ square  # keeps the lock, and gives up the GIL

    thread = threading.Thread(target=touch)
    thread.start()

    def reads_what_is_here():
        num_read = 0
        for tensor in (*training.model.parameters(), *others):
            try:
                assert torch.isfinite(tensor).all() and len(set(tensor.detach().view(-1).tolist()))
                num_read += 1
            except tvm_pager.PagerClosedError:
                continue
        assert num_read

    for _ in range(4):
        training.step()
        for _ in range(3):
            in_child(reads_what_is_here)
    training.assert_right()
    stop.set()
    thread.join()
    assert all(len(set(other.flatten().tolist())) == 1 for other in others)
    pager.check_invariants()
    del training, others, square
assert_nothing_left(tmp_path)
print("done")
"""


def test_a_fork_waits_for_other_threads_to_leave_the_books_whole(tmp_path: Path) -> None:
    """Without that a page that is about to leave looks present in the child: it would crash."""
    run_or_fail(BUSY, tmp_path)


LOADERS = """
method = sys.argv[2]
with small_pager(tmp_path, device=76 * KIB) as pager:
    training = Training(Run(pager))
    offset = torch.full((64,), 0.5)
    pager.evict_all()
    expected = torch.stack([(i + torch.arange(64.0)) ** 2 + 0.5 for i in range(24)]).tolist()
    for offsets in (0.5, offset)[method == "spawn":]:  # half a second for each worker
        if method == "fork":
            offset.add(0)  # on the device when the workers start
        gc.collect()  # as below
        loader = DataLoader(Squares(offsets), 4, num_workers=2, multiprocessing_context=method)
        rows = []
        for batch_ in loader:
            rows += batch_.tolist()
            training.step() if training.number < 3 else None
        assert rows == expected
        training.assert_right()
    if method == "fork":
        pager.evict_all()
        with pytest.raises(tvm_pager.PagerClosedError, match="Page .* fork"):
            list(DataLoader(Squares(offset), num_workers=2, multiprocessing_context="fork"))
    gc.collect()  # torch complains of iterators that are collected in a forked child
    with multiprocessing.get_context(method).Pool(1 + (method == "fork")) as pool:
        parameters = list(training.model.parameters())
        found = pool.map(seen, parameters)
        negatives = pool.map(negated, parameters)
    for parameter, sight, negative in zip(parameters, found, negatives):
        assert sight == (torch.nn.Parameter, True, seen(parameter)[2])
        assert torch.equal(-parameter, negative)
    training.step()
    training.assert_right()
    pager.check_invariants()
    del training, parameters, parameter, offset, offsets, loader, negative, negatives
assert_nothing_left(tmp_path)
print("done")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loaders_and_pools_work_inside_a_pager(method: str, tmp_path: Path) -> None:
    """Workers make plain tensors; pages that are sent to them travel as copies."""
    run_or_fail(LOADERS, tmp_path, method)
