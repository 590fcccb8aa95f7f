"""What the device's memory can give: other processes' share respected, promises kept possible."""

from __future__ import annotations

import pytest
import torch

from tvm_pager.errors import ConfigError
from tvm_pager.machine import DeviceMemory, host_limit_bytes
from tvm_pager.runtime.device import check_device_budget, device_memory

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which others hold 30, and torch in this process 10 in its cache or in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)


def test_cpu_tensors_that_stand_in_for_a_device_have_no_memory_of_their_own() -> None:
    assert device_memory(CPU) is None


@pytest.mark.usefixtures("card")
def test_memory_of_other_processes_is_not_free_and_our_own_is() -> None:
    assert device_memory(CUDA) == DeviceMemory(free_bytes=50 * GIB, total_bytes=80 * GIB)


@pytest.mark.usefixtures("card")
def test_a_budget_above_the_card_is_refused_with_both_numbers() -> None:
    check_device_budget(80 * GIB, CUDA)
    with pytest.raises(ConfigError, match=r"81\.00 GiB.*cuda:0 is 80\.00 GiB; give less"):
        check_device_budget(81 * GIB, CUDA)


def test_a_stand_in_budget_above_what_the_machine_allows_is_refused() -> None:
    limit = host_limit_bytes()
    check_device_budget(limit.nbytes, CPU)
    check_device_budget(None, CPU)
    with pytest.raises(ConfigError, match="give less") as caught:
        check_device_budget(2 * limit.nbytes, CPU)
    assert limit.reason in str(caught.value)


@pytest.mark.gpu
def test_the_real_card_says_something_plausible() -> None:
    memory = device_memory(torch.device("cuda", torch.cuda.current_device()))
    assert memory is not None
    assert 0 < memory.free_bytes <= memory.total_bytes
