"""Ctrl-C at any moment: it arrives at once, and the same process goes on with right numbers.

The programs run in interpreters of their own, so that no signal can hit the tests themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.interpreter import run_program

if TYPE_CHECKING:
    from pathlib import Path

SETTING = """
import contextlib, gc, logging, os, random, signal, sys, threading, time
import torch, tvm_pager
from pathlib import Path
from tests.leaks import pager_files
from tests.trials.harness import *
torch.set_num_threads(1)
logging.disable()
tmp_path = Path(sys.argv[1])
PROMPT_S = 2.0  # a second, and what a busy machine adds
SLOW_S = 20.0

def start():
    seed_all(0)
    model = mlp(6)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def run(run):
    model.load_state_dict(first)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(run, model, optimizer)
    return losses, frozen(everything(model, optimizer), version=False)

model, _ = start()
first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
wanted = run(Run(None))

def consistent(pager):
    torch.set_grad_enabled(True)  # torch's own `no_grad` may have been cut off on its way out
    gc.collect()
    pager.check_invariants()
    core = pager._core
    assert not core.running and not core.num_transient_pins and not core.reservations.queue
    assert core.lock.acquire(blocking=False)
    assert not core.lock._is_owned() or core.lock.release() is None
    for tensor in model.state_dict().values():
        assert bool(tensor.isfinite().all())

@contextlib.contextmanager
def interrupted(delay_s, begun=None):
    sent, is_covered = [], threading.Event()
    def send():
        is_covered.wait()
        if begun is not None:
            begun.wait(SLOW_S)
        time.sleep(delay_s)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        is_covered.set()
        yield
        time.sleep(SLOW_S)
    except KeyboardInterrupt:
        took_s = time.monotonic() - sent[0]
        assert took_s < PROMPT_S, f"Ctrl-C arrived after {took_s:.1f} s"
    else:
        raise AssertionError("Ctrl-C never arrived")
    finally:
        thread.join()

def slow_down(name, seconds):
    # Each transfer takes that long from now on; gives an event that is set when one has begun.
    call, begun = getattr(os, name), threading.Event()
    def slow(*args):
        begun.set()
        until = time.monotonic() + seconds[0]
        while time.monotonic() < until and seconds[0]:
            time.sleep(0.02)
        return call(*args)
    setattr(os, name, slow)
    return begun
"""


def run_or_fail(program: str, *arguments: object) -> None:
    done = run_program(SETTING + program, *arguments, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ignored" not in done.stderr, done.stderr
    assert done.stdout.endswith("done\n"), done.stdout


RANDOM = """
generator = random.Random(int(sys.argv[2]))
with small_pager(tmp_path, device=76 * KIB) as pager:
    pager.page(model)
    started = time.monotonic()
    assert run(Run(pager)) == wanted
    duration_s = time.monotonic() - started
    for number in range(int(sys.argv[3])):
        if number % 2:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # as notebooks do
        with interrupted(generator.random() * duration_s):
            run(Run(pager))
        consistent(pager)
        if number % 6 == 5:
            assert run(Run(pager)) == wanted
    assert run(Run(pager)) == wanted
    model = None
assert_nothing_left(tmp_path)
print("done")
"""


def test_training_goes_on_after_interrupts_at_random_moments(tmp_path: Path) -> None:
    run_or_fail(RANDOM, tmp_path, 1, 24)


SLOW = """
disks = [(seconds, slow_down(name, seconds)) for name in ("preadv", "pwritev")
         if (seconds := [0.0])]
with small_pager(tmp_path, device=76 * KIB) as pager:
    pager.page(model)
    assert run(Run(pager)) == wanted
    for seconds, begun in disks:
        begun.clear()
        seconds[0] = SLOW_S
        for delay_s in (0.1, 0.3):
            with interrupted(delay_s, begun):
                run(Run(pager))
        assert begun.is_set()
        seconds[0] = 0.0
        consistent(pager)
    assert run(Run(pager)) == wanted
    model = None
assert_nothing_left(tmp_path)
print("done")
"""


def test_an_interrupt_does_not_wait_for_a_slow_disk(tmp_path: Path) -> None:
    run_or_fail(SLOW, tmp_path)


CLOSING = """
seconds = [0.0]
begun = slow_down("preadv", seconds)
pager = small_pager(tmp_path, device=76 * KIB)
pager.page(model)
pager.evict_all()
seconds[0] = SLOW_S
budget_bytes = pager.stats().device_budget_bytes
with interrupted(0.3):
    pager.close()
pager.__enter__()
with interrupted(0.3):
    pager.__exit__(None, None, None)
assert not pager.closed
assert pager.stats().device_budget_bytes == budget_bytes
seconds[0] = 0.0
consistent(pager)
pager.page(model)
assert run(Run(pager)) == wanted
pager.evict_all()
pager.close()
assert pager.closed
assert_equal(wanted[1]["weights"], frozen(dict(model.named_parameters()), version=False))
assert_nothing_left(tmp_path)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
small_pager(tmp_path)  # cut off before it had a name: forgotten
for _ in range(100):
    gc.collect()
    if not pager_files():
        break
    time.sleep(0.1)
assert_nothing_left(tmp_path)
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # refused while a pager is open
print("done")
"""


def test_a_close_that_is_interrupted_loses_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    run_or_fail(CLOSING, tmp_path)


CUSTOM = """
@torch.library.custom_op("trials::nap", mutates_args=())
def nap(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()

with small_pager(tmp_path, device=76 * KIB) as pager:
    x = torch.ones(12 * KIB)
    y = torch.ones(12 * KIB)  # both do not fit
    with interrupted(0.3):
        nap(x, SLOW_S)
    consistent(pager)
    other = threading.Thread(target=nap, args=(x, 2.5))
    other.start()
    while not pager._core.num_transient_pins:
        time.sleep(0.01)
    with interrupted(0.3):
        y.add_(1)  # waits for the other thread's operand
    other.join()
    consistent(pager)
    assert set(x.tolist()) == {1.0} and set(y.tolist()) <= {1.0, 2.0}
    del x, y
assert_nothing_left(tmp_path)
print("done")
"""


def test_an_interrupt_ends_operators_in_python_and_waits_for_other_threads(tmp_path: Path) -> None:
    run_or_fail(CUSTOM, tmp_path)
