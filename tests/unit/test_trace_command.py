"""`tvm-pager trace`: models by their configuration, and how true their traces are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tvm_pager import cli
from tvm_pager.errors import ConfigError
from tvm_pager.estimate import trace
from tvm_pager.estimate.model_program import ModelProgram
from tvm_pager.planning import Phase
from tvm_pager.planning.traces.trace_file import load
from tvm_pager.planning.traces.trace_index import TraceIndex
from tvm_pager.testing.machines import example_profile

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    example_profile().save(tmp_path / "profile.json")
    return [
        *("trace", "--config", str(tmp_path / "config.json"), "--batch", "2", "--seq", "16"),
        *("--profile", str(tmp_path / "profile.json")),
    ]


def test_the_table_and_the_file_say_what_the_model_does(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.trace.gz"
    assert cli.main([*arguments, "--out", str(path)]) == 0
    output = capsys.readouterr()
    found = load(path)
    assert found.facts["batch"] == "2 x 16 tokens"
    assert {op.phase for op in found.ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}
    for line in ("optimizer: adamw", "model: config.json, llama", "forward ", "param ", "peak if"):
        assert f"\n{line}" in output.out
    assert f"wrote {path}" in output.err


def test_inference_and_checkpointing_are_other_programs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--optimizer", "none"]) == 0
    assert "backward" not in capsys.readouterr().out
    assert cli.main([*arguments, "--optimizer", "sgd", "--checkpointing"]) == 0
    assert "optimizer: sgd, checkpointed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq", "5000"], "seq=5000, but the configuration has max_position_embeddings=4096"),
        (["--batch", "0"], "batch=0"),
        (["--dtype", "int64"], "dtype='int64'"),
        (["--efficiency", "0"], "efficiency=0.0 must be above 0"),
        (["--config", "missing.json"], "missing.json: No such file"),
        (["--out", "missing/x.gz"], "missing/x.gz: give the name of a file"),
        (["--profile", "missing.json"], "missing.json: No such file"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(
    arguments: list[str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main([*arguments, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("model_type", [None, "nothing-of-that-name", "vit"])
def test_models_that_transformers_cannot_make_are_refused(model_type: str | None) -> None:
    program = ModelProgram(TINY | {"model_type": model_type}, 1, 16)
    with pytest.raises(ConfigError, match="no causal language model of this configuration"):
        trace(program.build, example_profile())


@pytest.mark.parametrize(("is_checkpointed", "measured_gb"), [(False, 48.93), (True, 29.517)])
def test_the_peak_of_a_llama_is_what_a_gpu_allocates(
    is_checkpointed: bool, measured_gb: float
) -> None:
    """`max_memory_allocated` of `tools/bench_llama.py --model 3.5b` on an H200."""
    program = ModelProgram(LLAMA, 4, 2048, is_checkpointed=is_checkpointed)
    index = TraceIndex(trace(program.build, example_profile()))
    assert index.peak_bytes / 1e9 == pytest.approx(measured_gb, rel=0.005)


@pytest.mark.nightly
def test_a_model_of_175_billion_parameters_is_traced_in_less_than_a_minute() -> None:
    large = LLAMA | {"hidden_size": 12288, "intermediate_size": 33000, "num_hidden_layers": 96}
    program = ModelProgram(large | {"num_attention_heads": 96}, 1, 2048)
    started_s = time.process_time()
    index = TraceIndex(trace(program.build, example_profile()))
    assert time.process_time() - started_s < 60
    assert index.peak_bytes / 1e9 == pytest.approx(1407, rel=0.01)
    assert index.num_ops > 28_000
