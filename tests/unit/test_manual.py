"""Paging by hand: what is asked for, how it is counted, where a storage is, and that its bytes stay."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_lms
from tests.unit.error_messages import raises_saying
from tests.unit.markers import counts_exactly
from torch_lms.errors import LmsError, PageoutError
from torch_lms.swap import is_resident, state, unpin

NBYTES = 64 << 10
STATES = {"resident", "out_queued", "paging_out", "paged_out", "in_queued", "paging_in", "dropped"}


def filled(seed: int = 0) -> torch.Tensor:
    """64 KiB of random bits, no NaN among them however they are read."""
    return torch.randint(0, 2**30, (NBYTES // 4,), dtype=torch.int32, generator=generator(seed))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def paged_out(*tensors: torch.Tensor) -> None:
    torch_lms.pageout(*tensors)
    torch_lms.wait()


# --- arguments and counts ---------------------------------------------------------------------------


def parameters_on(tensors: list[torch.Tensor]) -> torch.nn.Module:
    return torch.nn.ParameterList(torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors)


WAYS: dict[str, Callable[[list[torch.Tensor]], tuple[Any, ...]]] = {
    "one by one": lambda tensors: tuple(tensors),
    "a list": lambda tensors: (tensors,),
    "a tuple": lambda tensors: (tuple(tensors),),
    "a generator": lambda tensors: ((tensor for tensor in tensors),),
    "a set": lambda tensors: (set(tensors),),
    "values of a dict": lambda tensors: (dict(enumerate(tensors)).values(),),
    "parameters": lambda tensors: (parameters_on(tensors).parameters(),),
    "storages": lambda tensors: tuple(tensor.untyped_storage() for tensor in tensors),
    "a list and more": lambda tensors: (tensors[:1], *tensors[1:]),
    "each twice": lambda tensors: (*tensors, *tensors),
}


@counts_exactly
@pytest.mark.parametrize("way", WAYS)
def test_everything_that_is_named_goes_out_and_comes_back(way: str, paged: ModuleType) -> None:
    tensors = [filled(seed) for seed in range(3)]
    out, back = WAYS[way](tensors), WAYS[way](tensors)
    assert paged.pageout(*out) == 3
    paged.wait()
    assert [state(tensor) for tensor in tensors] == ["paged_out"] * 3
    assert paged.prefetch(*back) == 3
    paged.wait()
    assert [state(tensor) for tensor in tensors] == ["resident"] * 3
    assert all(torch.equal(tensor, filled(seed)) for seed, tensor in enumerate(tensors))


@pytest.mark.parametrize("call", [torch_lms.pageout, torch_lms.prefetch])
@pytest.mark.parametrize("arguments", [(), ([],), ((), [])])
def test_nothing_named_is_nothing_done(call: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    assert call(*arguments) == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_a_tensor_without_bytes_stays(shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape)
    assert torch_lms.pageout(empty) == 0
    assert torch_lms.prefetch(empty) == 0
    torch_lms.wait()
    assert state(empty) == "resident"


@counts_exactly
def test_page_out_of_what_is_out_or_on_its_way_is_not_counted(paged: ModuleType) -> None:
    tensor = filled()
    assert paged.pageout(tensor) == 1
    assert paged.pageout(tensor) == 0
    paged.wait()
    assert paged.pageout(tensor) == 0
    paged.wait()
    assert state(tensor) == "paged_out"
    assert paged.stats().pageouts == 1


@counts_exactly
def test_prefetch_of_what_is_resident_or_on_its_way_is_not_counted(paged: ModuleType) -> None:
    tensor = filled()
    assert paged.prefetch(tensor) == 0
    paged_out(tensor)
    assert paged.prefetch(tensor) == 1
    assert paged.prefetch(tensor) == 0
    paged.wait()
    assert paged.prefetch(tensor) == 0
    assert paged.stats().prefetches == 1


@counts_exactly
def test_prefetch_of_what_is_on_its_way_out_calls_that_off(paged: ModuleType) -> None:
    tensor = filled()
    paged.pageout(tensor)
    paged.prefetch(tensor)
    paged.wait()
    assert state(tensor) == "resident"
    assert paged.stats().pageouts == 0
    assert paged.stats().cancelled_pageouts == 1
    assert torch.equal(tensor, filled())


@counts_exactly
def test_page_out_of_what_is_on_its_way_in_goes_out_or_stays_out(paged: ModuleType) -> None:
    tensor = filled()
    paged_out(tensor)
    paged.prefetch(tensor)
    paged.pageout(tensor)
    paged.wait()
    assert state(tensor) in ("paged_out", "resident")
    assert torch.equal(tensor, filled())


# --- views, other tensors of a storage -------------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda base: base[7:9],
    "transpose": lambda base: base.view(128, -1).t(),
    "other type": lambda base: base.view(torch.float32),
    "expanded": lambda base: base[:1].expand(5),
    "detached": lambda base: base.detach(),
    "without elements": lambda base: base[:0],
    "strided": lambda base: base[::2],
    "real part": lambda base: base.view(torch.complex64).real,
    "conjugate": lambda base: base.view(torch.complex64).conj(),
    "diagonal": lambda base: base.view(128, -1).diagonal(),
}


@counts_exactly
@pytest.mark.parametrize("view", VIEWS)
def test_pageout_of_a_view_moves_the_whole_storage(view: str, paged: ModuleType) -> None:
    base = filled()
    other = VIEWS[view](base)
    assert paged.pageout(other, base) == 1
    paged.wait()
    assert paged.stats().paged_out_bytes == NBYTES
    assert state(base) == state(other) == "paged_out"
    assert torch.equal(other, VIEWS[view](filled()))
    assert torch.equal(base, filled())


@pytest.mark.parametrize("view", ["slice", "transpose", "strided", "diagonal"])
def test_a_write_through_a_view_of_what_is_out_is_seen_by_all(view: str) -> None:
    base, plain = filled(), filled()
    other = VIEWS[view](base)
    paged_out(base)
    other.add_(1)
    VIEWS[view](plain).add_(1)
    paged_out(other)
    assert torch.equal(base, plain)


def test_a_view_that_is_made_of_what_is_out_belongs_to_the_same_storage() -> None:
    base = filled()
    paged_out(base)
    view = base[5:10]
    view.zero_()
    plain = filled()
    plain[5:10].zero_()
    assert torch.equal(base, plain)


@counts_exactly
def test_tensors_that_take_over_a_storage_take_over_where_it_is(paged: ModuleType) -> None:
    tensor = filled()
    paged_out(tensor)
    other = torch.empty(0, dtype=torch.int32)
    other.set_(tensor.untyped_storage())
    del tensor
    assert torch.equal(other, filled())
    assert paged.stats().paged_out_storages == 0


# --- use --------------------------------------------------------------------------------------------------


@counts_exactly
def test_a_storage_is_resident_until_its_page_out_is_committed(paged: ModuleType) -> None:
    tensor = filled()
    paged.pageout(tensor)
    assert state(tensor) in ("out_queued", "paging_out")
    assert is_resident(tensor)
    paged.wait()
    assert state(tensor) == "paged_out"
    assert not is_resident(tensor)


@counts_exactly
def test_use_before_the_commit_calls_the_page_out_off(paged: ModuleType) -> None:
    tensor = filled()
    paged.pageout(tensor)
    assert torch.equal(tensor + 1, filled() + 1)
    paged.wait()
    assert state(tensor) in ("resident", "paged_out")  # an op's beginning may have been soon enough
    assert torch.equal(tensor, filled())


@counts_exactly
def test_another_op_commits_what_has_been_copied(paged: ModuleType) -> None:
    tensor, other = filled(), torch.zeros(1)
    paged.pageout(tensor)
    for _ in range(10**6):
        other.add_(1)
        if state(tensor) == "paged_out":
            break
    assert state(tensor) == "paged_out"
    assert paged.stats().pageouts == 1


@counts_exactly
@pytest.mark.parametrize("ask", [state, is_resident, lambda t: (t.shape, t.device, t.dtype, t.is_contiguous())])
def test_asking_moves_nothing(ask: Callable[[torch.Tensor], Any], paged: ModuleType) -> None:
    tensor = filled()
    paged_out(tensor)
    ask(tensor)
    repr(paged.stats())
    assert state(tensor) == "paged_out"


def test_state_is_one_of_six_words_for_tensors_and_storages() -> None:
    tensor = filled()
    assert state(tensor) in STATES
    torch_lms.pageout(tensor)
    assert state(tensor.untyped_storage()) in STATES
    torch_lms.wait()
    assert state(tensor) in STATES


def test_what_autograd_saved_may_be_out_when_backward_needs_it() -> None:
    def gradients(page: bool) -> list[torch.Tensor]:
        leaf = torch.rand(64, 64, generator=generator(1), requires_grad=True)
        hidden = leaf.exp()
        result = (hidden.sigmoid() * hidden).sum()
        if page:
            paged_out(leaf, hidden)
        result.backward()
        if page:
            assert leaf.grad is not None
            paged_out(leaf.grad)
        assert leaf.grad is not None
        return [result.detach(), leaf.grad, leaf.detach()]

    assert all(torch.equal(mine, plain) for mine, plain in zip(gradients(True), gradients(False), strict=True))


def test_paging_changes_nothing_that_autograd_looks_at() -> None:
    leaf = torch.nn.Parameter(filled().float())
    version = leaf._version
    paged_out(leaf)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert leaf._version == version
    torch_lms.prefetch(leaf)
    torch_lms.wait()
    assert leaf._version == version


# --- the end of a storage --------------------------------------------------------------------------------


@counts_exactly
@pytest.mark.parametrize("moment", ["enqueued", "out", "prefetched"])
def test_a_storage_may_die_at_any_moment(moment: str, paged: ModuleType) -> None:
    used_before = paged.stats().host_used_bytes
    tensor = filled()
    paged.pageout(tensor)
    if moment != "enqueued":
        paged.wait()
    if moment == "prefetched":
        paged.prefetch(tensor)
    del tensor
    gc.collect()
    paged.wait()
    stats = paged.stats()
    assert (stats.paged_out_storages, stats.paged_out_bytes) == (0, 0)
    assert stats.host_used_bytes == used_before


@counts_exactly
def test_what_died_is_not_paged_in_again(paged: ModuleType) -> None:
    tensor = filled()
    paged_out(tensor)
    del tensor
    paged.wait()
    assert paged.stats().pageins == 0


def test_resize_of_what_is_out_keeps_its_bytes() -> None:
    tensor = filled()
    paged_out(tensor)
    tensor.resize_(NBYTES // 2)
    assert torch.equal(tensor[: NBYTES // 4], filled())


def test_what_was_resized_behind_our_back_while_out_goes_out_again() -> None:
    tensor = filled()
    paged_out(tensor)
    torch._C.StorageBase.resize_(tensor.untyped_storage(), 2 * NBYTES)
    paged_out(tensor)
    assert torch.equal(tensor, filled())


def test_new_data_for_what_is_out() -> None:
    tensor, other = filled(), filled(1)
    paged_out(tensor)
    tensor.data = other
    assert torch.equal(tensor, filled(1))


# --- pin --------------------------------------------------------------------------------------------------


def test_a_pinned_storage_is_resident_and_refuses_page_outs() -> None:
    tensor = filled()
    paged_out(tensor)
    torch_lms.pin(tensor)
    assert state(tensor) == "resident"
    with raises_saying(PageoutError, found=f"{NBYTES} bytes on cpu", do="page out a copy"):
        torch_lms.pageout(tensor[:3])
    assert state(tensor) == "resident"
    assert torch.equal(tensor, filled())
    unpin(tensor)


@counts_exactly
def test_pins_are_counted(paged: ModuleType) -> None:
    tensor = filled()
    paged.pin(tensor)
    paged.pin(tensor.untyped_storage())
    unpin(tensor)
    with pytest.raises(PageoutError):
        paged.pageout(tensor)
    unpin(tensor)
    assert paged.pageout(tensor) == 1


def test_pin_calls_a_page_out_off() -> None:
    tensor = filled()
    torch_lms.pageout(tensor)
    torch_lms.pin(tensor)
    torch_lms.wait()
    assert state(tensor) == "resident"
    unpin(tensor)


def test_unpin_of_what_is_not_pinned_is_refused() -> None:
    tensor = filled()
    with raises_saying(LmsError, found="one that has not", do="call pin first"):
        unpin(tensor)
    torch_lms.pin(tensor)
    unpin(tensor)
    with raises_saying(LmsError, found="one that has not", do="call pin first"):
        unpin(tensor)


def test_a_numpy_array_of_what_was_out_keeps_sharing_its_memory() -> None:
    tensor = filled()
    paged_out(tensor)
    array = tensor.numpy()
    with raises_saying(PageoutError, found="pinned", do="page out a copy"):
        torch_lms.pageout(tensor)
    tensor[0] = 12345
    assert array[0] == 12345
    array[1] = 54321
    assert tensor[1] == 54321


def test_a_dlpack_capsule_of_what_was_out_keeps_sharing_its_memory() -> None:
    tensor = filled()
    paged_out(tensor)
    other = torch.from_dlpack(tensor)
    with raises_saying(PageoutError, found="pinned", do="page out a copy"):
        torch_lms.pageout(tensor)
    other[0] = 12345
    assert tensor[0] == 12345


# --- ops while something is out ---------------------------------------------------------------------


def test_what_ops_have_used_before_it_went_out_comes_in_for_the_next() -> None:
    other = filled(1)
    paged_out(other)  # ops are observed from here on
    tensor = filled()
    expected = tensor + 4
    for _ in range(3):
        tensor.add_(1)
    paged_out(tensor)
    assert state(tensor) == "paged_out"
    tensor.add_(1)
    assert is_resident(tensor)
    assert torch.equal(tensor, expected)
    assert not is_resident(other)


def test_what_ops_have_used_while_it_was_smaller_comes_in_for_the_next() -> None:
    other, tensor = filled(1), filled()
    expected = tensor + 1
    paged_out(other, tensor)
    torch_lms.prefetch(tensor)
    torch_lms.wait()
    kept = tensor.clone()
    tensor.untyped_storage().resize_(0)
    tensor[:0].neg_()
    tensor.untyped_storage().resize_(NBYTES)
    tensor.copy_(kept)
    paged_out(tensor)
    assert state(tensor) == "paged_out"
    tensor.add_(1)
    assert is_resident(tensor)
    assert torch.equal(tensor, expected)
