"""The core can be imported, and so simulated and tested, without torch.

Each case is a fresh interpreter: static checks miss what a parent package imports at run time.
"""

from __future__ import annotations

import pytest

from tests.interpreter import run_program

TORCH_FREE = [
    "tvm_pager",
    "tvm_pager.config",
    "tvm_pager.errors",
    "tvm_pager.estimate.command",
    "tvm_pager.events",
    "tvm_pager.machine",
    "tvm_pager.memory",
    "tvm_pager.paging",
    "tvm_pager.planning",
    "tvm_pager.planning.traces.trace_file",
    "tvm_pager.planning.traces.trace_index",
    "tvm_pager.policies.lru",
    "tvm_pager.testing.contract",
    "tvm_pager.testing.program_machine",
    "tvm_pager.testing.strategies",
    "tvm_pager.simulation.command",
    "tvm_pager.simulation.sweep",
    "tvm_pager.transfer.protocol",
    "tvm_pager.transfer.virtual_backend",
    "tvm_pager.units",
]
HEAVY = ("torch", "kvikio", "cupy", "transformers")


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_leaves_torch_alone(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        f"sys.exit(f'importing {module} loaded {{loaded}}' if loaded else 0)"
    )
    result = run_program(program)
    assert result.returncode == 0, result.stderr
