"""The parent: starts the runs in turn, compares what they leave, and gives the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvm_pager.config import PagerConfig
from tvm_pager.errors import ConfigError, PagerError
from tvm_pager.machine import DeviceMemory, host_limit_bytes
from tvm_pager.planning import load_policy
from tvm_pager.verify import report
from tvm_pager.verify.operation import Operation, find_difference
from tvm_pager.verify.process import Run
from tvm_pager.verify.record import Record, read_lines, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm_pager.script import Script

__all__ = ["VerifyOptions", "run_verify"]

_EQUAL, _DIFFERENT = 0, 1
_EXIT_TERMINATED = 128 + signal.SIGTERM
_NUM_TAIL_LINES = 12
_SOME_DEVICE = DeviceMemory(2**40, 2**40)  # stands in for a device that is not looked at yet


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What `tvm-pager verify` was asked for; see `tvm-pager verify --help`.

    Attributes:
        script: what is run.
        pager: options of `Pager` by name.
        config: JSON file of further options, or None.
        num_steps: after which the script is stopped.
        seed: set in every run before the script starts; None: nothing is seeded.
        is_deterministic: whether torch is asked for deterministic kernels.
        has_self_check: whether the plain run is repeated after a difference.
        has_trace: whether the operation is looked for then.
        max_elements: that are shown of those that differ.
        shows_output: whether the script's output is shown, on standard error.
    """

    script: Script
    pager: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    num_steps: int = 3
    seed: int | None = None
    is_deterministic: bool = True
    has_self_check: bool = True
    has_trace: bool = False
    max_elements: int = 3
    shows_output: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be run, before minutes are spent on a plain run."""
        for option, value in (("steps", self.num_steps), ("max-elements", self.max_elements)):
            if value < 1:
                raise ConfigError(f"--{option} {value}: at least 1 is needed")
        if self.has_trace and not self.has_self_check:
            raise ConfigError(
                "--trace with --no-self-check: a trace means nothing where the script may differ "
                "from itself; leave one of them out"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: from 0 to 2**63 - 1")
        config = self.pager_config()
        config.resolve(_SOME_DEVICE, host_limit_bytes())
        load_policy(config.policy)

    def pager_config(self) -> PagerConfig:
        """All options of the pager, as it will see them."""
        return PagerConfig.from_options(self.pager, config=self.config, environ=os.environ)


def run_verify(options: VerifyOptions) -> int:
    """Runs the script plain and paged, prints what was found; 0 if all is equal, else 1.

    Raises:
        PagerError: the script fails by itself, computes nothing that could be compared, or cannot
            be paged as asked.
        SystemExit: SIGTERM; the run that is under way is ended first.
    """
    with _ending_on_sigterm(), contextlib.ExitStack() as runs:
        return _Verification(options, runs).run()


class _Verification:
    """The runs of one script, which are closed with `runs`."""

    def __init__(self, options: VerifyOptions, runs: contextlib.ExitStack) -> None:
        self._options = options
        self._runs = runs

    def run(self) -> int:
        plain = self._start("plain")
        self._refuse_failed(plain)
        paged = self._start("paged", reference=plain)
        if paged.outcome.is_different:
            return self._explain(plain, paged)
        if paged.outcome.error_kind == "pager":
            raise PagerError(f"the paged run could not go on: {paged.outcome.error}")
        return self._judge_ends(plain, paged)

    def _start(self, name: str, reference: Run | None = None, **changes: Any) -> Run:
        """Runs the script once and prints a line on it."""
        options = self._options
        settings = {
            "script": dataclasses.asdict(options.script),
            "pager": options.pager if name.startswith("paged") else None,
            "config": options.config,
            "torch_device": options.pager_config().torch_device,
            "num_steps": options.num_steps,
            "seed": options.seed,
            "is_deterministic": options.is_deterministic,
            "keep_at": None,
            "trace_step": None,
            **changes,
        }
        run = self._runs.enter_context(Run())
        run.run(settings, reference=reference, shows_output=options.shows_output)
        if settings["trace_step"] is None:
            _say(report.format_run(name, run.outcome))
        return run

    def _refuse_failed(self, plain: Run) -> None:
        outcome = plain.outcome
        if outcome.end == "interrupted":
            raise KeyboardInterrupt
        if outcome.error_kind == "memory" or outcome.exit_code == -signal.SIGKILL:
            raise PagerError(
                f"the plain run {report.format_end(outcome)}: it must fit into memory to be "
                "compared with; try a smaller batch or a smaller model of the same kind"
            )
        if outcome.error_kind == "pager" and not outcome.num_records:
            raise PagerError(outcome.error.partition(": ")[2])
        if outcome.end in ("error", "died"):
            sys.stderr.write("".join(f"  | {line}\n" for line in plain.tail(_NUM_TAIL_LINES)))
            raise PagerError(
                f"the plain run {report.format_end(outcome)}: the script must run by itself first"
            )
        if not outcome.num_records:
            raise PagerError(
                f"the script {report.format_end(outcome)} without a tensor to compare: it called "
                "no module, no backward() and no optimizer in its main process"
            )

    def _judge_ends(self, plain: Run, paged: Run) -> int:
        """Compares two runs whose records are equal as far as both have them."""
        mine, theirs = plain.outcome, paged.outcome
        ends = [(one.end, one.exit_code, one.num_records) for one in (mine, theirs)]
        if ends[0] != ends[1]:
            if theirs.exit_code:
                sys.stderr.write("".join(f"  | {line}\n" for line in paged.tail(_NUM_TAIL_LINES)))
            _say(
                f"DIFFERENT: the plain run {report.format_end(mine)}, the paged run "
                f"{report.format_end(theirs)}",
                f"  {report.count(theirs.num_records, 'tensor')} before that are equal",
            )
            return _DIFFERENT
        kinds = ", ".join(report.count(n, phase) for phase, n in theirs.num_by_phase.items())
        _say(
            f"EQUAL, every bit of {report.count(theirs.num_records, 'tensor')} in "
            f"{report.count(theirs.num_steps, 'step')}: {kinds}",
            *report.format_notes(theirs, self._options.num_steps),
        )
        return _EQUAL

    # --- after a difference ----------------------------------------------------------------------

    def _explain(self, plain: Run, paged: Run) -> int:
        index = paged.outcome.found_at
        assert index is not None
        mine, theirs = _record_at(plain, index), _record_at(paged, index)
        assert theirs is not None
        again = None
        if self._options.has_self_check:
            again = self._start("plain again", reference=plain, keep_at=index)
        if again is not None and again.outcome.is_different:
            self._blame_script(plain, again)
            return _DIFFERENT
        _say(*report.format_difference(mine, theirs))
        if (
            again is not None
            and again.outcome.found_at == index
            and mine is not None
            and dataclasses.replace(mine, digest="") == dataclasses.replace(theirs, digest="")
            and os.fstat(again.kept.fileno()).st_size == os.fstat(paged.kept.fileno()).st_size > 0
        ):
            from tvm_pager.verify.elements import compare_elements  # torch comes with it

            elements = compare_elements(
                again.kept, paged.kept, mine.dtype, mine.shape, self._options.max_elements
            )
            _say(*report.format_elements(elements))
        _say(f"  {report.count(index, 'tensor')} before that are equal")
        _say(*self._conclude(again))
        if again is not None and self._options.has_trace:
            self._trace(index, theirs)
        return _DIFFERENT

    def _conclude(self, again: Run | None) -> list[str]:
        if again is None:
            return ["whether the script is the same in two plain runs was not checked"]
        lines = ["two plain runs agree up to there, so paging makes the difference"]
        if not self._options.has_trace:
            lines.append("run again with --trace to find the operation")
        return lines

    def _blame_script(self, plain: Run, again: Run) -> None:
        index = again.outcome.found_at
        assert index is not None
        record = _record_at(plain, index) or _record_at(again, index)
        assert record is not None
        remedy = "seeds, shuffling, time, or files that it wrote in the run before"
        if self._options.seed is None:
            remedy = f"try --seed 0; else look for {remedy}"
        _say(
            "DIFFERENT, but two plain runs of this script differ as well, first at "
            f"{report.format_place(record)}",
            "  nothing can be said about paging until the script repeats itself: " + remedy,
        )

    def _trace(self, index: int, record: Record) -> None:
        """Repeats the runs with every operation of the record's step, and compares those."""
        plain, again = (
            self._start("plain", trace_step=record.step, keep_at=index) for _ in range(2)
        )
        paged = self._start("paged", reference=plain, trace_step=record.step)
        operations = _operations(paged)
        found = find_difference(
            _operations(plain), _operations(again), operations, wrong=record.digest
        )
        first = paged.outcome.found_at
        differs_at = None if first is None else _record_at(paged, first)
        if differs_at is not None and differs_at.step != record.step:
            _say(
                "trace: this time the first difference is at "
                f"{report.format_place(differs_at)}; paging does not do the same in each run"
            )
        elif found is not None:
            _say(*report.format_operation(found, record.step))
        elif differs_at is None:
            _say("trace: this time everything is equal; paging does not do the same in each run")
        else:
            _say(
                f"trace: all {len(operations):,} operations of step {record.step} up to there "
                "are equal: the bytes changed after they were computed"
            )


def _record_at(run: Run, index: int) -> Record | None:
    return next(itertools.islice(read_records(run.records), index, None), None)


def _operations(run: Run) -> list[Operation]:
    return [Operation.from_list(value) for value in read_lines(run.operations)]


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM an exception, so that the run under way does not outlive this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(_EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
