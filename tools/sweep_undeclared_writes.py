"""Finds operators that write an argument without declaring it: no dirty bit may be missed.

Runs `tools.operator_cases` under a dispatch mode that compares the bytes of each argument's storage
before and after each call. A write of the bytes that were there already cannot be seen, so several
samples per operator are run.

    python -m tools.sweep_undeclared_writes --limit 5
    python -m tools.sweep_undeclared_writes --filter batch_norm --json found.json
    python -m tools.sweep_undeclared_writes --collectives

Needs `expecttest`, which torch's own test modules import. The exit status is 1 if an operator wrote
an argument that `tvm_pager.runtime.schema` does not know to be written.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from tools import operator_cases
from tvm_pager.runtime import schema

__all__ = ["Finding", "Report", "WriteRecorder", "main", "sweep", "sweep_collectives"]

_NUM_SOURCES = 3  # samples named per finding
Snapshot = list[tuple[str, torch.UntypedStorage, bytes]]  # argument, its storage, bytes before


@dataclass
class Finding:
    """One argument that an operator wrote without a declaration in its schema."""

    operator: str
    argument: str
    is_known: bool  # the runtime counts it as written: by table, or by its rule for namespaces
    num_writes: int = 0
    sources: list[str] = field(default_factory=list)  # the first few samples that showed it


@dataclass
class Report:
    """What a sweep saw."""

    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    operators: Counter[str] = field(default_factory=Counter)  # operator -> compared calls
    num_run: Counter[str] = field(default_factory=Counter)  # case name -> samples that ran
    failures: dict[str, str] = field(default_factory=dict)  # sample -> why it did not run

    @property
    def unknown(self) -> list[Finding]:
        """The findings that would lose a write."""
        return [finding for finding in self.findings.values() if not finding.is_known]

    def add(self, finding: Finding) -> None:
        """Counts a finding in, together with earlier ones of the same argument."""
        key = (finding.operator, finding.argument)
        known = self.findings.setdefault(key, Finding(*key, is_known=finding.is_known))
        known.num_writes += finding.num_writes
        new = [source for source in finding.sources if source not in known.sources]
        known.sources = [*known.sources, *new][:_NUM_SOURCES]


class WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares the bytes of the arguments that schemas call unwritten around each dispatched call.

    Args:
        report: what it writes to.
        source: the sample that runs, for the findings.
        settle_late: compare only in `settle`, for work that goes on after the call has returned.
    """

    def __init__(self, report: Report, source: str, *, settle_late: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report = report
        self.source = source
        self.settle_late = settle_late
        self._pending: list[tuple[schema.OperatorPlan, Snapshot]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        plan = schema.plan_of(func)
        self.report.operators[plan.name] += 1
        self._pending.append((plan, _snapshot(func, args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:  # also when it raised: an operation may write, then raise
            if not self.settle_late:
                self.settle()

    def settle(self) -> None:
        """Books every storage whose bytes are no longer those of before its call."""
        for plan, before in self._pending:
            for argument, storage, content in before:
                if _bytes_of(storage) != content:
                    is_known = argument in plan.written_names
                    self.report.add(Finding(plan.name, argument, is_known, 1, [self.source]))
        self._pending.clear()


def _snapshot(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Snapshot:
    """The storages that no declared write reaches."""
    declared: set[int] = set()
    silent: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for storage in _storages(value):
            if argument.alias_info is not None and argument.alias_info.is_write:
                declared.add(storage._cdata)
            else:
                silent.setdefault(storage._cdata, (argument.name, storage))
    return [
        (name, storage, _bytes_of(storage))
        for key, (name, storage) in silent.items()
        if key not in declared
    ]


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages with memory behind them of all tensors in `value`, down to their components."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor) or leaf._is_zerotensor():  # zeros without memory
            continue
        if is_traceable_wrapper_subclass(leaf):
            yield from _storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
            continue
        for part in _components(leaf):
            try:
                storage = part.untyped_storage()
            except (NotImplementedError, RuntimeError):  # opaque, functorch and nested tensors
                continue
            if storage.nbytes() and storage.device.type != "meta":
                yield storage


def _components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    layout = tensor.layout
    if layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if layout in {torch.sparse_csr, torch.sparse_bsr}:
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if layout in {torch.sparse_csc, torch.sparse_bsc}:
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return (tensor,)


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    if storage.device.type != "cpu":
        storage = storage.cpu()  # type: ignore[no-untyped-call]
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def sweep(cases: Iterable[operator_cases.Case], *, settle_late: bool = False) -> Report:
    """Runs the cases and reports. Seeds numpy and `random`; torch's CPU generator is restored."""
    report = Report()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples call what is deprecated, on purpose
        for case in cases:
            torch.manual_seed(0)
            recorder = WriteRecorder(report, case.source, settle_late=settle_late)
            try:
                with recorder:
                    case.run()
            except Exception as error:  # reported: a build need not run every sample
                report.failures[case.source] = f"{type(error).__name__}: {error}".split("\n")[0]
            else:
                report.num_run[case.name] += 1
            recorder.settle()
    return report


def sweep_collectives() -> Report:
    """Runs the collectives in two new processes that talk through gloo, and joins their reports."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        both = Report()
        for rank in range(2):
            document = json.loads((Path(folder) / f"{rank}.json").read_text())
            for finding in document["findings"]:
                both.add(Finding(**finding))
            both.operators.update(document["operators"])
            both.num_run.update(document["num_run"])
            both.failures.update(document["failures"])
    return both


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    try:
        report = sweep(operator_cases.collective_cases(rank), settle_late=True)
    finally:
        dist.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(_to_json(report))


def _to_json(report: Report) -> str:
    document = {
        "findings": [asdict(finding) for _, finding in sorted(report.findings.items())],
        "operators": dict(sorted(report.operators.items())),
        "num_run": dict(sorted(report.num_run.items())),
        "failures": report.failures,
    }
    return json.dumps(document, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--limit", type=int, default=3, help="samples per operator (default 3)")
    parser.add_argument("--filter", default="", help="only operators whose name contains this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float32", help="names separated by commas")
    parser.add_argument("--collectives", action="store_true", help="only the collectives")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--verbose", action="store_true", help="name the samples that did not run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # on inputs this small threads only cost
    if args.collectives:
        report = sweep_collectives()
    else:
        dtypes = tuple(getattr(torch, name) for name in args.dtypes.split(","))
        options = operator_cases.Options(args.limit, args.filter, args.device, dtypes)
        report = sweep(operator_cases.all_cases(options))
    if args.json:
        args.json.write_text(_to_json(report))
    _print(report, verbose=args.verbose)
    return 1 if report.unknown else 0


def _print(report: Report, *, verbose: bool) -> None:
    print(f"{'operator':<50} {'writes':<16} {'known':<6} {'times':>6}  seen in")
    for _, finding in sorted(report.findings.items()):
        known = "yes" if finding.is_known else "NO"
        print(
            f"{finding.operator:<50} {finding.argument:<16} {known:<6} {finding.num_writes:>6}  "
            f"{', '.join(finding.sources)}"
        )
    if verbose:
        for source, reason in sorted(report.failures.items()):
            print(f"did not run: {source}: {reason}")
    print(
        f"{len(report.operators)} operators in {report.operators.total()} calls of "
        f"{report.num_run.total()} samples ({len(report.failures)} more did not run): "
        f"{len(report.findings)} undeclared writes, {len(report.unknown)} unknown to the runtime"
    )


if __name__ == "__main__":
    sys.exit(main())
