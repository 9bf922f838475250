"""Tensors that share a storage, made before and after it went out, and other things that hold on to one."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.paging_states import STATES, round_trip, snapshot
from torch_lms.swap import intercepts

ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda t: t.view(4, 16),
    "slice": lambda t: t[2:5],
    "step": lambda t: t[::3],
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(5, 8),
    "as_strided": lambda t: t.as_strided((3, 3), (2, 1), 5),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(0, 3, 2),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "other_dtype": lambda t: t.view(torch.int32),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "set_": lambda t: torch.empty(0).set_(t),
    "set_storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 9, (4,), (3,)),
    "view_of_view": lambda t: t.t()[1:].t()[1:],
    "unbind": lambda t: t.unbind()[3],
    "split": lambda t: t.split(3)[1],
    "tensor_subclass": lambda t: t.as_subclass(_Named),
}


class _Named(torch.Tensor):
    """A subclass by ``__torch_function__``."""


def double_in_place(tensor: torch.Tensor) -> None:
    """Works on integers too, and on expanded tensors through their elements."""
    tensor.detach()[0].mul_(2) if tensor.dim() < 2 or tensor.stride(0) else tensor.detach()[0, 0].mul_(2)


def base() -> torch.Tensor:
    return torch.arange(64.0).view(8, 8)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("alias", ALIASES)
def test_alias_made_before_or_after_sees_writes_and_is_seen(alias: str, state: str, paged: ModuleType) -> None:
    def run(place: Any) -> Any:
        tensor = base()
        before = ALIASES[alias](tensor)
        place([tensor])
        after = ALIASES[alias](tensor)
        tensor.add_(1)
        first = snapshot([before, after])
        place([before])
        double_in_place(after)
        second = snapshot([before, tensor])
        place([after])
        double_in_place(before)
        return first, second, snapshot([before, after, tensor])

    assert run(STATES[state]) == run(STATES["plain"])


def test_pageout_of_a_view_moves_the_whole_storage(paged: ModuleType, chaos: bool) -> None:
    tensor = base()
    view = tensor[3]
    assert paged.pageout(view) <= 1
    paged.wait()
    if not chaos:
        assert [paged.swap.state(t) for t in (tensor, view)] == ["paged_out"] * 2
        assert paged.stats().paged_out_bytes == 256
    assert view.tolist() == list(range(24, 32))
    assert chaos or paged.swap.is_resident(tensor)


def test_pageouts_of_all_views_of_a_storage_are_one_pageout(paged: ModuleType, chaos: bool) -> None:
    tensor = base()
    count = paged.pageout([tensor, tensor.t(), tensor[1:], tensor.detach()])
    paged.wait()
    if not chaos:
        assert count == 1
        assert paged.stats().paged_out_storages == 1
    assert torch.equal(tensor, base())


@pytest.mark.parametrize("state", STATES)
def test_view_outlives_its_base(state: str, paged: ModuleType) -> None:
    tensor = base()
    view = tensor[7]
    STATES[state]([tensor])
    del tensor
    assert view.tolist() == list(range(56, 64))
    round_trip([view])
    assert view.tolist() == list(range(56, 64))


@pytest.mark.parametrize("state", STATES)
def test_tensor_moved_to_another_storage_leaves_the_old_one_to_its_aliases(state: str, paged: ModuleType) -> None:
    tensor, other = base(), base() * 3
    alias = tensor.detach()
    STATES[state]([tensor, other])
    tensor.set_(other)
    tensor.add_(1)
    STATES[state]([alias])
    assert torch.equal(alias, base())
    assert torch.equal(other, base() * 3 + 1)


# --- copy-on-write -------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["original", "clone"])
@pytest.mark.parametrize("state", STATES)
def test_lazy_clone_of_a_paged_out_tensor_stays_apart(written: str, state: str, paged: ModuleType) -> None:
    original = base()
    STATES[state]([original])
    clone = torch._lazy_clone(original)
    round_trip([original, clone])
    (original if written == "original" else clone).add_(1)
    round_trip([original, clone])
    expected = {"original": base(), "clone": base()}
    expected[written] += 1
    assert torch.equal(original, expected["original"])
    assert torch.equal(clone, expected["clone"])


def test_copy_on_write_storage_is_refused(paged: ModuleType) -> None:
    original = base()
    clone = torch._lazy_clone(original)
    with pytest.raises(torch_lms_error("PageoutError"), match=r"copy-on-write"):
        paged.pageout(clone)
    assert torch.equal(clone, original)


def torch_lms_error(name: str) -> type[Exception]:
    import torch_lms.errors

    error: type[Exception] = getattr(torch_lms.errors, name)
    return error


# --- subclasses -----------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A subclass by ``__torch_dispatch__`` that holds another tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        result = func(*map(unwrap, args), **{key: unwrap(value) for key, value in (kwargs or {}).items()})
        return cls(result) if isinstance(result, torch.Tensor) else result


class Logged(torch.Tensor):
    """A subclass by ``__torch_function__`` that looks at what goes through it."""

    seen: list[str] = []  # noqa: RUF012  # the class's own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("state", STATES)
def test_what_a_wrapper_subclass_holds_can_be_out(state: str, paged: ModuleType) -> None:
    wrapped = Wrapper(base())
    STATES[state]([wrapped.inner])
    doubled = wrapped * 2
    wrapped.add_(1)
    assert torch.equal(doubled.inner, base() * 2)
    assert torch.equal(wrapped.inner, base() + 1)


def test_wrapper_subclass_itself_is_refused(paged: ModuleType) -> None:
    wrapped = Wrapper(base())
    with pytest.raises((torch_lms_error("PageoutError"), RuntimeError)):
        paged.pageout(wrapped)
    assert torch.equal(wrapped.inner, base())


@pytest.mark.parametrize("state", STATES)
def test_torch_function_subclass_can_be_out(state: str, paged: ModuleType) -> None:
    logged = base().as_subclass(Logged)
    STATES[state]([logged])
    Logged.seen.clear()
    result = (logged + 1).t()
    assert isinstance(result, Logged)
    assert "add" in Logged.seen
    assert torch.equal(result.as_subclass(torch.Tensor), (base() + 1).t())


# --- addresses that were given away ------------------------------------------------------------------------


def _keep_numpy(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


def _keep_dlpack(tensor: torch.Tensor) -> Any:
    return np.from_dlpack(tensor)


def _keep_tensor_by_dlpack(tensor: torch.Tensor) -> Any:
    return torch.from_dlpack(tensor)


def _keep_capsule(tensor: torch.Tensor) -> Any:
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


def _keep_array_interface(tensor: torch.Tensor) -> Any:
    return np.asarray(tensor)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "keep", [_keep_numpy, _keep_dlpack, _keep_tensor_by_dlpack, _keep_capsule, _keep_array_interface]
)
def test_memory_given_away_stays_shared(keep: Callable[[torch.Tensor], Any], state: str, paged: ModuleType) -> None:
    paged.pageout(torch.ones(1))  # paging is on: from now on it is known what is given away
    tensor = base()
    STATES[state]([tensor])
    kept = keep(tensor)
    assert round_trip([tensor]) == 1
    tensor.fill_(3)
    assert kept[0, 0] == 3
    kept[0, 0] = 4
    assert tensor[0, 0] == 4
    assert round_trip([tensor]) == 1


@pytest.mark.parametrize(
    "export",
    [
        lambda tensor: torch._C._to_dlpack(tensor),
        lambda tensor: torch._C._to_dlpack(data=tensor),
        lambda tensor: torch._C._to_dlpack_versioned(tensor),
    ],
    ids=["a tensor", "a named tensor", "versioned"],
)
def test_memory_given_away_by_a_function_that_was_found_early_stays_shared(
    export: Callable[[torch.Tensor], Any], paged: ModuleType
) -> None:
    """`from torch.utils.dlpack import to_dlpack` before paging is on finds PyTorch's own function."""
    paged.pageout(torch.ones(1))
    tensor = base()
    kept = torch.from_dlpack(export(tensor))
    with pytest.raises(torch_lms_error("PageoutError"), match="has been pinned"):
        paged.pageout(tensor)
    kept[0, 0] = 4
    assert tensor[0, 0] == 4


