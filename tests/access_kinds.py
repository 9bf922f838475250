"""The kinds of access to a tensor that paging has to survive, as functions of one tensor.

Each takes a float32 matrix of 8 x 6 whose storage may be anywhere, uses it, and returns what it found. It may write to
the tensor: what is left in it is compared as well.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["CPU_ONLY", "KINDS"]

Kind = Callable[[torch.Tensor], Any]
KINDS: dict[str, Kind] = {}
CPU_ONLY: set[str] = set()


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def cpu_only(function: Kind) -> Kind:
    CPU_ONLY.add(function.__name__)
    return function


def each(**kinds: Kind) -> None:
    """Kinds that fit a line."""
    KINDS.update(kinds)


# --- reads ---------------------------------------------------------------------------------------------------------

each(
    add=lambda t: t + 1,
    matmul=lambda t: t @ t.T,
    einsum=lambda t: torch.einsum("ij,kj->ik", t, t),
    index=lambda t: t[3, 2],
    index_by_tensor=lambda t: t[torch.tensor([1, 5], device=t.device)],
    mask=lambda t: t[t > 0],
    where=lambda t: torch.where(t > 0, t, -t),
    sort=lambda t: tuple(t.sort(dim=1)),
    cat_in_a_list=lambda t: torch.cat([t, t * 2]),
    stack_in_a_list=lambda t: torch.stack([t, t]),
    foreach=lambda t: torch._foreach_mul([t, t], 2.0),
    chunk=lambda t: t.chunk(3),
    cumsum=lambda t: t.cumsum(0),
    fft=lambda t: torch.fft.fft(t).abs(),
    linalg=lambda t: torch.linalg.qr(t),
    clone=lambda t: t.clone(),
    to_dtype=lambda t: t.to(torch.float64),
    to_host=lambda t: t.to("cpu", copy=True),
    equal=lambda t: torch.equal(t, t),
    allclose=lambda t: torch.allclose(t, t),
    item=lambda t: t[0, 0].item(),
    as_float=lambda t: float(t.sum()),
    truth=lambda t: bool(t[0, 0] > 0),
    tolist=lambda t: t.tolist(),
    text=lambda t: repr(t),
    format_item=lambda t: f"{t[1, 1]:.6f}",
    iterate=lambda t: [row.sum() for row in t],
    contains=lambda t: 3.5 in t,
    unbind=lambda t: t.unbind(),
    topk=lambda t: tuple(t.topk(2)),
    unique=lambda t: t.round().unique(),
    nonzero=lambda t: (t > 0).nonzero(),
    histogram=lambda t: t.detach().cpu().histogram(4),
    complex_pairs=lambda t: torch.view_as_complex(t.view(8, 3, 2)).abs(),
    bits=lambda t: t.view(torch.int32).sum(),
    conjugate=lambda t: torch.complex(t, t).conj() * 2,
    quantize=lambda t: torch.quantize_per_tensor(t.cpu(), 0.1, 3, torch.quint8).int_repr(),
    sparse_coo=lambda t: t.to_sparse() @ t.T,
    sparse_csr=lambda t: t.to_sparse_csr() @ t.T,
    nested=lambda t: torch.nested.nested_tensor([t[:2], t[:5]]).to_padded_tensor(0.0),
    detach=lambda t: t.detach() * 2,
    expand=lambda t: t[:1].expand(4, 6) + 1,
    as_strided=lambda t: t.as_strided((4, 3), (12, 2)) + 1,
    transpose=lambda t: t.T.contiguous(),
    flip=lambda t: t.flip(0),
    unfold=lambda t: t.unfold(0, 2, 2).sum(-1),
    lazy_clone=lambda t: torch._lazy_clone(t) + 1,
)


@kind
def sparse_values(t: torch.Tensor) -> Any:
    indices = torch.arange(8, device=t.device)
    return torch.sparse_coo_tensor(torch.stack([indices, indices]), t[:, 0], (8, 8)).to_dense()


@kind
def inference_mode(t: torch.Tensor) -> Any:
    with torch.inference_mode():
        return (t * 2).clone()


@kind
def autocast(t: torch.Tensor) -> Any:
    with torch.autocast(t.device.type, torch.bfloat16):
        return functional.linear(t, t).float()


@kind
def new_thread(t: torch.Tensor) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(t * 3))
    thread.start()
    thread.join()
    return found


# --- out of PyTorch and back ---------------------------------------------------------------------------------------


@kind
def to_numpy(t: torch.Tensor) -> Any:
    array = t.detach().cpu().numpy()
    return torch.from_numpy(array.copy())


@kind
@cpu_only
def numpy_writes_are_seen(t: torch.Tensor) -> Any:
    array = t.numpy()
    array[2, 3] = 17.0
    return t[2, 3]


@kind
def dlpack(t: torch.Tensor) -> Any:
    return torch.from_dlpack(t.detach()) + 1


@kind
def deep_copy(t: torch.Tensor) -> Any:
    return copy.deepcopy(t)


@kind
def pickled(t: torch.Tensor) -> Any:
    return pickle.loads(pickle.dumps(t.detach()))


@kind
def saved_and_loaded(t: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"t": t, "alias": t[2]}, file)
    file.seek(0)
    return torch.load(file)


@kind
def storage_as_list(t: torch.Tensor) -> Any:
    return t.detach().cpu().untyped_storage().tolist()


@kind
def storage_clone(t: torch.Tensor) -> Any:
    return torch.tensor([], device=t.device).set_(t.untyped_storage().clone(), 0, (8, 6))


@kind
def tensor_on_the_storage(t: torch.Tensor) -> Any:
    return torch.tensor([], device=t.device).set_(t.untyped_storage(), 6, (2, 6)) * 2


@kind
@cpu_only
def raw_address(t: torch.Tensor) -> Any:
    floats = ctypes.cast(t.data_ptr(), ctypes.POINTER(ctypes.c_float))
    floats[5] = 2.5
    return [floats[index] for index in range(t.numel())]


@kind
@cpu_only
def share_memory(t: torch.Tensor) -> Any:
    return t.share_memory_() * 2


# --- writes --------------------------------------------------------------------------------------------------------

each(
    add_in_place=lambda t: t.add_(1),
    fill=lambda t: t.fill_(3),
    assign_slice=lambda t: t[2:4].zero_(),
    copy_from=lambda t: t.copy_(torch.arange(6.0, device=t.device)),
    copy_to=lambda t: torch.zeros(8, 6).copy_(t),
    out_into=lambda t: torch.mul(t, 2, out=t),
    foreach_in_place=lambda t: torch._foreach_add_([t], 1.0),
    scatter_add=lambda t: t.scatter_add_(0, torch.zeros(1, 6, dtype=torch.int64, device=t.device), t[:1].clone()),
    masked_fill=lambda t: t.masked_fill_(t > 0, -1),
    swap_rows=lambda t: t.copy_(t.flip(0).clone()),
    set_item=lambda t: t.__setitem__((1, slice(None)), 4.0),
    resize_smaller=lambda t: t.resize_(2, 3),
    lazy_clone_written=lambda t: torch._lazy_clone(t).add_(1),
)


@kind
def write_through_a_view(t: torch.Tensor) -> Any:
    t.view(-1)[7:9].mul_(5)
    return t.sum()


@kind
def write_through_an_alias(t: torch.Tensor) -> Any:
    t.detach().transpose(0, 1)[0] = 9
    return t.sum()


@kind
def write_then_read_from_a_thread(t: torch.Tensor) -> Any:
    thread = threading.Thread(target=lambda: t.add_(2))
    thread.start()
    thread.join()
    return t * 1


@kind
def random_in_place(t: torch.Tensor) -> Any:
    torch.manual_seed(5)
    return t.uniform_()


@kind
def resize_larger(t: torch.Tensor) -> Any:
    t.resize_(16, 6)[8:] = 0
    return t[:8].clone()


@kind
def storage_resized(t: torch.Tensor) -> Any:
    t.untyped_storage().resize_(4 * 60)
    return t * 2


@kind
def data_assigned(t: torch.Tensor) -> Any:
    other = torch.zeros(3, device=t.device)
    other.data = t
    return other + 1


# --- autograd ------------------------------------------------------------------------------------------------------


@kind
def saved_for_backward(t: torch.Tensor) -> Any:
    weight = torch.ones(6, 4, device=t.device, requires_grad=True)
    (t @ weight).square().sum().backward()
    return weight.grad


@kind
def leaf_gradient(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    (leaf.sin() * leaf).sum().backward()
    return leaf.grad


@kind
def double_backward(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)


@kind
def accumulated_gradient(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    for factor in (1, 2):
        (leaf * factor).square().sum().backward()
    return leaf.grad


def _checkpointed(t: torch.Tensor, *, reentrant: bool) -> Any:
    leaf = t.detach().requires_grad_()
    checkpoint(lambda x: (x.exp() * x).sin(), leaf, use_reentrant=reentrant).sum().backward()
    return leaf.grad


each(
    checkpoint=lambda t: _checkpointed(t, reentrant=False),
    checkpoint_reentrant=lambda t: _checkpointed(t, reentrant=True),
    vmap=lambda t: torch.vmap(lambda row: row.dot(row))(t),
    func_grad=lambda t: torch.func.grad(lambda x: x.sin().sum())(t),
    func_jvp=lambda t: torch.func.jvp(torch.sin, (t,), (t,)),
    func_jacrev=lambda t: torch.func.jacrev(lambda x: x.square().sum(0))(t),
    func_hessian=lambda t: torch.func.hessian(lambda x: (x**3).sum())(t[0]),
)


@kind
def saved_tensor_changed_in_place(t: torch.Tensor) -> Any:
    leaf = torch.ones(8, 6, device=t.device, requires_grad=True)
    product = leaf * t
    t.add_(1)
    try:
        product.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return "no error"


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@kind
def custom_function(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    _Scale.apply(leaf).sum().backward()
    return leaf.grad


@kind
def gradient_hook(t: torch.Tensor) -> Any:
    leaf = t.detach().requires_grad_()
    leaf.register_hook(lambda gradient: gradient * t)
    leaf.square().sum().backward()
    return leaf.grad


@kind
def functional_call(t: torch.Tensor) -> Any:
    layer = nn.Linear(6, 8, bias=False, device=t.device)
    return torch.func.functional_call(layer, {"weight": t}, (t,))


# --- modules, optimizers, compilers -----------------------------------------------------------------------------------

each(
    linear_weight=lambda t: functional.linear(torch.ones(2, 6, device=t.device), t),
    embedding=lambda t: functional.embedding(torch.tensor([1, 7], device=t.device), t),
    layer_norm=lambda t: functional.layer_norm(t, (6,)),
    convolution=lambda t: functional.conv1d(t[None], t[:, :3].reshape(3, 8, 1)),
    attention=lambda t: functional.scaled_dot_product_attention(*(t.view(1, 2, 4, 6),) * 3),
    dropout=lambda t: (torch.manual_seed(3), functional.dropout(t))[1],
    cross_entropy=lambda t: functional.cross_entropy(t, torch.zeros(8, dtype=torch.int64, device=t.device)),
    script=lambda t: torch.jit.script(_twice)(t),
    trace=lambda t: torch.jit.trace(_twice, torch.ones(8, 6, device=t.device))(t),
    compiled_graph=lambda t: torch.compile(_twice, backend="aot_eager")(t),
)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu()


@kind
def lstm(t: torch.Tensor) -> Any:
    torch.manual_seed(1)
    network = nn.LSTM(6, 4).to(t.device)
    return network(t)[0]


@kind
def module_parameter(t: torch.Tensor) -> Any:
    torch.manual_seed(1)
    layer = nn.Linear(6, 8, device=t.device)
    layer.weight = nn.Parameter(t)
    layer(t).sum().backward()
    return layer.weight.grad


@kind
def loaded_into_a_module(t: torch.Tensor) -> Any:
    layer = nn.Linear(6, 8, bias=False, device=t.device)
    layer.load_state_dict({"weight": t})
    return layer.weight.detach()


def _optimized(t: torch.Tensor, **options: Any) -> Any:
    parameter = nn.Parameter(t)
    optimizer = torch.optim.Adam([parameter], lr=0.1, **options)
    for _ in range(2):
        parameter.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameter.detach()


each(
    optimizer=lambda t: _optimized(t, foreach=False),
    optimizer_foreach=lambda t: _optimized(t, foreach=True),
    optimizer_fused=lambda t: _optimized(t, fused=True),
)


class _Logging(torch.Tensor):
    """A subclass that sees functions."""


@kind
def tensor_subclass(t: torch.Tensor) -> Any:
    return (t.as_subclass(_Logging) * 2).as_subclass(torch.Tensor)


@kind
def dispatch_mode(t: torch.Tensor) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        product = t @ t.T
    return product, counter.get_total_flops()
