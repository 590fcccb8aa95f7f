"""Every way in which a tensor's bytes are reached without an operation that could be seen.

Each is applied to a page that is off the device, for parameters, plain tensors and views of them,
and must give what it gives in plain torch, or the same error.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import operator
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import tvm_pager
from tests.trials.harness import (
    assert_equal,
    assert_nothing_left,
    data_bytes,
    frozen,
    push_to_nvme,
    small_pager,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# --- the tensors ---


def numbers(*, integers: bool = False) -> torch.Tensor:
    values = torch.arange(48, dtype=torch.int64 if integers else torch.float32).reshape(6, 8)
    return values if integers else values / 8


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": numbers,
    "parameter": lambda: nn.Parameter(numbers()),
    "transposed": lambda: numbers().t(),
    "offset": lambda: numbers()[1:, 2:5],
    "of parameter": lambda: nn.Parameter(numbers()).detach()[2:],
    "integer": lambda: numbers(integers=True),
}


# --- the uses ---


def memory(address: int, tensor: torch.Tensor) -> bytes:
    """What lies between the first and the last element."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return ctypes.string_at(address, (last + 1) * tensor.element_size())


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=not isinstance(value, torch.UntypedStorage))


def rebuilt(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().map_(tensor.detach().clone(), lambda a, b: a + 2 * b)


def through_reducers(tensor: torch.Tensor) -> Any:
    return pickle.loads(bytes(ForkingPickler.dumps(tensor.detach())))


def key(tensor: torch.Tensor) -> Any:
    return hash(tensor) == id(tensor), {tensor: "found"}[tensor], tensor in {tensor}


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda t: memory(t.data_ptr(), t),
    "untyped_storage": lambda t: t.untyped_storage().tolist(),
    "untyped_storage bytes": lambda t: bytes(t.untyped_storage()),
    "untyped_storage pointer": lambda t: t.data_ptr() - t.untyped_storage().data_ptr(),
    "untyped_storage nbytes": lambda t: (t.untyped_storage().nbytes(), t.untyped_storage().size()),
    "untyped_storage clone": lambda t: t.untyped_storage().clone().tolist(),
    "untyped_storage saved": lambda t: saved_and_loaded(t.untyped_storage()).tolist(),
    "storage": lambda t: t.storage().tolist(),
    "_typed_storage": lambda t: t._typed_storage().tolist(),
    "torch.from_dlpack": torch.from_dlpack,
    "np.from_dlpack": np.from_dlpack,
    "__dlpack__": lambda t: torch.utils.dlpack.from_dlpack(t.__dlpack__()),
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())),
    "__dlpack_device__": lambda t: str(t.__dlpack_device__()),
    "__reduce_ex__": lambda t: t.__reduce_ex__(2)[0].__name__,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": saved_and_loaded,
    "torch.save of views": lambda t: saved_and_loaded([t, t.detach()[1:], {"row": t.detach()[0]}]),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "numpy()": lambda t: t.numpy(),
    "numpy(force=True)": lambda t: t.numpy(force=True),
    "detach().numpy()": lambda t: t.detach().numpy(),
    "np.asarray": np.asarray,
    "np.asarray of detached": lambda t: np.asarray(t.detach()),
    "np.array of a dtype": lambda t: np.array(t.detach(), dtype=np.float64),
    "__array__": lambda t: t.detach().__array__(),
    "np.mean": lambda t: float(np.mean(t.detach())),
    "np.add": lambda t: frozen(np.add(t.detach(), 1)),
    "np.stack": lambda t: np.stack([t.detach(), t.detach()]),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: (t[1, 2].item(), t.detach().sum().item()),
    "item of many": lambda t: t.item(),
    "repr": repr,
    "str": str,
    "f-string": lambda t: f"{t}",
    "f-string with format": lambda t: f"{t[1, 2]:.4f}",
    "f-string with format, of many": lambda t: f"{t:.4f}",
    "format": lambda t: (format(t), format(t[1, 1].detach(), "08.3f")),
    "repr of a view": lambda t: repr(t[1:, ::2]),
    "repr in a list": lambda t: str([t[0], t[1]]),
    "map_": mapped,
    "apply_": lambda t: t.detach().apply_(lambda x: x * 3),
    "share_memory_": lambda t: (t.detach().share_memory_(), t.is_shared()),
    "iter": lambda t: [row.tolist() for row in t],
    "unpack": lambda t: [*t][1],
    "len": len,
    "bool": lambda t: (bool(t[1, 2]), bool(t[0, 0] * 0)),
    "bool of many": bool,
    "int": lambda t: int(t[1, 2]),
    "float": lambda t: float(t[1, 2]),
    "complex": lambda t: complex(t[1, 2]),
    "index": lambda t: list(range(100))[t[0, 1]],
    "operator.index": lambda t: operator.index(t[0, 1]),
    "slice bound": lambda t: list(range(100))[: t[0, 2].long()],
    "torch.tensor of elements": lambda t: torch.tensor([t[0, 0], t[1, 1]]),
    "torch.tensor": torch.tensor,
    "torch.as_tensor": torch.as_tensor,
    "torch.asarray": torch.asarray,
    "torch.Tensor": lambda t: torch.Tensor(t.detach().float()),
    "new_tensor": lambda t: t.detach().new_tensor([t[0, 0], t[1, 1]]),
    "set_": rebuilt,
    "ForkingPickler": through_reducers,
    "default_collate": lambda t: default_collate([t[0], t[1]]),
    "default_collate of dicts": lambda t: default_collate([{"x": t[0]}, {"x": t[1]}]),
    "in": lambda t: (t[1, 2].item() in t, -7 in t),
    "key": key,
    "type": lambda t: t.type(),
    "is_shared": lambda t: t.is_shared(),
    "torch.equal": lambda t: torch.equal(t, t.clone()),
    "comparison": lambda t: t.detach().tolist() == t.clone().tolist(),
    "round": lambda t: round(t[1, 2].item(), 1),
    "max of iterable": lambda t: float(max(t[0])),
    "sorted": lambda t: [float(x) for x in sorted(t[0], reverse=True)],
    "range bound": lambda t: list(range(t[0, 2].long())),
    "dir": lambda t: "shape" in dir(t),
}