class _Array(torch.Tensor):
    """Gives its address out as tensors on GPUs do."""

    @property
    def address(self) -> int:
        return self.data_ptr()


def test_memory_given_away_by_a_property_stays_where_it_is(paged: ModuleType) -> None:
    paged.pageout(torch.ones(1))
    assert hasattr(torch.Tensor.__cuda_array_interface__.fget, intercepts._WATCHED)
    intercepts._wrap_property(_Array, "address", intercepts._pin)
    tensor = base()
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert round_trip([tensor]) == 0  # none is refused
    address = tensor.as_subclass(_Array).address
    with pytest.raises(torch_lms_error("PageoutError"), match="has been pinned"):
        paged.pageout(tensor)
    assert tensor.data_ptr() == address


def test_memory_of_numpy_is_refused(paged: ModuleType) -> None:
    array = np.arange(4.0)
    for tensor in (torch.from_numpy(array), torch.frombuffer(array, dtype=torch.float64), torch.as_tensor(array)):
        with pytest.raises(torch_lms_error("PageoutError"), match=r"does not belong to PyTorch's allocator"):
            paged.pageout(tensor)
        assert tensor.data_ptr() == array.ctypes.data


def test_slice_of_a_storage_stays_shared(paged: ModuleType) -> None:
    paged.pageout(torch.ones(1))
    tensor = torch.arange(16, dtype=torch.uint8)
    piece = tensor.untyped_storage()[2:4]
    round_trip([tensor])
    tensor.fill_(9)
    assert list(piece) == [9, 9]


