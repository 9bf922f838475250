"""Copies that the host keeps of bytes that have come in: they spare a page-out, and no write is lost for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torch_lms
from tests.unit.foreign_code import TO_READ, TO_WRITE, load, needs_compiler
from tests.unit.markers import counts_exactly
from torch_lms.swap import state

MIB = 1 << 20
NUMEL = MIB // 4
SEVEN = 7.0


# --- programs that only read their weights ----------------------------------------------------------------------


@counts_exactly
def test_weights_beyond_the_limit_are_copied_out_once(paged: ModuleType) -> None:
    paged.enable({"cpu": 12 * MIB}, min_bytes="64KiB")
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512, bias=False) for _ in range(24)]  # of 1 MiB each

    @torch.no_grad()
    def infer() -> torch.Tensor:
        x = torch.ones(4, 512)
        for layer in layers:
            x = layer(x).tanh()
        return x

    first = infer()
    infer()
    before = paged.stats()
    results = [infer() for _ in range(4)]
    after = paged.stats()
    assert all(torch.equal(result, first) for result in results)
    assert after.pageout_bytes == before.pageout_bytes > 0
    assert after.dropped_bytes - before.dropped_bytes >= 4 * 12 * MIB
    assert after.pagein_bytes - before.pagein_bytes >= 4 * 12 * MIB
    assert after.peak_allocated_bytes <= 12 * MIB
    paged.disable()
    assert torch.equal(infer(), first)


@counts_exactly
def test_a_weight_that_is_written_now_and_then_is_copied_again(paged: ModuleType) -> None:
    paged.enable({"cpu": 8 * MIB}, min_bytes="64KiB")
    weights = [torch.full((NUMEL,), float(number)) for number in range(16)]
    for turn in range(12):
        weights[turn].add_(100)
        sums = [weight.sum().item() for weight in weights]
        written = [100.0 if number <= turn else 0.0 for number in range(16)]
        assert sums == [(number + more) * NUMEL for number, more in enumerate(written)]
    stats = paged.stats()
    assert stats.dropped_bytes > 0
    assert stats.pageouts > 16


# --- writes ---------------------------------------------------------------------------------------------------------


def out(tensor: torch.Tensor) -> None:
    torch_lms.pageout(tensor)
    torch_lms.wait()
    assert state(tensor) == "paged_out"


def leaves_without_a_copy(tensor: torch.Tensor) -> bool:
    """Pages out; whether the host's copy was good enough."""
    before = torch_lms.stats().dropped_bytes
    out(tensor)
    return torch_lms.stats().dropped_bytes - before == tensor.nbytes


@pytest.fixture
def kept(paged: ModuleType, chaos: bool) -> Iterator[torch.Tensor]:
    """Ones that have come in, of which the host has a copy."""
    if chaos:
        pytest.skip("where storages are is chaos's own")
    paged.enable({"cpu": 1 << 30}, min_bytes="64KiB")
    tensor = torch.ones(NUMEL)
    out(tensor)
    assert tensor.sum().item() == NUMEL
    yield tensor
    paged.disable()


def to_seven_at(address: int, numel: int = NUMEL) -> None:
    ctypes.memmove(address, (ctypes.c_float * numel)(*[SEVEN] * numel), 4 * numel)


def _step(kind: type[torch.optim.Optimizer], **arguments: Any) -> Callable[[torch.Tensor], object]:
    """A step that takes ones to sevens."""

    def write(tensor: torch.Tensor) -> None:
        parameter = nn.Parameter(tensor)
        parameter.grad = torch.full_like(tensor, -6.0)
        kind([parameter], **arguments).step()

    return write


def _custom(tensor: torch.Tensor) -> None:
    _to_seven(tensor)


@torch.library.custom_op("torch_lms_tests::to_seven", mutates_args=("a",))
def _to_seven(a: torch.Tensor) -> None:
    a.numpy()[:] = SEVEN


@torch.library.custom_op("torch_lms_tests::to_seven_at", mutates_args=("a",))
def _to_seven_at_its_address(a: torch.Tensor) -> None:
    to_seven_at(a.data_ptr())


def _numpy_later(tensor: torch.Tensor) -> None:
    array = tensor.numpy()
    for _ in range(5):
        torch.ones(100).add_(1)
    array[:] = SEVEN


def _capsule(tensor: torch.Tensor) -> None:
    other = torch.from_dlpack(torch.to_dlpack(tensor))
    torch.ones(100).add_(1)
    other.fill_(SEVEN)


def _dlpack_protocol(tensor: torch.Tensor) -> None:
    other = torch.from_dlpack(tensor)
    torch.ones(100).add_(1)
    other.fill_(SEVEN)


def _lazy_clone_then_write(tensor: torch.Tensor) -> None:
    clone = torch._lazy_clone(tensor)
    tensor.fill_(SEVEN)
    assert clone.sum().item() == NUMEL