# These may refuse by name instead: memory that other processes map can never be moved.
MAY_REFUSE = {"share_memory_", "ForkingPickler"}


def outcome(use: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """What came of a use, as plain data: its result, or the type of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # storage() is deprecated; it is tried all the same
        try:
            return frozen(use(tensor), version=False)
        except tvm_pager.UnpageableError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"raises {type(error).__name__}"


def pushed_off(pager: Any, odd: int) -> dict[str, torch.Tensor]:
    """A tensor of each kind, every second one in DRAM and the others on NVMe."""
    tensors = {kind: make() for kind, make in KINDS.items()}
    push_to_nvme(pager, *tensors.values())
    for index, tensor in enumerate(tensors.values()):
        if index % 2 == odd:
            tensor.detach().add_(0)  # dirty again, so that it leaves for DRAM
    pager.evict_all()
    tiers = [pager.residency(t).name for t in tensors.values()]
    assert tiers == [("HOST" if i % 2 == odd else "NVME") for i in range(len(tiers))]
    return tensors


def difference(expected: Any, got: Any, where: str) -> str | None:
    try:
        assert_equal(expected, got, where)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("entry", USES)
def test_raw_access_finds_the_bytes_of_a_page_that_is_off_the_device(
    entry: str, tmp_path: Path
) -> None:
    use = USES[entry]
    wanted = {}
    for kind, make in KINDS.items():
        plain = make()
        wanted[kind] = (outcome(use, plain), data_bytes(plain))
    found = []
    with small_pager(tmp_path) as pager:
        tensors = pushed_off(pager, odd=list(USES).index(entry) % 2)
        for kind, tensor in tensors.items():
            got = outcome(use, tensor)
            gc.collect()
            pager.check_invariants()
            pager.evict_all()
            left = data_bytes(tensor)
            expected, expected_left = wanted[kind]
            if not (entry in MAY_REFUSE and isinstance(got, str) and got.startswith("refused")):
                found.append(difference(expected, got, f"{kind}"))
            found.append(difference(expected_left, left, f"{kind}, afterwards"))
        del tensors, tensor
    assert [text for text in found if text] == []
    assert_nothing_left(tmp_path)


# --- aliases that stay ---


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "np.asarray": np.asarray,
    "np.from_dlpack": np.from_dlpack,
    "torch.from_dlpack": torch.from_dlpack,
    "view of numpy": lambda t: t.numpy()[:],
    "numpy of a view": lambda t: t[0:].numpy(),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_and_the_tensor_see_each_others_writes(alias: str, pager: Any) -> None:
    tensor = numbers()
    pager.evict_all()
    array = ALIASES[alias](tensor)
    if (
        not alias.endswith("from_dlpack")
        or isinstance(array, torch.Tensor)
        or array.flags.writeable
    ):
        array[0, 1] = 77.0
        assert tensor[0, 1].item() == 77.0
    tensor[2, 3] = -5.0
    assert float(array[2, 3]) == -5.0
    pager.evict_all()
    tensor[3, 3] = -6.0
    assert float(array[3, 3]) == -6.0


@pytest.mark.parametrize("alias", ALIASES)
def test_a_page_stays_while_an_alias_lives(alias: str, pager: Any) -> None:
    tensor = numbers()
    pager.evict_all()
    array = ALIASES[alias](tensor)
    pager.evict_all()
    assert pager.residency(tensor).name == "DEVICE"
    keep = array[1:3]  # a view of the alias keeps the memory as well
    del array
    gc.collect()
    pager.evict_all()
    assert pager.residency(tensor).name == "DEVICE"
    assert float(keep[0, 0]) == 1.0
    del keep
    gc.collect()
    pager.evict_all()
    assert pager.residency(tensor).name != "DEVICE"
    assert tensor[1, 0].item() == 1.0


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_outlives_its_tensor(alias: str, pager: Any) -> None:
    baseline = pager.stats().num_pages
    array = ALIASES[alias](numbers())
    gc.collect()
    pager.evict_all()
    others = [torch.full((6, 8), float(i)) for i in range(4)]
    assert float(array[5, 7]) == 47 / 8
    del others, array
    gc.collect()
    assert pager.stats().num_pages == baseline


def test_writes_through_an_alias_survive_its_death(pager: Any) -> None:
    tensor = numbers()
    pager.evict_all()
    assert tensor[0, 0].item() == 0.0  # resident and clean
    array = tensor.numpy()
    array += 1
    del array
    gc.collect()
    pager.evict_all()
    assert tensor[0, 0].item() == 1.0


def test_an_address_holds_until_an_event_after_it(pager: Any) -> None:
    """`data_ptr()` has no end of its own: a release, or an iteration boundary, ends the pin."""
    tensor = numbers()
    pager.evict_all()
    address = tensor.data_ptr()
    pager.evict_all()
    assert pager.residency(tensor).name == "DEVICE"
    assert tensor.data_ptr() == address
    pager.release(tensor)
    pager.evict_all()
    assert pager.residency(tensor).name != "DEVICE"

    tensor.data_ptr()
    pager.step()
    pager.step()  # "after the next boundary"
    pager.evict_all()
    assert pager.residency(tensor).name != "DEVICE"
    assert_equal(data_bytes(torch.arange(48) / 8), data_bytes(tensor))


def test_an_address_marks_its_page_written(pager: Any) -> None:
    tensor = numbers()
    pager.evict_all()
    assert tensor[0, 1].item() == 1 / 8  # resident and clean
    address = tensor.data_ptr()
    ctypes.c_float.from_address(address).value = 99.0
    pager.release(tensor)
    pager.evict_all()
    assert tensor[0, 0].item() == 99.0


def test_a_storage_alias_sees_writes_and_is_seen(pager: Any) -> None:
    tensor = numbers()
    pager.evict_all()
    other = rebuilt(tensor)
    other[0, 0] = 3.0
    assert tensor[0, 0].item() == 3.0
    tensor[0, 1] = 4.0
    pager.release(tensor)
    pager.evict_all()
    assert other[0, 1].item() == 4.0
    assert tensor[0, 0].item() == 3.0


def test_shared_memory_stays_put(pager: Any) -> None:
    tensor = numbers()
    pager.evict_all()
    try:
        tensor.share_memory_()
    except tvm_pager.UnpageableError as error:
        assert "share_memory_" in str(error)  # noqa: PT017 - either answer is right
    else:
        assert tensor.is_shared()
    pager.evict_all()
    assert_equal(data_bytes(torch.arange(48) / 8), data_bytes(tensor))
