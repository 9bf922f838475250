"""Kinds of access to tensors: ops, one entry each. `raw_access_kinds` holds those that bypass the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from torch_lms._core import core

__all__ = [
    "OP_KINDS",
    "AccessKind",
    "Make",
    "complex_vector",
    "integers",
    "matrices",
    "skip_what_nothing_tells_of",
    "vectors",
]

Make = Callable[[str], list[torch.Tensor]]


def matrices(device: str) -> list[torch.Tensor]:
    """Two square ones; more than a page of memory."""
    return [torch.randn(40, 40).to(device), torch.randn(40, 40).to(device)]


def vectors(device: str) -> list[torch.Tensor]:
    return [torch.randn(7).to(device), torch.randn(7).to(device)]


def scalar(device: str) -> list[torch.Tensor]:
    return [torch.tensor(3.0).to(device).clone()]


def integers(device: str) -> list[torch.Tensor]:
    return [torch.tensor([2, 0, 1, 2]).to(device).clone(), torch.randn(3, 5).to(device)]


def complex_vector(device: str) -> list[torch.Tensor]:
    return [torch.randn(6, dtype=torch.complex64).to(device)]


def images(device: str) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 8, 8).to(device), torch.randn(4, 3, 3, 3).to(device)]


def heads(device: str) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 6, 8).to(device) for _ in range(3)]


def many(device: str) -> list[torch.Tensor]:
    return [torch.randn(11).to(device) for _ in range(12)]


def coordinates(device: str) -> list[torch.Tensor]:
    return [torch.tensor([[0, 1, 2], [2, 0, 1]]).to(device).clone(), torch.randn(3).to(device)]


def compressed(device: str) -> list[torch.Tensor]:
    indices = (torch.tensor([0, 1, 2, 4]), torch.tensor([1, 0, 0, 2]))
    return [*(index.to(device).clone() for index in indices), torch.randn(4).to(device)]


@dataclass(frozen=True, kw_only=True)
class AccessKind:
    """An access: what it is made on and what it does. What it returns may alias its tensors."""

    name: str
    access: Callable[..., Any]
    make: Make = matrices
    pins: bool = False  # the address is given away for good: the first tensor refuses to be paged out
    cpu_only: bool = False


def _statement(run: Callable[..., Any]) -> Callable[..., Any]:
    """An access that returns its first tensor, for its effect on it."""

    def access(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        run(first, *others)
        return first

    return access


def _set_items(a: torch.Tensor, b: torch.Tensor) -> None:
    a[0] = 1.5
    a[1, 2:4] = b[0, :2]
    a[a > 0.5] = -1.0


def _autocast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast(a.device.type, dtype=torch.bfloat16):
        return torch.mm(a, b)


def _inference(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        a.add_(b)
        return [a + b, a[1:3]]


def _no_grad(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return a.mul_(2).add(b)


def _profiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.profiler.profile(record_shapes=True):
        return (a @ b).relu()


def _dispatched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Pass(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Pass():
        return (a + b).mul_(a)


def _rnn(module: str) -> Callable[..., Any]:
    def access(*parameters_and_input: torch.Tensor) -> Any:
        *parameters, given = parameters_and_input
        rnn = getattr(torch.nn, module)(5, 4, batch_first=True).to(given.device)
        names = [name for name, _ in rnn.named_parameters()]
        named = dict(zip(names, (torch.nn.Parameter(value) for value in parameters), strict=True))
        return torch.func.functional_call(rnn, named, given)

    return access


def _rnn_tensors(gates: int) -> Make:
    shapes = [(gates * 4, 5), (gates * 4, 4), (gates * 4,), (gates * 4,), (2, 3, 5)]
    return lambda device: [torch.randn(shape).to(device) for shape in shapes]


def _without_record_function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Nothing tells us of these ops: the host copy has to serve, or the materializer to page in."""
    torch._C._autograd._enable_record_function(False)
    try:
        a.add_(b)
        return [a @ b, a + 1]
    finally:
        torch._C._autograd._enable_record_function(True)


