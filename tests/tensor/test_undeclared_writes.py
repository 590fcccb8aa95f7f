"""No operator writes an argument that the runtime does not know to be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tensor import opinfo_samples
from tools import operator_cases
from tools.operator_cases import Case, Options
from tools.sweep_undeclared_writes import Report, main, sweep, sweep_collectives
from tvm_pager.errors import UnpageableError
from tvm_pager.runtime import schema
from tvm_pager.runtime.schema import (
    UNDECLARED_WRITES,
    plan_of,
    tensor_arguments,
    written_arguments,
    written_tensors,
)

aten = torch.ops.aten
NUM_CHUNKS = 4
OPINFO_NAMES = sorted({op.name for op in operator_cases.all_opinfos()})
NOT_ON_CPU = {
    *(name for name in OPINFO_NAMES if name.startswith("jiterator_")),
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
}
# No kernel there, or none for float32.
NOT_ON_GPU = {"histogram", "histogramdd", "sparse.mm", "torch.ops.aten._flash_attention_forward"}
QUICK = Options(limit=2, is_thorough=False)
# Running statistics that are read, or copied first, although an argument's name suggests a write.
READS_STATISTICS = {
    "aten::_batch_norm_impl_index_backward",
    "aten::_batch_norm_no_update",
    "aten::_batch_norm_with_update_functional",
    "aten::_native_batch_norm_legit_functional",
    "aten::_native_batch_norm_legit_no_training",
    "aten::batch_norm_backward",
    "aten::batch_norm_elemt",
    "aten::cudnn_batch_norm_backward",
    "aten::miopen_batch_norm_backward",
    "aten::native_batch_norm_backward",
}


def undeclared(report: Report) -> set[tuple[str, str]]:
    return {(finding.operator, finding.argument) for finding in report.unknown}


# --- the sweep ---


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_no_operator_writes_without_a_declaration(chunk: int) -> None:
    names = set(OPINFO_NAMES[chunk::NUM_CHUNKS])
    report = sweep(operator_cases.operator_cases(QUICK, names))
    assert undeclared(report) == set()
    assert names - set(report.num_run) == names & NOT_ON_CPU


def test_no_module_or_optimizer_writes_without_a_declaration() -> None:
    report = sweep(operator_cases.other_cases(QUICK))
    assert undeclared(report) == set()
    assert not report.failures


@pytest.mark.slow
def test_collectives_write_what_the_table_says() -> None:
    report = sweep_collectives()
    assert undeclared(report) == set()
    assert not report.failures
    seen = {(name.removesuffix(".default"), argument) for name, argument in report.findings}
    expected = {
        (name, argument)
        for name, arguments in UNDECLARED_WRITES.items()
        if name.startswith("c10d::")
        for argument in arguments
    }
    assert {finding for finding in seen if finding[0].startswith("c10d::")} == expected


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_operator_writes_without_a_declaration_in_any_dtype() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
    report = sweep(operator_cases.all_cases(Options(limit=10, dtypes=dtypes)))
    assert undeclared(report) == set()
    assert len(report.operators) >= 1400


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_no_operator_writes_without_a_declaration_on_a_gpu(chunk: int) -> None:
    names = set(OPINFO_NAMES[chunk::NUM_CHUNKS])
    report = sweep(operator_cases.operator_cases(Options(limit=1, device="cuda"), names))
    assert undeclared(report) == set()
    assert names - set(report.num_run) <= NOT_ON_GPU


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_no_module_or_optimizer_writes_without_a_declaration_on_a_gpu() -> None:
    report = sweep(operator_cases.other_cases(Options(limit=1, device="cuda")))
    assert undeclared(report) == set()
    expected = {"aten::_cudnn_rnn_backward.default", "aten::cudnn_batch_norm.default"}
    assert expected <= {name for name, _ in report.findings}


def test_the_sweep_finds_what_the_table_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "known_plans", {})
    assert main(["--limit", "1", "--filter", "native_batch_norm"]) == 0
    monkeypatch.setattr(schema, "known_plans", {})
    monkeypatch.delitem(UNDECLARED_WRITES, "aten::native_batch_norm")
    assert main(["--limit", "1", "--filter", "native_batch_norm"]) == 1


def test_the_sweep_finds_a_planted_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with planted("Tensor x, Tensor[] ys") as sneaky:
        case = Case("planted", "planted", lambda: sneaky(torch.ones(2), [torch.ones(3)]))
        report = sweep([case])
        assert set(report.findings) == {("tvm_planted::sneaky.default", "ys")}
        assert undeclared(report) == set()  # the rule for other namespaces covers it

        monkeypatch.setattr(schema, "known_plans", {})
        monkeypatch.setitem(UNDECLARED_WRITES, "tvm_planted::sneaky", ())  # a false promise
        assert undeclared(sweep([case])) == {("tvm_planted::sneaky.default", "ys")}


def test_the_sweep_finds_a_write_before_an_error() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        raise ValueError("after the write")

    with torch.library._scoped_library("tvm_planted", "FRAGMENT") as library:
        library.define("fails(Tensor x) -> Tensor")
        library.impl("fails", raises, "CPU")
        fails = torch.ops.tvm_planted.fails.default
        report = sweep([Case("planted", "planted", lambda: fails(torch.ones(2)))])
    assert set(report.findings) == {("tvm_planted::fails.default", "x")}
    assert "after the write" in report.failures["planted"]


def test_the_report_names_operator_argument_and_coverage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    assert main(["--limit", "1", "--filter", "instance_norm", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "aten::instance_norm.default" in out
    assert "running_mean" in out
    assert "0 unknown to the runtime" in out
    assert '"aten::instance_norm.default"' in path.read_text()


@contextlib.contextmanager
def planted(arguments: str) -> Iterator[torch._ops.OpOverload]:
    """An operator of another namespace that writes its list argument and does not say so."""

    def writes_second(x: torch.Tensor, ys: list[torch.Tensor]) -> torch.Tensor:
        ys[0].add_(1)
        return x + 1

    with torch.library._scoped_library("tvm_planted", "FRAGMENT") as library:
        library.define(f"sneaky({arguments}) -> Tensor")
        library.impl("sneaky", writes_second, "CPU")
        yield torch.ops.tvm_planted.sneaky.default


# --- the table ---


def test_every_entry_names_arguments_that_exist() -> None:
    arguments: dict[str, set[str]] = {}
    for each in torch._C._jit_get_all_schemas():
        names = {argument.name for argument in each.arguments}
        arguments.setdefault(each.name, set()).update(names)
    for operator, written in UNDECLARED_WRITES.items():
        assert set(written) <= arguments[operator], operator


def test_running_statistics_are_declared_listed_or_known_to_be_read_only() -> None:
    silent = {
        each.name
        for each in torch._C._jit_get_all_schemas()
        if each.name.startswith("aten::")
        and any(a.name == "running_mean" and a.alias_info is None for a in each.arguments)
    }
    assert silent - READS_STATISTICS == {
        name for name, written in UNDECLARED_WRITES.items() if "running_mean" in written
    }


def test_every_collective_has_an_entry() -> None:
    names = {
        each.name
        for each in torch._C._jit_get_all_schemas()
        if each.name.startswith("c10d::") and any("Tensor" in str(a.type) for a in each.arguments)
    }
    assert names - set(UNDECLARED_WRITES) <= {"c10d::check_for_nan"}


# --- plans ---


def test_a_plain_operator_reads_its_tensors() -> None:
    plan = plan_of(aten.add.Tensor)
    assert plan.name == "aten::add.Tensor"
    assert plan.tensor_positions == (0, 1)
    assert plan.list_positions == ()
    assert (plan.writes, plan.written, plan.returns_alias, plan.is_view) == (
        False,
        (),
        False,
        False,
    )
    assert plan.is_pointwise
    assert not plan.is_foreign
    assert not plan.is_seeded
    assert plan.num_returns == 1
    a, b = torch.ones(2), torch.ones(2)
    assert tensor_arguments(plan, (a, b), {"alpha": 2}) == [a, b]
    assert list(written_arguments(plan, (a, b), None)) == []
    assert plan_of(aten.add.Tensor) is plan


def test_an_inplace_operator_writes_self() -> None:
    plan = plan_of(aten.add_.Tensor)
    assert plan.written == (0,)
    assert plan.returns_alias
    assert not plan.is_view
    a, b = torch.ones(2), torch.zeros(2)
    (written,) = written_arguments(plan, (a, b), {})
    assert written is a
    (written,) = written_arguments(plan, (), {"other": b, "self": a})
    assert written is a


def test_an_out_argument_is_written_by_keyword() -> None:
    plan = plan_of(aten.mm.out)
    assert plan.written == ("out",)
    assert plan.num_positional == 2
    assert plan.tensor_positions == (0, 1, 2)
    assert plan.tensor_names == {"self": 0, "mat2": 1, "out": 2}
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.empty(2, 2)
    (written,) = written_arguments(plan, (a, b), {"out": out})
    assert written is out
    assert [id(t) for t in tensor_arguments(plan, (a, b), {"out": out})] == [id(a), id(b), id(out)]


def test_a_foreach_operator_writes_its_list() -> None:
    plan = plan_of(aten._foreach_add_.List)
    assert plan.list_positions == (0, 1)
    assert plan.written == (0,)
    assert plan.num_returns == 0
    selves, others = [torch.ones(1), torch.ones(2)], [torch.ones(1), torch.ones(2)]
    assert list(written_arguments(plan, (selves, others), {})) == [selves]
    flat = written_tensors(plan, (selves, others), {})
    assert [id(tensor) for tensor in flat] == [id(tensor) for tensor in selves]


def test_a_fused_optimizer_writes_weights_gradients_and_moments() -> None:
    plan = plan_of(aten._fused_adamw_.default)
    assert plan.list_positions == (0, 1, 2, 3, 4, 5)
    assert plan.written == (0, 1, 2, 3, 4)  # not state_steps
    assert set(plan.tensor_names) == {"grad_scale", "found_inf"}
    lists = [[torch.ones(1)] for _ in range(6)]
    assert len(written_tensors(plan, lists, {"lr": 0.1})) == 5
    assert len(tensor_arguments(plan, lists, {"grad_scale": None, "lr": 0.1})) == 6


@pytest.mark.parametrize(
    "func", [aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.batch_norm.default]
)
def test_batch_norm_writes_its_running_statistics(func: torch._ops.OpOverload) -> None:
    plan = plan_of(func)
    assert plan.written_names == {"running_mean", "running_var"}
    x, mean, var = torch.ones(2, 3), torch.zeros(3), torch.ones(3)
    written = list(written_arguments(plan, (x, None, None, mean, var, True, 0.1, 1e-5), {}))
    assert [id(tensor) for tensor in written] == [id(mean), id(var)]
    assert list(written_arguments(plan, (x, None, None, None, None, True, 0.1, 1e-5), {})) == []


def test_an_out_overload_writes_the_statistics_too() -> None:
    plan = plan_of(aten.native_batch_norm.out)
    assert plan.written == (3, 4, "out", "save_mean", "save_invstd")


def test_lists_may_hold_none() -> None:
    plan = plan_of(aten.index_put_.default)
    assert (plan.tensor_positions, plan.list_positions, plan.written) == ((0, 2), (1,), (0,))
    x, index, values = torch.zeros(2, 2), torch.tensor([0]), torch.ones(1)
    found = tensor_arguments(plan, (x, [None, index], values), {})
    assert {id(tensor) for tensor in found} == {id(x), id(index), id(values)}


def test_cat_reads_a_list_and_lists_nest() -> None:
    assert plan_of(aten.cat.default).list_positions == (0,)
    nested = plan_of(torch.ops.c10d.allgather_.default)
    assert nested.written == (0,)
    outputs, inputs = [[torch.ones(1), torch.ones(1)]], [torch.ones(1)]
    assert len(written_tensors(nested, (outputs, inputs), {})) == 2
    assert len(tensor_arguments(nested, (outputs, inputs), {})) == 3


def test_views_seeds_and_storage_arguments_are_told() -> None:
    assert plan_of(aten.view.default).is_view
    assert plan_of(aten.split.Tensor).is_view
    assert plan_of(aten.native_dropout.default).is_seeded
    plan = plan_of(aten.set_.source_Storage)
    assert plan.has_storage_args
    assert plan.written == (0,)
    assert plan.tensor_positions == (0,)
    assert not plan_of(aten.set_.source_Tensor).has_storage_args


def test_a_custom_operator_is_believed_if_it_declares_its_mutations() -> None:
    @torch.library.custom_op("tvm_planted::reads", mutates_args=())
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @torch.library.custom_op("tvm_planted::updates", mutates_args={"y"})
    def updates(x: torch.Tensor, y: torch.Tensor) -> None:
        y.add_(x)

    plan = plan_of(torch.ops.tvm_planted.reads.default)
    assert (plan.is_foreign, plan.written) == (False, ())
    plan = plan_of(torch.ops.tvm_planted.updates.default)
    assert (plan.is_foreign, plan.written) == (False, (1,))
    del reads, updates


def test_a_library_operator_is_believed_only_if_its_schema_declares_a_write() -> None:
    with planted("Tensor x, Tensor[] ys") as sneaky:
        plan = plan_of(sneaky)
        assert plan.is_foreign
        assert plan.written == (0, 1)
        x, y = torch.ones(1), torch.ones(1)
        assert [id(t) for t in written_tensors(plan, (x, [y]), {})] == [id(x), id(y)]
    with torch.library._scoped_library("tvm_planted", "FRAGMENT") as library:
        library.define("honest(Tensor x, Tensor(a!) y) -> Tensor")
        plan = plan_of(torch.ops.tvm_planted.honest.default)
        assert (plan.is_foreign, plan.written) == (False, (1,))


def test_a_higher_order_operator_is_refused_by_name() -> None:
    with pytest.raises(UnpageableError, match="cond"):
        plan_of(torch.ops.higher_order.cond)  # type: ignore[arg-type]


# --- the samples that other tests run ---


def test_samples_cloned_twice_give_the_same_bits() -> None:
    num_samples = 0
    for name, call, args, kwargs in opinfo_samples.samples():
        outcomes = []
        for _ in range(2):
            own_args, own_kwargs = opinfo_samples.clone((args, kwargs))
            torch.manual_seed(0)
            outcomes.append((call(*own_args, **own_kwargs), own_args, own_kwargs))
        torch.testing.assert_close(
            *map(tensors, outcomes), rtol=0, atol=0, equal_nan=True, msg=name
        )
        num_samples += 1
    assert num_samples > 700


def tensors(tree: object) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_a_clone_keeps_layout_and_sharing_and_shares_nothing_with_its_origin() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    view, wide = base.t()[1:], torch.ones(3, 1).expand(3, 5)
    conj = torch.ones(2, dtype=torch.complex64).conj()
    new_base, new_view, new_wide, new_conj = opinfo_samples.clone((base, view, wide, conj))
    assert new_view.stride() == view.stride()
    assert new_view.storage_offset() == view.storage_offset()
    assert new_wide.stride() == (1, 0)
    assert new_conj.is_conj()
    new_base.zero_()
    assert not new_view.any()
    assert base.any()


def test_importing_the_operator_tests_leaves_backend_flags_settable() -> None:
    assert not torch.backends.flags_frozen()  # type: ignore[no-untyped-call]