def _write_to_a_lazy_clone(tensor: torch.Tensor) -> None:
    clone = torch._lazy_clone(tensor)
    clone.fill_(-1)
    assert tensor.sum().item() == NUMEL
    tensor.fill_(SEVEN)
    assert clone.sum().item() == -NUMEL


def _gradient(tensor: torch.Tensor) -> None:
    leaf = torch.ones(NUMEL, requires_grad=True)
    leaf.grad = tensor
    (leaf * 6).sum().backward()
    assert leaf.grad is tensor


def _same_storage(tensor: torch.Tensor) -> None:
    torch.empty(0).set_(tensor.untyped_storage(), 0, (NUMEL,), (1,)).fill_(SEVEN)


def _batch_norm(tensor: torch.Tensor) -> None:
    """The running mean is written inside of the op."""
    given = torch.full((2, NUMEL), SEVEN)
    nn.functional.batch_norm(given, tensor, torch.ones(NUMEL), training=True, momentum=1.0)


def _compiled(tensor: torch.Tensor) -> None:
    torch.compile(lambda x: x.add_(6), backend="aot_eager")(tensor)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(6),
    "in place, twice": lambda tensor: tensor.add_(1).add_(5),
    "through a view": lambda tensor: tensor.view(4, -1).t().fill_(SEVEN),
    "part by part": lambda tensor: [tensor[i::4].fill_(SEVEN) for i in range(4)],
    "items": lambda tensor: tensor.__setitem__(slice(None), SEVEN),
    "by a mask": lambda tensor: tensor.__setitem__(tensor > 0, SEVEN),
    "by indices": lambda tensor: tensor.index_put_((torch.arange(NUMEL),), torch.tensor(SEVEN)),
    "out=": lambda tensor: torch.add(torch.ones(NUMEL), 6, out=tensor),
    "matmul with out=": lambda tensor: torch.mm(
        torch.full((512, 1), SEVEN), torch.ones(1, 512), out=tensor.view(512, 512)
    ),
    "copied to": lambda tensor: tensor.copy_(torch.full((NUMEL,), SEVEN)),
    "copied to, of another type": lambda tensor: tensor.copy_(torch.full((NUMEL,), 7)),
    "data": lambda tensor: tensor.data.fill_(SEVEN),
    "without gradients": torch.no_grad()(lambda tensor: tensor.fill_(SEVEN)),
    "in inference mode": torch.inference_mode()(lambda tensor: tensor.fill_(SEVEN)),
    "foreach": lambda tensor: torch._foreach_add_([torch.ones(3), tensor], 6),
    "sgd, one by one": _step(torch.optim.SGD, lr=1.0, foreach=False),
    "sgd, foreach": _step(torch.optim.SGD, lr=1.0, foreach=True),
    "sgd, fused": _step(torch.optim.SGD, lr=1.0, fused=True),
    "gradient": _gradient,
    "batch norm": _batch_norm,
    "data_ptr": lambda tensor: to_seven_at(tensor.data_ptr()),
    "data_ptr of a view": lambda tensor: [to_seven_at(part.data_ptr(), NUMEL // 4) for part in tensor.view(4, -1)],
    "storage's data_ptr": lambda tensor: to_seven_at(tensor.untyped_storage().data_ptr()),
    "storage": lambda tensor: tensor.untyped_storage().copy_(torch.full((NUMEL,), SEVEN).untyped_storage()),
    "another tensor of its storage": _same_storage,
    "numpy": lambda tensor: tensor.numpy().fill(SEVEN),
    "numpy, later": _numpy_later,
    "numpy, of a view": lambda tensor: tensor.view(2, -1).t().numpy().fill(SEVEN),
    "DLPack": _dlpack_protocol,
    "DLPack's capsule": _capsule,
    "itself, after a lazy clone": _lazy_clone_then_write,
    "itself, after its lazy clone": _write_to_a_lazy_clone,
    "custom op with numpy": _custom,
    "custom op with data_ptr": _to_seven_at_its_address,
    "compiled": _compiled,
}
PINNED_AFTER = {"numpy", "numpy, later", "numpy, of a view", "DLPack", "DLPack's capsule", "custom op with numpy"}
ITS_OWN_MEMORY = {"itself, after a lazy clone", "itself, after its lazy clone"}


@pytest.mark.parametrize("write", WRITES)
def test_no_write_is_lost(write: str, kept: torch.Tensor) -> None:
    assert leaves_without_a_copy(kept)  # so that a write that nobody noticed would be lost
    assert kept.sum().item() == NUMEL
    WRITES[write](kept)
    if write not in PINNED_AFTER | ITS_OWN_MEMORY:
        assert not leaves_without_a_copy(kept)
    assert (kept == SEVEN).all()
    if write in PINNED_AFTER:
        with pytest.raises(torch_lms.errors.PageoutError):
            torch_lms.pageout(kept)
    assert (kept == SEVEN).all()


@pytest.mark.parametrize("write", WRITES)
def test_no_write_is_lost_under_pressure(write: str, paged: ModuleType) -> None:
    paged.enable({"cpu": 12 * MIB}, min_bytes="64KiB")
    tensor = torch.ones(NUMEL)
    others = [torch.full((NUMEL,), float(number)) for number in range(16)]
    for _ in range(3):
        assert [other.sum().item() for other in (tensor, *others)] == [NUMEL, *(i * NUMEL for i in range(16))]
    WRITES[write](tensor)
    for _ in range(3):
        assert [other.sum().item() for other in (*others, tensor)] == [*(i * NUMEL for i in range(16)), SEVEN * NUMEL]


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "op": lambda tensor: tensor + 1,
    "several inputs": lambda tensor: torch.mm(tensor.view(512, 512), tensor.view(512, 512).t()),
    "linear": lambda tensor: nn.functional.linear(torch.ones(4, 512), tensor.view(512, 512)),
    "layer norm": lambda tensor: nn.functional.layer_norm(tensor.view(512, 512), (512,)),
    "layer norm's weight": lambda tensor: nn.functional.layer_norm(torch.ones(2, NUMEL), (NUMEL,), tensor),
    "group norm": lambda tensor: nn.functional.group_norm(tensor.view(512, 512), 4),
    "batch norm": lambda tensor: nn.functional.batch_norm(
        tensor.view(512, 512), torch.zeros(512), torch.ones(512), training=True
    ),
    "norm": lambda tensor: torch.linalg.vector_norm(tensor),
    "view": lambda tensor: tensor.view(512, 512).t()[3:5].contiguous(),
    "clone": lambda tensor: tensor.clone(),
    "item": lambda tensor: tensor[5].item(),
    "tolist": lambda tensor: tensor[:9].tolist(),
    "foreach": lambda tensor: torch._foreach_add([tensor, torch.ones(3)], 1),
    "saved for a backward": lambda tensor: (torch.ones(NUMEL, requires_grad=True) * tensor).sum().backward(),
    "repr": repr,
}