def skip_what_nothing_tells_of(kind: str, state: str) -> None:
    """Without the materializer, a write that no callback sees may come after the copy of a page-in under way."""
    if kind == "record_function_off" and state == "prefetch_enqueued" and not core.has_materializer:
        pytest.skip("ops without record functions may not write to what is on its way in: it needs torch 2.13")


def _kinds(entries: Sequence[tuple[str, Callable[..., Any], Make]]) -> list[AccessKind]:
    return [AccessKind(name=name, access=access, make=make) for name, access, make in entries]


_READS: list[tuple[str, Callable[..., Any], Make]] = [
    ("add", torch.add, matrices),
    ("add_scalar", lambda a, _: a + 1.5, matrices),
    ("sum", lambda a, _: a.sum(0), matrices),
    ("matmul", torch.matmul, matrices),
    ("addmm", lambda a, b: torch.addmm(a, b, a, beta=0.5), matrices),
    ("linear", lambda a, b: F.linear(a, b, b[0]), matrices),
    ("conv2d", lambda x, w: F.conv2d(x, w, padding=1), images),
    ("embedding", F.embedding, integers),
    ("embedding_bag", lambda i, w: F.embedding_bag(i.view(2, 2), w), integers),
    ("sdpa", F.scaled_dot_product_attention, heads),
    ("layer_norm", lambda a, b: F.layer_norm(a, (40,), b[0], b[1]), matrices),
    ("softmax", lambda a, _: a.softmax(1), matrices),
    ("cross_entropy", lambda a, _: F.cross_entropy(a, torch.arange(40, device=a.device)), matrices),
    ("cat", lambda *tensors: torch.cat(tensors), many),
    ("stack", lambda *tensors: torch.stack(tensors), many),
    ("broadcast_tensors", lambda a, b: torch.broadcast_tensors(a, b[0]), matrices),
    ("einsum", lambda a, b: torch.einsum("ij,jk->ki", a, b), matrices),
    ("foreach_add", lambda *tensors: torch._foreach_add(tensors[:6], tensors[6:]), many),
    ("foreach_norm", lambda *tensors: torch._foreach_norm(tensors), many),
    ("where", lambda a, b: torch.where(a > b, a, b), matrices),
    ("index_select", lambda i, w: w.index_select(0, i), integers),
    ("index_by_tensor", lambda i, w: w[i, i], integers),
    ("index_by_mask", lambda a, b: a[b > 0], matrices),
    ("gather", lambda i, w: w.gather(0, i.view(1, 4)), integers),
    ("sort", lambda a, _: torch.sort(a, stable=True), matrices),
    ("topk", lambda a, _: a.topk(3), matrices),
    ("unique", lambda i, _: i.unique(return_counts=True), integers),
    ("nonzero", lambda i, _: i.nonzero(), integers),
    ("cumsum", lambda a, _: a.cumsum(0), matrices),
    ("norm", lambda a, _: torch.linalg.vector_norm(a, 3), matrices),
    ("solve", lambda a, b: torch.linalg.solve(a, b), matrices),
    ("fft", lambda a, _: torch.fft.rfft(a), matrices),
    ("clone", lambda a, _: a.clone(), matrices),
    ("to_other_dtype", lambda a, _: a.to(torch.float64), matrices),
    ("to_memory_format", lambda x, _: x.to(memory_format=torch.channels_last), images),
    ("contiguous_of_transposed", lambda a, _: a.t().contiguous(), matrices),
    ("to_device", lambda a, _: a.cpu(), matrices),
    ("equal", torch.equal, matrices),
    ("allclose", torch.allclose, matrices),
    ("new_tensor_like", lambda a, _: torch.zeros_like(a) + a, matrices),
    ("meta_like", lambda a, _: str(torch.empty_like(a, device="meta").shape), matrices),
    ("dropout", lambda a, _: F.dropout(a, 0.5), matrices),
    ("bernoulli", lambda a, _: torch.bernoulli(a.sigmoid()), matrices),
    ("conj_and_real", lambda c: [c.conj() * c, torch.view_as_real(c), c.imag], complex_vector),
    ("autocast", _autocast, matrices),
    ("inference_mode", _inference, matrices),
    ("no_grad", _no_grad, matrices),
    ("profiler", _profiled, matrices),
    ("dispatch_mode", _dispatched, matrices),
    ("rnn", _rnn("RNN"), _rnn_tensors(1)),
    ("lstm", _rnn("LSTM"), _rnn_tensors(4)),
    ("gru", _rnn("GRU"), _rnn_tensors(3)),
    ("record_function_off", _without_record_function, matrices),
    ("sparse_coo_from_parts", lambda i, v: torch.sparse_coo_tensor(i, v, (3, 3)).coalesce(), coordinates),
    ("sparse_coo_mm", lambda i, v: torch.sparse_coo_tensor(i, v, (3, 3)) @ torch.eye(3, device=v.device), coordinates),
    ("sparse_csr_from_parts", lambda r, c, v: torch.sparse_csr_tensor(r, c, v, (3, 3)), compressed),
    ("sparse_csr_mm", lambda r, c, v: torch.sparse_csr_tensor(r, c, v, (3, 3)) @ v[:3].view(3, 1), compressed),
    ("to_sparse", lambda i, _: i.to_sparse(), integers),
    ("nested_from_parts", lambda a, b: torch.nested.nested_tensor([a, b[:3]]), matrices),
]