def test_address_of_a_tensor_that_came_back_is_valid(paged: ModuleType) -> None:
    tensor = base()
    for _ in range(3):
        round_trip([tensor])
        tensor.add_(1)
    assert ctypes.string_at(tensor.data_ptr(), tensor.nbytes) == bytes(
        (base() + 3).view(torch.uint8).flatten().tolist()
    )


# --- lives and deaths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_tensor_freed_in_any_state_leaves_nothing(state: str, paged: ModuleType, chaos: bool) -> None:
    neighbour = base()
    for _ in range(20):
        tensor = torch.full((1000,), 5.0)
        STATES[state]([tensor, neighbour])
        del tensor
    round_trip([neighbour])
    assert torch.equal(neighbour, base())
    if not chaos:
        assert paged.stats().paged_out_bytes == 0
        if state == "copied":
            paged.disable()  # until then the host gives copies back when it needs their room
        assert paged.stats().host_used_bytes == 0


@pytest.mark.parametrize("state", STATES)
def test_tensor_resurrected_by_its_owner_keeps_its_contents(state: str, paged: ModuleType) -> None:
    saved: list[torch.Tensor] = []

    class Owner:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __del__(self) -> None:
            saved.append(self.tensor)

    owner = Owner(base())
    STATES[state]([owner.tensor])
    del owner
    gc.collect()
    assert torch.equal(saved.pop(), base())


@pytest.mark.parametrize("state", STATES)
def test_weak_reference_sees_a_tensor_die_and_paging_does_not_kill_it(state: str, paged: ModuleType) -> None:
    tensor = base()
    died: list[bool] = []
    reference = weakref.ref(tensor, lambda _: died.append(True))
    STATES[state]([tensor])
    gc.collect()
    found = reference()
    assert found is tensor
    assert torch.equal(found, base())
    del tensor, found
    assert died == [True]


@pytest.mark.parametrize("state", STATES)
def test_python_object_rebuilt_from_a_storage_keeps_contents(state: str, paged: ModuleType) -> None:
    """The storage's Python object dies while its storage, kept by C++, is out."""
    holder = torch.nn.Module()
    holder.register_buffer("kept", base())
    storage = holder.kept.untyped_storage()
    STATES[state]([holder.kept])
    del storage
    gc.collect()
    assert holder.kept.untyped_storage().nbytes() == 256
    assert torch.equal(holder.kept, base())
