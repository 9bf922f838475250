"""Kinds of access that are not, or not only, ops: Python's protocols, storages, addresses, copies of objects."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.unit.access_kinds import AccessKind, Make, complex_vector, integers, matrices, scalar, vectors

__all__ = ["RAW_KINDS"]


# --- addresses: a pointer is good until the next call into PyTorch --------------------------------


def _read_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def _written_at_its_address(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    ctypes.memset(a.data_ptr(), 0, 8)
    return a


def _written_at_its_storage(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    ctypes.memset(a.untyped_storage().data_ptr(), 0, 8)
    return a


# --- storages ---------------------------------------------------------------------------------------


def _storage_items_set(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    storage = a.untyped_storage()
    storage[0] = 7
    storage[4:8] = 9
    return a


def _storage_copied_from_another(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.untyped_storage().copy_(b.untyped_storage())
    return a


def _storage_filled(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    a.untyped_storage().fill_(3)
    return a


def _storage_resized(factor: float) -> Callable[..., Any]:
    def access(a: torch.Tensor, _: torch.Tensor) -> Any:
        storage = a.untyped_storage()
        kept = int(min(factor, 1) * 40)
        storage.resize_(int(storage.nbytes() * factor))
        a.set_(a.untyped_storage(), 0, (kept, 40))
        return [storage.nbytes(), a]

    return access


def _tensor_over_its_storage(a: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
    other = torch.empty(0, device=a.device).set_(a.untyped_storage(), 40, (2, 3), (40, 1))
    other.add_(1)
    return [other, a]


def _typed_storage(a: torch.Tensor, _: torch.Tensor) -> list[Any]:
    typed = torch.storage.TypedStorage(wrap_storage=a.untyped_storage(), dtype=a.dtype, _internal=True)
    return [typed._getitem(3), typed._size(), typed.tolist()]


# --- saving and copying -------------------------------------------------------------------------------


def _saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def _deeply_copied_with_an_alias(a: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
    one, alias = copy.deepcopy([a, a[1:3]])
    one.add_(1)
    return [one, alias, a]


def _state_dict_loaded(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    linear = torch.nn.Linear(40, 40).to(a.device)
    linear.weight = torch.nn.Parameter(a)
    linear.load_state_dict({"weight": b, "bias": b[0]})
    return [linear.weight, a, *linear.state_dict().values()]


def _assigned_from_a_state_dict(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    linear = torch.nn.Linear(40, 40, device=a.device)
    linear.load_state_dict({"weight": a, "bias": b[0]}, assign=True)
    return [linear(b), linear.weight]


# --- numpy, DLPack, the buffer protocol ----------------------------------------------------------------


def _shared_with_numpy(a: torch.Tensor, _: torch.Tensor) -> list[Any]:
    array = a.numpy()
    array[0] = 5.0
    seen_by_torch = a[0].clone()
    a[1] = 6.0
    return [seen_by_torch, array.copy(), a]


def _shared_by_dlpack(a: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
    other = torch.from_dlpack(a)
    other[0] = 5.0
    a[1] = 6.0
    return [other, a]


def _shared_by_capsule(a: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
    other = torch.from_dlpack(torch.to_dlpack(a))
    other.add_(1)
    return [other, a]


def _refuses_the_buffer_protocol(a: torch.Tensor, _: torch.Tensor) -> list[Any]:
    refusals = []
    for read in (memoryview, lambda tensor: torch.frombuffer(tensor, dtype=torch.float32)):
        try:
            refusals.append(bytes(read(a)))
        except (TypeError, ValueError) as error:
            refusals.append(type(error).__name__)
    return [refusals, a]


# --- what the object itself can be told to do ------------------------------------------------------------


def _data_assigned(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    before = a[0]
    a.data = b
    a.add_(1)
    return [a, b, before]


def _swapped(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    torch.utils.swap_tensors(a, b)
    return [a + 1, b.mul_(2)]


def _cow(a: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
    clone = torch._lazy_clone(a)
    clone[0] = 1.0
    return [clone, a.add_(1)]


def _moved_to_shared_memory(a: torch.Tensor, _: torch.Tensor) -> list[Any]:
    a.share_memory_()
    return [a.is_shared(), a.add_(1)]


def _raw(
    name: str,
    access: Callable[..., Any],
    make: Make = matrices,
    *,
    pins: bool = False,
    cpu_only: bool = False,
) -> AccessKind:
    return AccessKind(name=name, access=access, make=make, pins=pins, cpu_only=cpu_only)


RAW_KINDS: list[AccessKind] = [
    _raw("read_at_data_ptr", lambda a, _: _read_at(a.data_ptr(), a.nbytes), cpu_only=True),
    _raw("read_at_data_ptr_of_view", lambda a, _: _read_at(a[3:5].data_ptr(), 320), cpu_only=True),
    _raw("read_at_storage", lambda a, _: _read_at(a.untyped_storage().data_ptr(), a.nbytes), cpu_only=True),
    _raw("write_at_data_ptr", _written_at_its_address, cpu_only=True),
    _raw("write_at_storage", _written_at_its_storage, cpu_only=True),
    _raw("storage_bytes", lambda a, _: bytes(a.untyped_storage().tolist()), vectors),
    _raw("storage_item", lambda a, _: [a.untyped_storage()[i] for i in (0, 5, -1)]),
    _raw("storage_items_set", _storage_items_set, cpu_only=True),
    _raw("storage_clone", lambda a, _: bytes(a.untyped_storage().clone().tolist()), vectors),
    _raw("storage_copy_", _storage_copied_from_another),
    _raw("storage_fill_", _storage_filled, cpu_only=True),
    _raw("storage_resize_bigger", _storage_resized(1.5)),
    _raw("storage_resize_smaller", _storage_resized(0.5)),
    _raw("storage_resize_to_nothing", _storage_resized(0)),
    _raw("storage_set", _tensor_over_its_storage),
    _raw("typed_storage", _typed_storage, vectors),
    _raw("storage_deepcopy", lambda a, _: bytes(copy.deepcopy(a.untyped_storage()).tolist()), vectors),
    _raw("copy", lambda a, _: [copy.copy(a).add_(1), a]),
    _raw("deepcopy", lambda a, _: copy.deepcopy(a)),
    _raw("deepcopy_with_alias", _deeply_copied_with_an_alias),
    _raw("deepcopy_parameter", lambda a, _: copy.deepcopy(torch.nn.Parameter(a))),
    _raw("pickle", lambda a, _: pickle.loads(pickle.dumps(a))),
    _raw("pickle_of_view", lambda a, _: pickle.loads(pickle.dumps(a.t()[1:4]))),
    _raw("save_and_load", lambda a, b: _saved_and_loaded({"a": a, "views": [b[0], b.t()]})),
    _raw("save_and_load_parameter", lambda a, _: _saved_and_loaded(torch.nn.Parameter(a))),
    _raw("load_state_dict", _state_dict_loaded),
    _raw("load_state_dict_assign", _assigned_from_a_state_dict),
    _raw("item", lambda s: s.item(), scalar),
    _raw("bool_float_int", lambda s: [bool(s), float(s), int(s), complex(s)], scalar),
    _raw("index_protocol", lambda i, w: [list(range(10))[i[0]], w.tolist()[i[2]]], integers),
    _raw("iteration", lambda a, b: [*a, *(x + y for x, y in zip(a, b, strict=True))], vectors),
    _raw("unpacking", lambda a, _: [first := next(iter(a)), list(reversed(a)), first], vectors),
    _raw("contains", lambda i, _: [2 in i, 7 in i], integers),
    _raw("comparison", lambda a, b: [a < b, a == a, bool((a == a).all())], vectors),
    _raw("tolist", lambda a, _: [a.tolist(), a[0].tolist()], vectors),
    _raw("tolist_complex", lambda c: c.tolist(), complex_vector),
    _raw("repr", lambda a, _: [repr(a), str(a[0])]),
    _raw("repr_complex", lambda c: repr(c), complex_vector),
    _raw("format", lambda s: f"{s:.3f} {s}", scalar),
    _raw("numpy", lambda a, _: a.numpy().copy(), pins=True, cpu_only=True),
    _raw("numpy_both_ways", _shared_with_numpy, pins=True, cpu_only=True),
    _raw("numpy_of_view", lambda a, _: a.t()[1:3].numpy().copy(), pins=True, cpu_only=True),
    _raw("numpy_forced", lambda a, _: a.requires_grad_().numpy(force=True).copy(), pins=True, cpu_only=True),
    _raw("array", lambda a, _: a.__array__().copy(), pins=True, cpu_only=True),
    _raw("asarray", lambda a, _: np.asarray(a).copy(), pins=True, cpu_only=True),
    _raw("ufunc", lambda a, _: np.add(np.asarray(a), np.asarray(a.t())), pins=True, cpu_only=True),
    _raw("numpy_from_dlpack", lambda a, _: np.from_dlpack(a).copy(), pins=True, cpu_only=True),
    _raw("from_dlpack", _shared_by_dlpack, pins=True),
    _raw("to_dlpack", _shared_by_capsule, pins=True),
    _raw("buffer_protocol", _refuses_the_buffer_protocol),
    _raw("share_memory_", _moved_to_shared_memory, pins=True, cpu_only=True),
    _raw("data_assignment", _data_assigned),
    _raw("swap_tensors", _swapped),
    _raw("lazy_clone", _cow),
    _raw("element_size_and_names", lambda a, _: [a.nbytes, a.stride(), a.storage_offset(), a.is_contiguous()]),
]