_WRITES: list[tuple[str, Callable[..., Any], Make]] = [
    ("add_", lambda a, b: a.add_(b), matrices),
    ("mul_scalar_", lambda a, _: a.mul_(0.5), matrices),
    ("add_itself_", lambda a, _: a.add_(a), matrices),
    ("copy_into", lambda a, b: a.copy_(b), matrices),
    ("copy_out_of", lambda a, b: [torch.zeros_like(a).copy_(b), b], matrices),
    ("fill_", lambda a, _: a.fill_(2.0), matrices),
    ("zero_", lambda a, _: a.zero_(), matrices),
    ("uniform_", lambda a, _: a.uniform_(), matrices),
    ("clamp_", lambda a, _: a.clamp_(-0.5, 0.5), matrices),
    ("transpose_", lambda a, _: a.t_().add_(1), matrices),
    ("set_items", _statement(_set_items), matrices),
    ("masked_fill_", lambda a, b: a.masked_fill_(b > 0, 7.0), matrices),
    ("index_add_", lambda i, w: w.index_add_(0, i, torch.ones(4, 5, device=w.device)), integers),
    ("index_put_accumulate_", lambda i, w: w.index_put_((i,), w[:1] * 2, accumulate=True), integers),
    ("scatter_", lambda i, w: w.scatter_(0, i.view(1, 4), 9.0), integers),
    ("addmm_", lambda a, b: a.addmm_(b, b), matrices),
    ("out", lambda a, b: torch.mul(b, 2, out=a), matrices),
    ("out_of_matmul", lambda a, b: torch.mm(b, b, out=a), matrices),
    ("out_that_is_resized", lambda a, b: torch.cat([b, b], out=a.resize_(0)), matrices),
    ("two_outs", lambda a, _: torch.sort(a, out=(a, torch.empty(0, dtype=torch.int64, device=a.device))), matrices),
    ("foreach_add_", lambda *tensors: torch._foreach_add_(tensors[:6], tensors[6:]), many),
    ("foreach_copy_", lambda *tensors: torch._foreach_copy_(tensors[:6], tensors[6:]), many),
    ("foreach_zero_", lambda *tensors: torch._foreach_zero_(tensors[:6]), many),
    ("view_as_real_", lambda c: [torch.view_as_real(c).mul_(2), c], complex_vector),
    ("view_of_dtype_", lambda a, _: [a.view(torch.int32).bitwise_xor_(1), a], matrices),
    ("resize_bigger", _statement(lambda a, _: a.resize_(60, 40)[40:].zero_()), matrices),
    ("resize_smaller", lambda a, _: a.resize_(10, 10), matrices),
    ("set_of_tensor", lambda a, b: [a.set_(b).add_(1), b], matrices),
    ("data_add_", lambda a, _: [a.data.add_(1), a], matrices),
    ("detached_add_", lambda a, _: [a.detach().add_(1), a], matrices),
    ("nn_init", lambda a, _: torch.nn.init.orthogonal_(a), matrices),
]

OP_KINDS: list[AccessKind] = _kinds(_READS) + _kinds(_WRITES)