@pytest.mark.parametrize("read", READS)
def test_to_read_leaves_the_copy_good(read: str, kept: torch.Tensor) -> None:
    READS[read](kept)
    assert leaves_without_a_copy(kept)
    assert kept.sum().item() == NUMEL


def test_the_copy_goes_with_the_tensor(kept: torch.Tensor) -> None:
    assert torch_lms.stats().host_used_bytes == kept.nbytes
    alias = kept.view(4, -1)
    assert leaves_without_a_copy(kept)
    alias.sum()
    assert torch_lms.stats().host_used_bytes == kept.nbytes
    kept.fill_(SEVEN)
    out(kept)
    assert torch_lms.stats().host_used_bytes == kept.nbytes
    assert (alias == SEVEN).all()


def test_the_copies_end_with_automatic_mode(kept: torch.Tensor) -> None:
    torch_lms.disable()
    assert torch_lms.stats().host_used_bytes == 0
    assert not leaves_without_a_copy(kept)
    assert kept.sum().item() == NUMEL


# --- another extension's code ------------------------------------------------------------------------------------


compiled = [needs_compiler, pytest.mark.slow, pytest.mark.timeout(400)]  # it is compiled once


@pytest.mark.parametrize("way", [pytest.param(way, marks=compiled) for way in TO_WRITE])
@pytest.mark.parametrize("gil", ["", "_without_gil"])
def test_no_write_of_another_extension_is_lost(way: str, gil: str, kept: torch.Tensor) -> None:
    write = getattr(load(), "write" + gil)
    assert leaves_without_a_copy(kept)
    assert kept.sum().item() == NUMEL
    write(way, kept, SEVEN, 1)
    assert (kept == SEVEN).all()
    assert not leaves_without_a_copy(kept)
    assert (kept == SEVEN).all()


@pytest.mark.parametrize("way", [pytest.param(way, marks=compiled) for way in TO_READ])
def test_what_another_extension_reads_is_right(way: str, kept: torch.Tensor) -> None:
    assert load().read(way, kept, 1) == NUMEL
    out(kept)
    assert load().read(way, kept, 1) == NUMEL
    assert kept.sum().item() == NUMEL


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(400)
def test_no_write_of_another_librarys_op_is_lost(kept: torch.Tensor) -> None:
    load()
    assert leaves_without_a_copy(kept)
    torch.ops.torch_lms_foreign.fill(kept, SEVEN)
    assert not leaves_without_a_copy(kept)
    assert (kept == SEVEN).all()
