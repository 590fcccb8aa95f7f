"""The end of the interpreter, while a stream lane that nobody closed waits for the device."""

from __future__ import annotations

from tests.interpreter import run_program

_EXIT = """
import atexit, contextlib, threading, time, torch

def looking():
    return [thread.name for thread in threading.enumerate() if "tvm_pager" in thread.name]

@atexit.register  # before the lane's own handler: runs after it
def end():
    print("stopped:", looking(), inside.is_set())
    started = []
    threading.Thread.start = lambda thread: started.append(thread.name)
    fault = submit(lane, "fault", 2, Priority.FAULT)
    queued = submit(lane, "late", 1, Priority.PREFETCH)
    submit(idle, "b", 9, Priority.PREFETCH)
    print("no new one:", started)
    lane.promote(queued, Priority.FAULT)
    lane.stream.end(99)
    fault.wait()
    queued.wait()
    lane.close()
    idle.close()
    print("fine")

from tests.unit import test_stream_lane
from tests.unit.test_stream_lane import HandEvent, HandStream, submit
from tvm_pager.transfer.protocol import Priority
from tvm_pager.transfer.stream_lane import StreamLane

inside, ending = threading.Event(), threading.Event()

class Event(HandEvent):
    def synchronize(self):
        inside.set()
        super().synchronize()

def finish_a_chunk():
    ending.wait()
    time.sleep(0.1)
    lane.stream.end(1)

torch.cuda.Stream, torch.cuda.Event = HandStream, Event
torch.cuda.device = contextlib.nullcontext
threading.Thread(target=finish_a_chunk, daemon=True).start()
atexit.register(ending.set)  # the last handler: runs first
lane, idle = (StreamLane(torch.device("cuda"), name) for name in ("test", "idle"))
submit(lane, "a", 9, Priority.PREFETCH)
inside.wait()
print("forgotten:", looking())
"""


def test_no_thread_waits_for_the_device_when_the_interpreter_goes() -> None:
    """Torn out of a wait in C++ it would abort the process; the lane itself still works."""
    result = run_program(_EXIT, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "forgotten: ['tvm_pager-test']",
        "stopped: [] True",
        "no new one: []",
        "fine",
    ]
